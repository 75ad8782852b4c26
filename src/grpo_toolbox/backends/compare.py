"""Runs of one config on several backends, side by side: rewards, times, memory; from the files they leave."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKENDS = ("toolbox", "trl")
ROWS = 10
"""Stretches of steps that a reward curve is shown in."""


@dataclass(frozen=True)
class Side:
    """What one backend's run left behind."""

    lines: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl, without the evaluation before training."""
    seconds: float
    """Of the whole process, loading included."""
    memory_mib: float
    """The most memory that the process held."""
    gpu_mib: float | None = None
    """The most memory that its tensors held on the GPU, where there is one."""


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a value per side, None where a side has none."""

    label: str
    values: tuple[float | None, ...]
    digits: int = 3


def read_side(run_dir: Path, measured: Path) -> Side:
    """Read a run's metrics and what its process took, which `cli/measured.py` writes."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["step"] > 0]
    return Side(lines, **json.loads(measured.read_text(encoding="utf-8")))


def compare(sides: Sequence[Side]) -> list[Row]:
    """Return the lines of the comparison: the reward curve in stretches of steps, evaluations, seconds, memory."""
    steps = max(len(side.lines) for side in sides)
    size = max(1, -(-steps // ROWS))
    rows = [
        Row(_stretch(start + 1, min(start + size, steps)), _each(sides, "reward_mean", start, start + size))
        for start in range(0, steps, size)
    ]
    rows += [
        Row("held-out reward, last", _of(sides, "eval/reward", lambda values: values[-1])),
        Row("completion tokens, mean", _of(sides, "completion_tokens", statistics.fmean), digits=1),
        Row("seconds in all", tuple(side.seconds for side in sides), digits=1),
        Row("seconds a step, median", _of(sides, "time/step", statistics.median)),
        Row("  of it rollouts", _of(sides, "time/rollout", statistics.median)),
        Row("  of it rewards", _of(sides, "time/reward", statistics.median)),
        Row("  of it the update", _of(sides, "time/update", statistics.median)),
        Row("sampled tokens a second", _of(sides, "tokens_per_s", statistics.median), digits=0),
        Row("peak memory, MiB", tuple(side.memory_mib for side in sides), digits=0),
        Row("peak GPU memory, MiB", tuple(side.gpu_mib for side in sides), digits=0),
    ]
    return [row for row in rows if any(value is not None for value in row.values)]


def _stretch(first: int, last: int) -> str:
    return f"reward, step {first}" if first == last else f"reward, steps {first}-{last}"


def _of(
    sides: Sequence[Side], name: str, summary: Callable[[list[float]], float], start: int = 0, end: int | None = None
) -> tuple[float | None, ...]:
    found = [[line[name] for line in side.lines[start:end] if line.get(name) is not None] for side in sides]
    return tuple(summary(values) if values else None for values in found)


def _each(sides: Sequence[Side], name: str, start: int, end: int) -> tuple[float | None, ...]:
    return _of(sides, name, statistics.fmean, start, end)
