"""Our side, in a process of its own: the run that `toolbox train` would build, on a given workload."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forcing import ending_our_rows
from probe import Stages, answer, count_backward, finish, forget_peak, job_of, peak_gib, resident_gib
from weights import warm_optimizer, warm_up
from workloads import Workload, reached, write_prompts

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.cli.train import run_composed
from grpo_toolbox.config.build import build_run
from grpo_toolbox.config.folder import claim_run_dir
from grpo_toolbox.config.inputs import check_inputs
from grpo_toolbox.models.load import load_tokenizer
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import train
from grpo_toolbox.types import RunInfo, Step


class Recorder(Callback):
    """Writes down every step, and keeps the last from being saved: a checkpoint is no part of what is measured."""

    def __init__(self, run: Run, stages: Stages, device: str) -> None:
        self._run, self._stages, self._device = run, stages, device
        self.steps: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self._cpu = 0.0

    def on_start(self, info: RunInfo) -> None:
        """Start the clock of the processor's seconds."""
        self._cpu = time.process_time()

    def on_step(self, step: Step) -> None:
        """Take the step's times; they were measured before any callback."""
        stages = {name: step.metrics.get(f"time/{name}", 0.0) for name in ("rollout", "reward")} | self._stages.taken()
        stages["forward"] = step.metrics["time/update"] - stages.get("backward", 0.0) - stages.get("optimizer", 0.0)
        self.lengths = [len(one.ids) for one in step.rollouts]
        self.steps.append(
            {
                "seconds": step.metrics["time/step"],
                "cpu_seconds": time.process_time() - self._cpu,
                "stages": stages,
                "peak_gib": peak_gib(self._device),
                "trained_rows": int(step.metrics["rows_trained"]),
                "forward_tokens": int(step.metrics["forward_tokens"]),
                "completion_tokens": sum(self.lengths),
                "grad_norm": step.metrics["grad_norm"],
            }
        )
        self._run.saved = self._run.finished
        self._cpu = time.process_time()


def measure_steps(job: dict[str, Any]) -> dict[str, Any]:
    """Train `job["steps"]` steps and return what each took."""
    load = Workload(**job["workload"])

    def work(run: Run) -> dict[str, Any]:
        stages = Stages(job["device"])
        warm_up(run.policy, job["device"])
        warm_optimizer(run.optimizer)
        count_backward(stages)
        run.optimizer.step = stages.timed("optimizer", run.optimizer.step)  # type: ignore[method-assign]
        recorder = Recorder(run, stages, job["device"])
        run.callbacks = [recorder]
        loaded = resident_gib(job["device"])
        with ending_our_rows(load, run.policy):
            train(run)
        if sorted(recorder.lengths) != sorted(load.lengths()):
            raise SystemExit(f"completions of {sorted(recorder.lengths)} tokens, not {sorted(load.lengths())}")
        return {"steps": recorder.steps, "loaded_gib": loaded}

    return on_workload(load, job, work)


def measure_rollouts(job: dict[str, Any]) -> dict[str, Any]:
    """Generate the workload's completions `job["steps"]` times."""
    load = Workload(**job["workload"])

    def work(run: Run) -> dict[str, Any]:
        prompts = run.data.next(load.prompts)
        warm_up(run.policy, job["device"])
        run.engine.generate(prompts[:1], 2, replace(run.sampling, max_new_tokens=2, min_new_tokens=2))
        forget_peak(job["device"])
        steps = []
        for turn in range(job["steps"]):
            finish(job["device"])
            started = time.perf_counter()
            rollouts = run.engine.generate(prompts, load.group_size, replace(run.sampling, seed=turn))
            seconds = time.perf_counter() - started
            tokens = sum(len(one.ids) for one in rollouts)
            steps.append({"seconds": seconds, "completion_tokens": tokens, "peak_gib": peak_gib(job["device"])})
        return {"steps": steps}

    return on_workload(load, job, work)


class Reached(Exception):
    """The reward is as high as it was to become."""


class UntilReward(Callback):
    """Ends a run when the mean reward of ten steps reaches a goal; counts the seconds from the first step on."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self.rewards: list[float] = []
        self.seconds = 0.0
        self._started = time.perf_counter()

    def on_start(self, info: RunInfo) -> None:
        """Start the clock: everything is built."""
        self._started = time.perf_counter()

    def on_step(self, step: Step) -> None:
        """Count the step."""
        self.rewards.append(step.metrics["reward_mean"])
        self.seconds = time.perf_counter() - self._started
        if reached(self.rewards, self._goal):
            raise Reached


def measure_learning(job: dict[str, Any]) -> dict[str, Any]:
    """Train `experiment=grpo_tiny` with a seed until its reward is reached."""

    def work(run: Run) -> dict[str, Any]:
        goal = UntilReward(job["goal"])
        run.callbacks = [goal]
        with contextlib.suppress(Reached):
            train(run)
        return {"seconds": goal.seconds, "optimizer_steps": len(goal.rewards), "rewards": goal.rewards}

    words = ["experiment=grpo_tiny", f"trainer.seed={job['seed']}", f"trainer.max_steps={job['max_steps']}"]
    return on_run(words, work)


def on_workload(load: Workload, job: dict[str, Any], work: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Build the run of a workload and do `work` on it."""
    with tempfile.TemporaryDirectory() as scratch:
        data = write_prompts(load, load_tokenizer(job["model"]), Path(scratch) / "prompts.jsonl")
        return on_run(overrides(load, job, data), work)


def on_run(words: list[str], work: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Build a run exactly as `toolbox train <words>` does, and do `work` on it."""
    found: list[dict[str, Any]] = []

    def task(checked: tuple[Any, dict[str, Any]]) -> int:
        config, plain = checked
        inputs = check_inputs(config)
        with claim_run_dir(config, plain) as info:
            found.append(work(build_run(config, inputs, info)))
        return 0

    with tempfile.TemporaryDirectory() as scratch:
        run_composed("train", ["callbacks=none", f"run_dir={scratch}/run", *words], task)
    return found[0]


def overrides(load: Workload, job: dict[str, Any], data: Path) -> list[str]:
    """Return the command line of a workload."""
    return [
        f"model.path={job['model']}",
        f"model.lora.r={load.lora_rank}",
        f"data.path={data}",
        "data.columns.answer=null",
        "data.shuffle=false",
        "reward=custom",
        "reward.name=workloads:fixed_reward",
        "objective=grpo",
        "objective.beta=0",
        f"rollout.prompts_per_step={load.prompts}",
        f"rollout.group_size={load.group_size}",
        f"rollout.max_new_tokens={load.max_new_tokens}",
        f"rollout.min_new_tokens={load.max_new_tokens}",
        f"trainer.max_steps={job['steps']}",
        "trainer.lr=1e-6",
        f"trainer.device={job['device']}",
        *job.get("overrides", ()),
    ]


if __name__ == "__main__":
    given = job_of(sys.argv[1:])
    answer({"steps": measure_steps, "rollouts": measure_rollouts, "learning": measure_learning}[given["what"]](given))
