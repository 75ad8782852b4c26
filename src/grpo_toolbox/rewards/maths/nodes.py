"""What an answer can be: a value, words, a set, a tuple, an interval, a matrix, an equation, and names for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_toolbox.rewards.maths.numbers import Number


@dataclass(frozen=True)
class Value:
    """One expression."""

    text: str
    """In canonical LaTeX, without unit."""
    number: Number | None = None
    """Its value where it is a number in digits."""
    unit: str | None = None
    """A known unit, by its one name."""
    percent: bool = False
    base: str = ""
    """`2` of `101_2`."""


@dataclass(frozen=True)
class Words:
    """Text: `east`, `no solution`."""

    text: str


@dataclass(frozen=True)
class Group:
    """Several answers."""

    kind: str
    """`tuple` and `ratio` have an order, `set` and `list` (no brackets) have none."""
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`."""

    low: Node
    high: Node
    closed: tuple[bool, bool]
    name: str = ""
    """The variable, where it was written as an inequality."""


@dataclass(frozen=True)
class Union:
    """Intervals and sets taken together."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix or vector, row by row."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`: a value and what it is called."""

    name: str
    value: Node


@dataclass(frozen=True)
class Relation:
    """An equation or inequality that gives no single variable a value; the signs `>` and `\\geq` are turned round."""

    sign: str
    left: str
    right: str


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple choice with what it stands for: `(C) 12`."""

    letter: str
    content: Node


Node = Value | Words | Group | Interval | Union | Matrix | Named | Relation | Choice

DOTS = Words(r"\dots")
"""A part of a list that says that it goes on."""


def without_obvious(items: Sequence[Node]) -> list[Node]:
    """A list with dots without the terms that only go on as the first ones do: `1, 2, 3, ..., n` is `1, ..., n`."""
    if DOTS not in items:
        return [*items]
    until = items.index(DOTS)
    terms = [item.number.value if isinstance(item, Value) and item.number else None for item in items[:until]]
    if len(terms) < 2 or terms[0] is None or terms[1] is None:
        return [*items]
    step = terms[1] - terms[0]
    if any(term != terms[0] + place * step for place, term in enumerate(terms)):
        return [*items]
    return [*items[: 1 if step == 1 else 2], *items[until:]]


def spelling(node: Node) -> str:
    """The formula of an answer."""
    match node:
        case Value():
            unit = rf"\text{{ {node.unit}}}" if node.unit else ""
            return node.text + (f"_{{{node.base}}}" if node.base else "") + ("%" if node.percent else "") + unit
        case Words():
            return node.text
        case Group():
            inside = (":" if node.kind == "ratio" else ",").join(map(spelling, node.items))
            return {"set": rf"\{{{inside}\}}", "tuple": f"({inside})"}.get(node.kind, inside)
        case Interval():
            left, right = "([", ")]"
            return f"{left[node.closed[0]]}{spelling(node.low)},{spelling(node.high)}{right[node.closed[1]]}"
        case Union():
            return r"\cup ".join(map(spelling, node.parts))
        case Matrix():
            rows = r"\\".join("&".join(map(spelling, row)) for row in node.rows)
            return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"
        case Named():
            return f"{node.name}={spelling(node.value)}"
        case Relation():
            return f"{node.left}{node.sign} {node.right}"
        case Choice():
            return f"({node.letter}){spelling(node.content)}"
