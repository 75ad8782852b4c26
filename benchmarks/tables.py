"""The bars, and the tables made of the newest measurement of each side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Newest = Mapping[tuple[str, str], Record]


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
    least: float | None
    aim: float | None


def seconds(record: Record) -> float:
    """Seconds of a step."""
    return float(record["seconds"])


def pace(record: Record) -> float:
    """Seconds per completion token; shown as tokens per second."""
    return float(record["seconds"]) / float(record["completion_tokens"])


def memory(record: Record) -> float:
    """Peak memory of the process in GiB; the ratio is to be small."""
    return float(record["peak_gib"])


GENERATE = ("dynamic", "static", "continuous")
BARS = (
    Bar("A", "whole step, 8 × 8 × 64, prompts of 41 tokens", "A", ("trl",), seconds, 1.7, 2.1),
    Bar("A′", "the same with LoRA, r = 16", "A-lora", ("trl",), seconds, 1.8, 2.3),
    Bar("B", "as A, half of the groups without spread", "B", ("trl",), seconds, 2.6, 3.2),
    Bar("C", "whole step, 4 × 8 × 32, prompts of 401 tokens", "C", ("trl",), seconds, 5.0, 7.0),
    Bar("D", "whole step, long-tailed lengths, mean 64, longest 256", "D", ("trl",), seconds, 3.0, 4.0),
    Bar("E", "rollouts, 64 rows × 64", "E-64", GENERATE, pace, 1.7, 2.3),
    Bar("E", "rollouts, 256 rows × 64", "E-256", GENERATE, pace, 1.7, 2.3),
    Bar("E", "rollouts, 64 rows × 64, prompts of 401 tokens", "E-prompt", GENERATE, pace, 3.0, 5.0),
    Bar("E′", "the same 64 rows, vLLM in float32", "E-64", ("vllm",), pace, 1.5, 2.0),
    Bar("E′", "the same 64 rows, llama.cpp in F32", "E-64", ("llama-f32",), pace, None, None),
    Bar("E′", "the same 64 rows, llama.cpp in Q8_0", "E-64", ("llama-q8_0",), pace, None, None),
    Bar("E′", "the same 64 rows, llama.cpp in Q4_0", "E-64", ("llama-q4_0",), pace, 1.1, 1.5),
    Bar("F", "peak memory of A", "A", ("trl",), memory, 0.8, 0.6),
    Bar("F", "peak memory of C", "C", ("trl",), memory, 0.45, 0.3),
    Bar("G", "`grpo_tiny` until reward 0.9", "G", ("trl",), seconds, 3.0, 5.0),
)
"""What the project wants to reach against others; H, against the processor itself, has a row of its own kind."""
MATRIX_SHARE = (0.7, 0.8)


def report(records: Sequence[Record], scale: str, device: str, threads: int) -> str:
    """Return the bars and the growth as Markdown tables, from the newest record of each side."""
    newest = {
        (one["name"], one["side"]): one
        for one in records
        if (one["scale"], one["device"], one["threads"]) == (scale, device, threads)
    }
    tables = [
        _table("| | workload | ours | against | ratio | at least | aim |", [*_bars(newest), *_matrix_rate(newest)]),
        _table("| case | tokens forwarded | trained | TFLOP | seconds | GFLOP/s | GiB added |", [*_growth(newest)]),
        _table("| workload | side | seconds | rollout | forward | backward | optimizer |", [*_stages(newest)]),
    ]
    small = ["scale small, which tries the scripts out: the ratios mean nothing"] if scale != "full" else []
    return "\n\n".join([*small, *filter(None, tables), _where(newest, threads, device)])


def _table(header: str, rows: Sequence[str]) -> str:
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *rows]) if rows else ""


def _bars(newest: Newest) -> Iterator[str]:
    for bar in BARS:
        ours = newest.get((bar.measured, "ours"))
        others = [newest[bar.measured, side] for side in bar.theirs if (bar.measured, side) in newest]
        if ours is None or not others:
            continue
        theirs = min(others, key=bar.quantity)
        ratio = bar.quantity(ours) / bar.quantity(theirs)
        shown = [_shown(bar, ours), f"{theirs['side']} {_shown(bar, theirs)}"]
        unit = "" if bar.quantity is memory else "×"
        wanted = [f"{value:g}{unit}" if value else "" for value in (bar.least, bar.aim)]
        cells = [bar.label, bar.what, *shown, f"{ratio if bar.quantity is memory else 1 / ratio:.2f}{unit}", *wanted]
        yield f"| {' | '.join(cells)} |"


def _shown(bar: Bar, record: Record) -> str:
    value = bar.quantity(record)
    if bar.quantity is pace:
        return f"{1 / value:.0f} tok/s"
    return f"{value:.2f} {'GiB' if bar.quantity is memory else 's'}"


def _matrix_rate(newest: Newest) -> Iterator[str]:
    if ("H", "ours") in newest:
        one = newest["H", "ours"]
        rates = (
            f"{one['tflop'] * 1e3 / one['pass_seconds']:.1f} GFLOP/s | the products alone {one['matrix_gflops']:.1f}"
        )
        wanted = " | ".join(f"{share:.0%}" for share in MATRIX_SHARE)
        yield f"| H | training pass of A, share of the matrix rate | {rates} | {one['share']:.1%} | {wanted} |"


def _growth(newest: Newest) -> Iterator[str]:
    for (name, _), one in newest.items():
        if name.startswith(("size-", "split-")):
            rate = one["tflop"] * 1e3 / one["pass_seconds"]
            counts = f"{one['forward_tokens']} | {one['trained_tokens']} | {one['tflop']:.2f}"
            yield f"| {name} | {counts} | {one['pass_seconds']:.2f} | {rate:.1f} | {one['added_gib']:.2f} |"


def _stages(newest: Newest) -> Iterator[str]:
    for (name, side), one in newest.items():
        stages = one.get("stages", {})
        if "rollout" in stages:
            cells = [f"{stages.get(stage, 0.0):.2f}" for stage in ("rollout", "forward", "backward", "optimizer")]
            yield f"| {name} | {side} | {one['seconds']:.2f} | {' | '.join(cells)} |"


def _where(newest: Newest, threads: int, device: str) -> str:
    used = sorted({f"{name} {number}" for one in newest.values() for name, number in one["versions"].items()})
    machines = sorted({one["machine"] for one in newest.values()})
    return f"{'; '.join(machines)}; threads: {threads}; device: {device}; {', '.join(used)}."
