"""The training pass of A as a share of the processor's own matrix rate: bar H.

    python benchmarks/matrix_rate.py --repeats 3

Numerator: the operations of the packed forward and backward pass (benchmarks/flops.py counts them exactly) divided by
the seconds of the update without the optimizer's own. Denominator: the rate of the same matrix products, in the same
shapes, by themselves, right before and right after in the same process. Norms, rotations, softmax, the loss, clipping
and Python are what the share loses.
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
from workloads import as_job, workload


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the tables."""
    arguments = parser(__doc__, ("H",), ("ours",)).parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        run_sides(arguments, measure)


def measure(name: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own and write it down."""
    job = {
        "what": "pass",
        "workload": as_job(workload("A", arguments.scale)),
        "model": arguments.model,
        "device": arguments.device,
        "steps": arguments.repeats,
    }
    return record(name, side, arguments, in_child("training.py", job, arguments.threads))


if __name__ == "__main__":
    main()
