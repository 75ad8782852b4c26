"""Reading what a reward function returned: one finite number, None or dict per completion, and nothing else."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.errors import RewardError

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Rewards become float32 tensors: a larger number would arrive there as infinity."""

ALLOWED = "one finite number per completion, or None where the reward does not apply"


@dataclass(frozen=True)
class Values:
    """The readable form of a function's answer, one entry per completion."""

    scores: list[float | None]
    extras: dict[str, list[Any]]
    errors: dict[int, Exception]
    """Rows for which the function returned an exception instead of a score."""


def read_values(returned: Any, size: int, name: str, place: Callable[[int], str]) -> Values:
    """Read the answer of reward `name` on `size` completions.

    Lists, tuples, numpy arrays and torch tensors are taken, of shape (n,) or (n, 1); a bool counts as 0 or 1. A row may
    be a dict with a `score` (its other keys become extra columns) or an exception (that row's failure). Everything
    else is a RewardError that names the function, the completion (through `place`) and the value.
    """
    rows = _plain(returned)
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Sequence):
        raise RewardError(f"reward {name!r} returned {reprlib.repr(returned)}, not a list: it must return {ALLOWED}.")
    if len(rows) != size:
        raise RewardError(
            f"reward {name!r} returned {len(rows)} values for {size} completions: it must return {ALLOWED}."
        )
    values = Values(scores=[None] * size, extras={}, errors={})
    for index, row in enumerate(rows):
        if isinstance(row, Exception):
            values.errors[index] = row
            continue
        if type(row) is not float and isinstance(row, Mapping):
            row = _split_extras(row, index, values.extras, size, f"reward {name!r} returned", place)
        problem, score = read_number(row)
        if problem:
            raise RewardError(
                f"reward {name!r} returned {reprlib.repr(row)} for {place(index)}, {problem}: it must return {ALLOWED}."
            )
        values.scores[index] = score
    return values


def read_number(value: Any) -> tuple[str, float | None]:
    """What is wrong with `value` as a reward (empty when nothing is), and the reward."""
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:  # the usual case; NaN is not within
        return "", value
    value = _plain(value)
    if isinstance(value, list | tuple) and len(value) == 1:  # a column of shape (n, 1)
        value = _plain(value[0])
    if value is None:
        return "", None
    if not isinstance(value, numbers.Real):
        return "which is not a number", None
    try:
        score = float(value)
    except OverflowError:  # an integer beyond float64
        return "which overflows float32", None
    if math.isnan(score) or math.isinf(score):
        return "which is not finite", None
    if abs(score) > FLOAT32_MAX:
        return "which overflows float32", None
    return "", score


def _plain(value: Any) -> Any:
    """Numpy arrays and scalars and torch tensors as Python lists and numbers, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _split_extras(
    row: Mapping[str, Any],
    index: int,
    extras: dict[str, list[Any]],
    size: int,
    returned: str,
    place: Callable[[int], str],
) -> Any:
    """Put a dict's other keys into `extras` and return its score."""
    if "score" not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise RewardError(
            f"{returned} a dict without 'score' for {place(index)} (its keys: {keys}). Add the key 'score'."
        )
    for key, value in row.items():
        if key != "score":
            extras.setdefault(str(key), [None] * size)[index] = value
    return row["score"]
