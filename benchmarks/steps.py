"""Whole optimizer steps, ours against TRL's `GRPOTrainer`: bars A, A′, B, C and D, and with their peak memory F.

    python benchmarks/steps.py --only A,C
    python benchmarks/steps.py --only A --sides ours --repeats 3
    python benchmarks/steps.py --tune A,C        # which micro-batch TRL likes best

Both sides do the same work: model, prompts, group size, completion lengths, rewards, AdamW, precision, one optimizer
step per batch. Our micro-batches are the default of `trainer.micro_batch_tokens`; TRL's are its fastest, and of equally
fast ones those that take least memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from probe import in_child
from results import parser, record, run_sides
from weights import ready_model
from workloads import STEPS, as_job, workload

SIDES = ("ours", "trl")
MICRO_BATCH = 4
"""TRL's `per_device_train_batch_size` in rows: on A as fast as 8, and with a quarter less memory."""
TUNED_ROWS = 16
"""Rows that `--tune` trains."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the table."""
    options = parser(__doc__, tuple(STEPS), SIDES)
    add_options(options)
    options.add_argument("--sizes", default="2,4,8,16", help="the micro-batches, in rows, that --tune tries")
    options.add_argument("--tune", default="", help="only try TRL's micro-batch sizes on these")
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        if arguments.tune:
            tune(arguments)
            return
        run_sides(arguments, measure)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add what `measure` reads beside the common options."""
    options.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="rows that TRL trains at a time")


def measure(
    name: str, side: str, arguments: argparse.Namespace, *, timeout: float = 3600, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure one side of one workload in a process of its own and write it down.

    `overrides` are for our side, and whatever is not TRL is ours.
    """
    load = workload(name, arguments.scale)
    job: dict[str, Any] = {
        "what": "steps",
        "workload": as_job(load),
        "model": arguments.model,
        "device": arguments.device,
        "steps": arguments.repeats,
    }
    if side != "trl":
        found = in_child("ours.py", {**job, "overrides": list(overrides)}, arguments.threads, timeout)
        return record(name, side, arguments, found, overrides=list(overrides))
    job["micro_batch"] = min(arguments.micro_batch, load.rows)
    found = in_child("theirs.py", job, arguments.threads, timeout)
    return record(name, side, arguments, found, micro_batch=job["micro_batch"])


def tune(arguments: argparse.Namespace) -> None:
    """Try TRL's micro-batch sizes on the training of a few rows: seconds of wall and processor, and memory."""
    for name in arguments.tune.split(","):
        load = workload(name, arguments.scale)
        job = {
            "what": "steps",
            "workload": as_job(replace(load, prompts=TUNED_ROWS // load.group_size)),
            "model": arguments.model,
            "device": arguments.device,
            "steps": arguments.repeats,
            "generate": False,
        }
        for size in map(int, arguments.sizes.split(",")):
            found = in_child("theirs.py", job | {"micro_batch": size}, arguments.threads)
            step = min(found["steps"], key=lambda one: one["cpu_seconds"])
            print(
                f"{name}: micro-batches of {size:2} rows take {step['seconds']:6.1f} s "
                f"({step['cpu_seconds']:6.1f} s of processor), {step['peak_gib']:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
