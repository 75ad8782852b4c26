"""Rollouts alone, ours against `model.generate` at its better cache: bar E.

    python benchmarks/rollouts.py
    python benchmarks/rollouts.py --only E-prompt --sides ours --repeats 3
    python benchmarks/rollouts.py --device cuda --sides ours,graphs,dynamic,continuous --repeats 3

`generate` samples with dynamic and with static cache, and the faster one counts. It returns tokens; ours returns their
log-probs as well, and so does transformers' continuous batching, which counts where it is measured. The side `graphs`
is ours with rollout.cuda_graphs=true.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probe import in_child
from results import parser, record, run_sides
from weights import ready_model
from workloads import ROLLOUTS, as_job, workload

SIDES = ("ours", "dynamic", "static")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the table."""
    options = parser(__doc__, tuple(ROLLOUTS), (*SIDES, "continuous", "graphs"))
    options.set_defaults(sides=list(SIDES))
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        run_sides(arguments, measure)


def measure(name: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one side of one workload in a process of its own and write it down."""
    job = {
        "what": "rollouts",
        "workload": as_job(workload(name, arguments.scale)),
        "model": arguments.model,
        "device": arguments.device,
        "steps": arguments.repeats,
        "cache": side,
        "overrides": ["rollout.cuda_graphs=true"] if side == "graphs" else [],
    }
    found = in_child("ours.py" if side in ("ours", "graphs") else "theirs.py", job, arguments.threads)
    return record(name, side, arguments, found)


if __name__ == "__main__":
    main()
