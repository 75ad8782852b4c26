"""numeric: the number that the completion ends in is the gold number, as in GSM8K."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from grpo_toolbox.rewards.answers import (
    MARKER,
    after_marker,
    after_thinking,
    as_number,
    boxes,
    gold_answer,
    last_number,
    numbers_in,
    own_turn,
)
from grpo_toolbox.rewards.exact import comparison
from grpo_toolbox.rewards.golds import FORMS
from grpo_toolbox.rewards.maths.latex import Unreadable
from grpo_toolbox.rewards.maths.nodes import Named, Value
from grpo_toolbox.rewards.maths.reading import readings
from grpo_toolbox.rewards.maths.units import MULTIPLIERS, NOT_UNITS

_BLANK_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d])")
_WORKINGS = re.compile(r"<<[^<>]*>>")
"""GSM8K's notes for a calculator: `<<5+5=10>>`."""
_LONGEST = 200
_NOT_PLAIN = (NOT_UNITS | {*MULTIPLIERS, "k"}) - {
    "about",
    "approximately",
    "is",
    "are",
    "be",
    "for",
    "with",
    "per",
    "when",
    "where",
    "if",
}


def numeric(require_marker: bool = False, column: str = "answer") -> Callable[..., list[float | None]]:
    """1.0 where the completion's number equals the gold number, exactly, 0.0 where not, None without gold number.

    The number is what follows the last `####` or stands in the last box, whichever comes later; without either it is
    the last number in the text, unless `require_marker`. The gold number is what follows the last `####` of data column
    `column` (GSM8K's rationale as it is), else the whole column. Currency, units, percent signs, thousands separators
    and trailing stops do not count. Logs `invalid_format_rate` and extra column `extracted`.
    """
    return comparison(
        "numeric",
        column,
        gold_of=gold_number,
        answer_in=partial(find_number, require_marker=require_marker),
        same=operator.eq,
        wanted="a number",
        setting="reward=numeric",
        write=FORMS["hash"],
    )


def find_number(text: str, require_marker: bool = False) -> Fraction | None:
    """The number that a completion gives as its answer, in its own turn rather than an invented one; None without."""
    text = after_thinking(text)
    turn = own_turn(text)
    for part in (turn, text) if len(turn) < len(text) else (text,):
        marked = marked_answer(part)
        if marked is not None:
            return number_of(marked)
        last = None if require_marker else last_number(part)
        if last is not None:
            return as_number(last)
    return None


def marked_answer(text: str) -> str | None:
    """What follows the last `####` or stands in the last box that is not empty, whichever comes later."""
    full = [box for box in boxes(text) if box[2]]
    markers = list(MARKER.finditer(text))
    if full and (not markers or full[-1][0] > markers[-1].start()):
        return full[-1][2]
    return after_marker(text)


def number_of(answer: str) -> Fraction | None:
    """The one number that an answer gives: `$1,234.50.`, `x = 5`, `3 + 4 = 7`, `72 pens`, `\\frac{1}{2}`, `it is 5`."""
    answer = _WORKINGS.sub("", answer)
    answer = _BLANK_GROUPS.sub(lambda match: match[0].replace(" ", ""), answer)
    plain = as_number(answer)
    if plain is not None or len(answer) > _LONGEST:
        return plain
    inside = [box[2] for box in boxes(answer)]
    return number_of(inside[-1]) if inside else _as_formula(answer) or _only_number(answer)


def gold_number(gold: Any) -> Fraction | None:
    """The number of a data column; TypeError for what is neither text nor a number."""
    answer = gold_answer(gold)
    return None if answer is None else number_of(answer)


def _as_formula(text: str) -> Fraction | None:
    try:
        nodes = readings(text)
    except Unreadable:
        return None
    node = nodes[0] if nodes else None
    while isinstance(node, Named):
        node = node.value
    return node.number.value if isinstance(node, Value) and node.number is not None else None


def _only_number(text: str) -> Fraction | None:
    """The number in a sentence that has just one, and says it plainly: not `2 or more`, not `2 to the third`."""
    numbers = numbers_in(text)
    words = {word.lower() for word in re.findall(r"[^\W\d_]+", text)}
    return as_number(numbers[0]) if len(numbers) == 1 and not words & _NOT_PLAIN else None
