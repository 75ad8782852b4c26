"""Results: one JSON line per measurement, and the table of bars made from the newest line of each side."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from probe import SideFailed, machine, other_load, versions

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy")
Record = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One line of the table: how many times better our side is, and what it has to be."""

    label: str
    what: str
    measured: str
    """The workload whose records are compared."""
    theirs: tuple[str, ...]
    """The other side; of several the best counts."""
    quantity: Callable[[Record], float]
    unit: str
    least: float
    aim: float
    share: bool = False
    """Whether the ratio is ours/theirs (memory, which is to be small) and not how many times faster we are."""


def seconds(record: Record) -> float:
    """Seconds of a step."""
    return float(record["seconds"])


def rate(record: Record) -> float:
    """Seconds per completion token: its inverse is shown."""
    return float(record["seconds"]) / float(record["completion_tokens"])


def memory(record: Record) -> float:
    """Peak memory of the process in GiB."""
    return float(record["peak_gib"])


GENERATE = ("dynamic", "static")
BARS = (
    Bar("A", "whole step, 8 × 8 × 64, prompts of 41 tokens", "A", ("trl",), seconds, "s", 1.7, 2.1),
    Bar("A′", "the same with LoRA, r = 16", "A-lora", ("trl",), seconds, "s", 1.8, 2.3),
    Bar("B", "as A, half of the groups without spread", "B", ("trl",), seconds, "s", 2.6, 3.2),
    Bar("C", "whole step, 4 × 8 × 32, prompts of 401 tokens", "C", ("trl",), seconds, "s", 5.0, 7.0),
    Bar("D", "whole step, long-tailed lengths, mean 64, longest 256", "D", ("trl",), seconds, "s", 3.0, 4.0),
    Bar("E", "rollouts, 64 rows × 64", "E-64", GENERATE, rate, "tok/s", 1.7, 2.3),
    Bar("E", "rollouts, 256 rows × 64", "E-256", GENERATE, rate, "tok/s", 1.7, 2.3),
    Bar("E", "rollouts, 64 rows × 64, prompts of 401 tokens", "E-prompt", GENERATE, rate, "tok/s", 3.0, 5.0),
    Bar("E′", "the same 64 rows, vLLM", "E-64", ("vllm",), rate, "tok/s", 1.5, 2.0),
    Bar("E′", "the same 64 rows, llama.cpp in F32", "E-64", ("llama-f32",), rate, "tok/s", 1.5, 2.0),
    Bar("E′", "the same 64 rows, llama.cpp in Q4_0", "E-64", ("llama-q4_0",), rate, "tok/s", 1.1, 1.5),
    Bar("F", "peak memory of A", "A", ("trl",), memory, "GiB", 0.8, 0.6, share=True),
    Bar("F", "peak memory of C", "C", ("trl",), memory, "GiB", 0.45, 0.3, share=True),
    Bar("G", "`grpo_tiny` until reward 0.9", "G", ("trl",), seconds, "s", 3.0, 5.0),
)
"""What the project wants to reach; the training pass's share of the matrix rate (H) has a script of its own."""


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
    print(f"{name:9} {side:12} {_described(line)}", flush=True)
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
    return f"{line['seconds']:8.2f} s  {line['peak_gib']:5.2f} GiB{speed}  {stages}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table(records: Sequence[Record], scale: str, device: str, threads: int) -> str:
    """Return the bars as a Markdown table, from the newest record of each side."""
    newest = {
        (one["name"], one["side"]): one
        for one in records
        if (one["scale"], one["device"], one["threads"]) == (scale, device, threads)
    }
    lines = ["| | workload | ours | against | ratio | at least | aim |", "|---|---|---|---|---|---|---|"]
    lines += _rows(newest)
    used = sorted({f"{name} {number}" for one in newest.values() for name, number in one["versions"].items()})
    where = sorted({one["machine"] for one in newest.values()})
    return "\n".join([*lines, "", f"{'; '.join(where)}; {threads} threads; {device}; {', '.join(used)}."])


def _rows(newest: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    for bar in BARS:
        ours = newest.get((bar.measured, "ours"))
        others = [newest[bar.measured, side] for side in bar.theirs if (bar.measured, side) in newest]
        if ours is None or not others:
            continue
        theirs = min(others, key=bar.quantity)
        ratio = bar.quantity(ours) / bar.quantity(theirs)
        reached = f"{ratio:.2f}" if bar.share else f"{1 / ratio:.2f}×"
        wanted = [f"{value:g}" if bar.share else f"{value:g}×" for value in (bar.least, bar.aim)]
        shown = [_shown(bar, ours), f"{theirs['side']} {_shown(bar, theirs)}"]
        yield f"| {bar.label} | {bar.what} | {shown[0]} | {shown[1]} | {reached} | {wanted[0]} | {wanted[1]} |"


def _shown(bar: Bar, record: Record) -> str:
    value = bar.quantity(record)
    return f"{1 / value:.0f} tok/s" if bar.unit == "tok/s" else f"{value:.2f} {bar.unit}"


# ---- the command line ------------------------------------------------------------------------------------------------


def parser(description: str | None, names: Sequence[str], sides: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options that every script has."""
    options = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    options.add_argument("--only", default=",".join(names), help="what to measure, of " + ", ".join(names))
    options.add_argument("--sides", default=",".join(sides), help="which sides, of " + ", ".join(sides))
    options.add_argument("--scale", default="full", choices=("full", "small"), help="small: to try the script out")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=1, help="of which the median counts")
    options.add_argument("--model", default="builtin:smollm2", help="a folder, or builtin:smollm2")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--out", type=Path, default=Path("runs/benchmarks.jsonl"), help="results, one JSON a line")
    return options


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; `only` and `sides` become lists that hold known names."""
    arguments = options.parse_args(argv)
    for name in ("only", "sides"):
        known = options.get_default(name).split(",")
        chosen = [one for one in getattr(arguments, name).split(",") if one]
        if unknown := [one for one in chosen if one not in known]:
            options.error(f"--{name} {','.join(unknown)}: known are {', '.join(known)}")
        setattr(arguments, name, chosen)
    arguments.load_before = round(other_load(), 2)
    return arguments


def run_sides(arguments: argparse.Namespace, measure: Callable[[str, str, argparse.Namespace], Any]) -> None:
    """Measure every chosen side of every chosen name, print the table, and exit with 1 where a side failed.

    A side that fails does not keep the others from being measured.
    """
    failed = []
    for name in arguments.only:
        for side in arguments.sides:
            try:
                measure(name, side, arguments)
            except SideFailed as failure:
                print(f"{name:9} {side:12} FAILED\n{failure}", flush=True)
                failed.append(f"{name} {side}")
    report(arguments)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def report(arguments: argparse.Namespace) -> None:
    """Print the table of everything in the results file at this scale, device and number of threads."""
    if arguments.scale != "full":
        print("\nscale small, which tries the scripts out: the ratios mean nothing")
    print("\n" + table(read(arguments.out), arguments.scale, arguments.device, arguments.threads))
