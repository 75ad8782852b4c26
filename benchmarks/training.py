"""Our update by itself, in a process of its own: on completions of random tokens, nothing is generated."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from flops import bare_seconds, flops, pass_of, products
from ours import on_workload
from probe import Stages, answer, count_backward, finish, forget_peak, job_of, peak_gib, resident_gib
from workloads import Workload

from grpo_toolbox.batch import Batch, collate, micro_batches
from grpo_toolbox.run import Run
from grpo_toolbox.types import Rollout
from grpo_toolbox.update import update

HEAD_ROWS = 512
"""Rows of the head's product by itself: of all of them the result would be tokens × vocabulary."""


def measure_pass(job: dict[str, Any]) -> dict[str, Any]:
    """Time the training pass of a workload and, before and after it, its matrix products by themselves."""
    load = Workload(**job["workload"])

    def work(run: Run) -> dict[str, Any]:
        batch = random_batch(run, load)
        config = run.policy.config
        parts = micro_batches(batch, range(len(batch)), run.settings.micro_batch_tokens)
        passes = [pass_of(batch.select(part)) for part in parts]
        work_to_do = sum(flops(config, one) for one in passes)
        step = timed_update(run, job["device"])
        step(batch.select(range(load.group_size)))  # the optimizer's state is made here
        steps = []
        for _ in range(job["steps"]):
            before = _matrix_rate(config, passes, job)
            found = step(batch)
            after = _matrix_rate(config, passes, job)
            rate = (before + after) / 2
            share = work_to_do / found["pass_seconds"] / rate
            steps.append(
                found | {"matrix_gflops": rate / 1e9, "matrix_rates": [before / 1e9, after / 1e9], "share": share}
            )
        return {"steps": steps, "tflop": work_to_do / 1e12, "micro_batches": [one.tokens for one in passes]}

    return on_workload(load, job, work)


def measure_growth(job: dict[str, Any]) -> dict[str, Any]:
    """Time one update of a workload and its memory above what is resident before it."""
    load = Workload(**job["workload"])

    def work(run: Run) -> dict[str, Any]:
        batch = random_batch(run, load)
        one = pass_of(batch)
        step = timed_update(run, job["device"])
        step(batch.select(range(min(load.group_size, len(batch)))))
        found = [step(batch) for _ in range(job["steps"])]
        return {
            "steps": found,
            "tflop": flops(run.policy.config, one) / 1e12,
            "forward_tokens": one.tokens,
            "trained_tokens": one.labels,
        }

    return on_workload(load, job, work)


def random_batch(run: Run, load: Workload) -> Batch:
    """Return the batch of a workload with random completions, every row with an advantage."""
    draw = random.Random(0)
    lengths = load.lengths()
    prompts = run.data.next(load.prompts)
    rollouts = []
    for row, length in enumerate(lengths):
        ids = tuple(draw.randrange(1000, 40000) for _ in range(length))
        rollouts.append(Rollout(prompts[row // load.group_size], ids, (-1.0,) * length, "length", ""))
    signs = torch.ones(load.prompts, load.group_size)
    signs[:, ::2] = -1.0
    return collate(rollouts, signs).to(run.device)


def timed_update(run: Run, device: str) -> Any:
    """Return a function that takes one optimizer step on a batch and returns its seconds and memory."""
    stages = Stages(device)
    count_backward(stages)
    run.optimizer.step = stages.timed("optimizer", run.optimizer.step)  # type: ignore[method-assign]

    def step(batch: Batch) -> dict[str, Any]:
        before = resident_gib(device)
        forget_peak(device)
        stages.taken()
        started = time.perf_counter()
        update(run, batch, 1)
        finish(device)
        seconds = time.perf_counter() - started
        taken = stages.taken()
        rest = seconds - taken["optimizer"]
        stage = taken | {"forward": rest - taken["backward"]}
        peak = peak_gib(device)
        return {"seconds": seconds, "pass_seconds": rest, "stages": stage, "peak_gib": peak, "added_gib": peak - before}

    return step


def _matrix_rate(config: Any, passes: list[Any], job: dict[str, Any]) -> float:
    """Return the operations per second of the passes' products by themselves."""
    all_products = [product for one in passes for product in products(config, one)]
    seconds = sum(
        bare_seconds(product, HEAD_ROWS if product.outer == config.vocab_size else product.rows, job["device"])
        for product in all_products
    )
    return sum(product.flops for product in all_products) / seconds


if __name__ == "__main__":
    given = job_of(sys.argv[1:])
    answer({"pass": measure_pass, "growth": measure_growth}[given["what"]](given))
