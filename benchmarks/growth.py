"""How time and memory of our update grow: with the tokens trained, and with how the same tokens are split.

    python benchmarks/growth.py

Four sizes in one micro-batch each (memory is to grow in proportion), the largest of them again in micro-batches of a
quarter (memory is to stay), and about 1,000 tokens split into prompts and completions in four ways (the rate is to
stay).
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
from workloads import Workload, as_job

WHOLE = 10**6
SIZES = {f"size-{256 * prompts}": (Workload(prompts, 4, 41, 54), WHOLE) for prompts in (1, 2, 4, 8)}
MICRO = {"size-2048-micro": (Workload(8, 4, 41, 54), 512)}
SPLITS = {
    "split-1x16": (Workload(1, 16, 401, 39), WHOLE),
    "split-2x8": (Workload(2, 8, 41, 59), WHOLE),
    "split-8x2": (Workload(8, 2, 64, 32), WHOLE),
    "split-4x8": (Workload(4, 8, 128, 16), WHOLE),
}
CASES = SIZES | MICRO | SPLITS


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the tables."""
    arguments = parser(__doc__, tuple(CASES), ("ours",)).parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        run_sides(arguments, measure)


def measure(name: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in a process of its own and write it down."""
    load, budget = CASES[name]
    if arguments.scale == "small":
        load = replace(load, prompt_tokens=12, max_new_tokens=3)
    job = {
        "what": "growth",
        "workload": as_job(load),
        "model": arguments.model,
        "device": arguments.device,
        "steps": arguments.repeats,
        "overrides": [f"trainer.micro_batch_tokens={budget}"],
    }
    return record(name, side, arguments, in_child("training.py", job, arguments.threads), micro_batch_tokens=budget)


if __name__ == "__main__":
    main()
