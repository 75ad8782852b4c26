"""Seconds until `experiment=grpo_tiny` has a reward of 0.9, ours against TRL's `GRPOTrainer`: bar G.

    python benchmarks/learning.py --threads 1

The same random weights, data, reward, hyper-parameters and AdamW, for eleven seeds of sampling and of the order of
the data; the median counts. The clock runs from the first step to the end of the step whose reward, averaged over ten
steps, reaches 0.9. Building and importing do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from probe import SideFailed, in_child
from results import parser, record, run_sides

SIDES = ("ours", "trl")
SEEDS = tuple(range(11))
"""The number of steps moves by half between seeds, on either side."""
GOAL = 0.9
MAX_STEPS = 1000


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the table."""
    run_sides(parser(__doc__, ("G",), SIDES).parse_args(argv), measure)


def measure(name: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one side, a process for each seed, and write it down; small: 12 steps of one seed."""
    small = arguments.scale == "small"
    script = "ours.py" if side == "ours" else "theirs.py"
    job = {"what": "learning", "goal": GOAL, "max_steps": 12 if small else MAX_STEPS}
    runs = [in_child(script, job | {"seed": seed}, arguments.threads) for seed in (SEEDS[:1] if small else SEEDS)]
    ends = [round(sum(run["rewards"][-10:]) / 10, 3) for run in runs]
    if min(ends) < GOAL and not small:
        raise SideFailed(f"{side}: rewards of {ends} after {[len(run['rewards']) for run in runs]} steps")
    steps = [{"seconds": run["seconds"], "optimizer_steps": run["optimizer_steps"]} for run in runs]
    return record(name, side, arguments, {"steps": steps}, rewards=ends)


if __name__ == "__main__":
    main()
