"""Append-only files of one JSON object per line that stay whole through a kill and a resume."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STEP = re.compile(rb'\{"step": ?(\d+)[,}]')
"""How every line begins: the step stands first, so that finding where to cut a file of gigabytes parses no JSON."""

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class JsonLines:
    """An open jsonl file: whole lines only, on disk as soon as `write` returns."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open `path` for the steps from `first_step` on; lines of those steps that it already holds are dropped.

        From step 1 on that is all of it: the evaluation before training is written again as step 0.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_steps(path, first_step if first_step > 1 else 0)
        # A lone surrogate (half an emoji, cut by a token limit) is written as its JSON escape instead of failing.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record (its first key is `step`) and flush."""
        self._file.write("".join(ENCODER.encode(record) + "\n" for record in records))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_steps(path: Path, first_step: int) -> None:
    """Cut the file at its first line of a step >= `first_step`, and cut a last line that was never finished."""
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for line in file:
            step = STEP.match(line)
            if not line.endswith(b"\n") or (step and int(step[1]) >= first_step):
                break
            end += len(line)
        file.truncate(end)


def finite(value: float) -> float | None:
    """Return the number (NumPy's, too, as a plain one), or None where strict JSON cannot write it: NaN, infinities."""
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def short(value: float) -> float | None:
    """Return the number to the 7 digits that float32 holds (0.1, not 0.10000000149011612), None if not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that JSON can hold (images, bytes, dates are left out), non-finite numbers as null."""
    kept = {}
    for name, value in columns.items():
        try:
            kept[name] = json.loads(json.dumps(value), parse_constant=lambda _: None)
        except (TypeError, ValueError, RecursionError):  # the user's own data, of any type
            continue
    return kept
