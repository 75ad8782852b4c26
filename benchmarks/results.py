"""Measurements as JSON lines, and the options and the loop that all scripts share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from probe import SideFailed, machine, versions
from tables import Record, report

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy")
Measure = Callable[[str, str, argparse.Namespace], Any]


# ---- records ---------------------------------------------------------------------------------------------------------


def record(name: str, side: str, arguments: argparse.Namespace, found: Mapping[str, Any], **more: Any) -> Record:
    """Write one measurement down and return it; `found["steps"]` are repeats, of which the median one counts."""
    steps = found["steps"]
    middle = median(step["seconds"] for step in steps)
    chosen = min(steps, key=lambda step: abs(step["seconds"] - middle))
    line = {
        "name": name,
        "side": side,
        "scale": arguments.scale,
        "device": arguments.device,
        "threads": arguments.threads,
        **chosen,
        "peak_gib": max(step.get("peak_gib", 0.0) for step in steps),
        "all_seconds": [step["seconds"] for step in steps],
        **{key: value for key, value in found.items() if key != "steps"},
        **more,
        "versions": versions(*PACKAGES),
        "machine": machine(),
        "load_before": arguments.load_before,
        "command": " ".join([Path(sys.executable).name, *map(_short, sys.argv)]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{name:15} {side:10} {_described(line)}", flush=True)
    return line


def read(path: Path) -> list[Record]:
    """Return all measurements of a file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _short(word: str) -> str:
    return os.path.relpath(word) if os.path.isabs(word) else word


def _described(line: Record) -> str:
    stages = "  ".join(f"{name} {value:.1f}" for name, value in line.get("stages", {}).items())
    tokens = line.get("completion_tokens")
    speed = f"  {tokens / line['seconds']:.0f} tok/s" if tokens else ""
    memory = f"  {line['peak_gib']:5.2f} GiB" if line["peak_gib"] else ""
    return f"{line['seconds']:8.2f} s{memory}{speed}  {stages}"


# ---- the command line ------------------------------------------------------------------------------------------------


def parser(description: str | None, names: Sequence[str], sides: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options that every script has."""
    options = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name, known in (("--only", names), ("--sides", sides)):
        options.add_argument(name, type=_names(known), default=",".join(known), help="some of " + ", ".join(known))
    options.add_argument("--scale", default="full", choices=("full", "small"), help="small: to try the script out")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=1, help="of which the median counts")
    options.add_argument("--model", default="builtin:smollm2", help="a folder, or builtin:smollm2")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--out", type=Path, default=Path("runs/benchmarks.jsonl"), help="results, one JSON a line")
    return options


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read_names(text: str) -> list[str]:
        chosen = [one for one in text.split(",") if one]
        if unknown := [one for one in chosen if one not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return chosen

    return read_names


def run_sides(arguments: argparse.Namespace, measure: Measure) -> None:
    """Measure every chosen side of every chosen name, and print the tables."""
    run_cases(arguments, [(name, side, measure) for name in arguments.only for side in arguments.sides])


def run_cases(arguments: argparse.Namespace, cases: Sequence[tuple[str, str, Measure]]) -> None:
    """Measure each case (name, side, how), print the tables, and exit with 1 where one failed.

    One that fails does not keep the others from being measured.
    """
    failed = []
    for name, side, measure in cases:
        arguments.load_before = round(os.getloadavg()[0], 2)
        try:
            measure(name, side, arguments)
        except SideFailed as failure:
            print(f"{name:15} {side:10} FAILED\n{failure}", flush=True)
            failed.append(f"{name} {side}")
    print("\n" + report(read(arguments.out), arguments.scale, arguments.device, arguments.threads))
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")
