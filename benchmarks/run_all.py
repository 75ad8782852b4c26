"""Every bar of docs/benchmarks.md, or some of them, one after the other; each measurement in a process of its own.

    python benchmarks/run_all.py                            # everything but E′; nothing else may run meanwhile
    python benchmarks/run_all.py --only A,B --sides ours    # one side again; the tables take the newest of each
    python benchmarks/run_all.py --scale small              # try everything out
    python benchmarks/run_all.py --only ""                  # measure nothing, print the tables

E′ needs --xllamacpp-python and --vllm-python: benchmarks/servers.py says how to make them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import growth
import learning
import matrix_rate
import rollouts
import servers
import steps
from results import Measure, parser, run_cases
from weights import ready_model
from workloads import ROLLOUTS

Part = tuple[Sequence[str], Sequence[str], Measure]
BARS: dict[str, Part] = {
    "A": (("A",), steps.SIDES, steps.measure),
    "A-lora": (("A-lora",), steps.SIDES, steps.measure),
    "B": (("B",), steps.SIDES, steps.measure),
    "C": (("C",), steps.SIDES, steps.measure),
    "D": (("D",), steps.SIDES, steps.measure),
    "E": (tuple(ROLLOUTS), rollouts.SIDES, rollouts.measure),
    "E-servers": ((servers.NAME,), servers.SIDES, servers.measure),
    "G": (("G",), learning.SIDES, learning.measure),
    "H": (("H",), ("ours",), matrix_rate.measure),
    "growth": (tuple(growth.CASES), ("ours",), growth.measure),
}
"""By bar: the names and the sides that are measured for it, and how. F is read off A and C."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen bars, write down, print the tables."""
    sides = dict.fromkeys(side for _, sides, _ in BARS.values() for side in sides)
    options = parser(__doc__, tuple(BARS), tuple(sides))
    options.set_defaults(only=",".join(bar for bar in BARS if bar != "E-servers"))
    steps.add_options(options)
    servers.add_options(options)
    arguments = options.parse_args(argv)
    cases = [
        (name, side, measure)
        for names, sides, measure in map(BARS.__getitem__, arguments.only)
        for name in names
        for side in sides
        if side in arguments.sides
    ]
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        run_cases(arguments, cases)


if __name__ == "__main__":
    main()
