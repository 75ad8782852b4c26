"""Whole optimizer steps on a GPU in bfloat16, ours against TRL's `GRPOTrainer` with `generate`: A, A′, B, C and D.

    python benchmarks/cuda_steps.py                 # ends within ten minutes, whatever is not measured by then
    python benchmarks/cuda_steps.py --model FOLDER  # config and tokenizer are enough: weights are then random

As benchmarks/steps.py, with float32 weights under bfloat16 autocast on both sides, the whole batch in one micro-batch,
and the median of three steps, since the first one prepares kernels. The side `graphs` is ours with
rollout.cuda_graphs=true: whichever rolls out faster is to be the default.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import steps
from probe import SideFailed
from results import parser, run_sides
from weights import ready_model
from workloads import STEPS

MICRO_BATCH_TOKENS = 65536
"""More than a workload has; a device with less memory takes less."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure until all is measured or time is up, print the table."""
    options = parser(__doc__, tuple(STEPS), ("ours", "trl", "graphs"))
    options.add_argument("--micro-batch", type=int, default=64, help="rows that TRL trains at a time")
    options.add_argument("--minutes", type=float, default=9.0, help="after which nothing more is measured")
    options.set_defaults(device="cuda", repeats=3)
    arguments = options.parse_args(argv)
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))

        def measure(name: str, side: str, given: argparse.Namespace) -> Any:
            left = ends - time.monotonic()
            if left < 5:
                raise SideFailed("time is up")
            overrides = [f"trainer.micro_batch_tokens={MICRO_BATCH_TOKENS}"]
            overrides += ["rollout.cuda_graphs=true"] if side == "graphs" else []
            return steps.measure(name, side, given, timeout=left, overrides=overrides)

        run_sides(arguments, measure)


if __name__ == "__main__":
    main()
