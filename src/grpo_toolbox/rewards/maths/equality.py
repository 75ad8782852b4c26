"""Whether an answer is the gold answer. The rules, which docs/rewards.md states, stand here; algebra is asked for.

A verdict is True, False or None: None where only algebra can tell and there is none at hand. So the same rules decide
most answers without computer algebra, and all of them with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from grpo_toolbox.rewards.maths.nodes import (
    Choice,
    Group,
    Interval,
    Matrix,
    Named,
    Node,
    Relation,
    Union,
    Value,
    Words,
    spelling,
)
from grpo_toolbox.rewards.maths.numbers import Number, same_number

Verdict = bool | None
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_SYNONYMS = {"dne": "doesnotexist", "nosolutions": "nosolution"}


class Algebra(Protocol):
    """What computer algebra is asked."""

    def same_value(self, gold: Value, answer: Value) -> Verdict:
        """Whether two expressions have one value, wherever both are real."""

    def same_relation(self, gold: Relation, answer: Relation) -> Verdict:
        """Whether two equations or inequalities say the same."""

    def same_set(self, gold: str, answer: str) -> Verdict:
        """Whether two sets written with set operations are the same."""


class NoAlgebra:
    """Knows nothing: every question stays open."""

    def same_value(self, gold: Value, answer: Value) -> Verdict:
        """Open."""
        return None

    def same_relation(self, gold: Relation, answer: Relation) -> Verdict:
        """Open."""
        return None

    def same_set(self, gold: str, answer: str) -> Verdict:
        """Open."""
        return None


def same_answer(golds: Sequence[Node], answers: Sequence[Node], algebra: Algebra) -> Verdict:
    """Whether some reading of the answer is some reading of the gold answer."""
    return _any(same(gold, answer, algebra) for gold in golds for answer in answers)


def same(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    """Whether two answers are the same thing."""
    if gold == answer:
        return True
    for kinds, compare in _RULES:
        if isinstance(gold, kinds) or isinstance(answer, kinds):
            return compare(gold, answer, algebra)
    return False


def _choices(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    if isinstance(gold, Choice) and isinstance(answer, Choice):
        return gold.letter == answer.letter and same(gold.content, answer.content, algebra)
    choice, other, turned = (gold, answer, False) if isinstance(gold, Choice) else (answer, gold, True)
    assert isinstance(choice, Choice)
    if isinstance(other, Value) and re.fullmatch("[A-J]", other.text):
        return other.text == choice.letter
    return same(other, choice.content, algebra) if turned else same(choice.content, other, algebra)


def _named(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    """`x = 5` is 5; two names must be one, or the two be the same equation."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if _one_name(gold.name) == _one_name(answer.name):
            return same(gold.value, answer.value, algebra)
        return _equations(gold, answer, algebra)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _equations(gold, answer, algebra)
    if isinstance(gold, Named) and "+" in gold.name:
        return False  # x + y = 3 is a line where it is the gold answer, and 3 is none; as an answer it says 3
    inside = [node.value if isinstance(node, Named) else node for node in (gold, answer)]
    return same(inside[0], inside[1], algebra)


def _equations(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    relations = [_as_relation(node) for node in (gold, answer)]
    if relations[0] is None or relations[1] is None:
        return False
    if relations[0].sign != relations[1].sign:
        return False
    if all(isinstance(node, Named) and len(node.name) == 1 and _known(node.value) for node in (gold, answer)):
        return False  # x = 5 and y = 5
    return algebra.same_relation(relations[0], relations[1])


def _as_relation(node: Node) -> Relation | None:
    if isinstance(node, Named) and isinstance(node.value, Value):
        return Relation("=", node.name, node.value.text)
    return node if isinstance(node, Relation) else None


def _relations(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    return _equations(gold, answer, algebra)


def _words(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    return _said(gold) == _said(answer)


def _said(node: Node) -> str:
    text = "nosolution" if node == Group("set", ()) else _plain(spelling(node))
    return _SYNONYMS.get(text, text)


def _matrices(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    """Elementwise; a tuple is a vector, written as a column or as a row."""
    rows = [node.rows if isinstance(node, Matrix) else _as_column(node) for node in (gold, answer)]
    if not isinstance(gold, Matrix) or not isinstance(answer, Matrix):
        flat = [tuple((cell,) for cell in one[0]) if len(one) == 1 else one for one in rows]
        if not isinstance(gold, Group | Matrix) or not isinstance(answer, Group | Matrix):
            return _last_resort(gold, answer, algebra)
        rows = flat
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    cells = zip(sum(rows[0], ()), sum(rows[1], ()), strict=True)
    return _all(same(one, other, algebra) for one, other in cells)


def _as_column(node: Node) -> tuple[tuple[Node, ...], ...]:
    return tuple((item,) for item in node.items) if isinstance(node, Group) and node.kind == "tuple" else ()


def _unions(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    parts = [
        [_as_interval(part) for part in (node.parts if isinstance(node, Union) else (node,))] for node in (gold, answer)
    ]
    if not isinstance(gold, Union) or not isinstance(answer, Union):
        return _last_resort(gold, answer, algebra)
    return _matched(parts[0], parts[1], algebra)


def _intervals(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    one, other = _as_interval(gold), _as_interval(answer)
    if not isinstance(one, Interval) or not isinstance(other, Interval):
        return _last_resort(gold, answer, algebra)
    if one.closed != other.closed or (one.name and other.name and one.name != other.name):
        return False
    return _all([same(one.low, other.low, algebra), same(one.high, other.high, algebra)])


def _as_interval(node: Node) -> Node:
    """A pair in round brackets as the open interval that it may be."""
    if isinstance(node, Group) and node.kind == "tuple" and len(node.items) == 2:
        return Interval(node.items[0], node.items[1], (False, False))
    return node


def _groups(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    """A set or list in any order, also of one; a tuple in its order, also without brackets."""
    groups = [node for node in (gold, answer) if isinstance(node, Group)]
    kinds = {node.kind for node in groups}
    if (letters := _letters(gold)) and _letters(answer):
        return letters == _letters(answer)
    if "ratio" in kinds:
        return _ratios(gold, answer)
    one, other = _items(gold), _items(answer)
    if "tuple" in kinds:
        if len(groups) < 2 or "set" in kinds or len(one) != len(other):
            return _last_resort(gold, answer, algebra)
        return _all(same(a, b, algebra) for a, b in zip(one, other, strict=True))
    if any(_has_operators(node) for node in (gold, answer)):
        return _last_resort(gold, answer, algebra)
    return _matched(_distinct(one), _distinct(other), algebra)


def _letters(node: Node) -> set[str]:
    """The letters of a multiple choice with several right ones, `A, C` or `AC`; empty for anything else."""
    if isinstance(node, Value):
        return set(node.text) if re.fullmatch("A?B?C?D?E?F?G?H?I?J?", node.text) else set()
    found = [item.text for item in node.items if isinstance(item, Value)] if isinstance(node, Group) else []
    listed = isinstance(node, Group) and node.kind in ("list", "set") and len(found) == len(node.items)
    return set(found) if listed and all(re.fullmatch("[A-J]", text) for text in found) else set()


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Group) else (node,)


def _ratios(gold: Node, answer: Node) -> bool:
    """`3:4` is `6:8`, and 3/4; `2:30` and `1:15` are times of day."""
    terms = [_terms(gold), _terms(answer)]
    if all(_CLOCK.fullmatch(_plain(spelling(node))) for node in (gold, answer)):
        return [one.value for one in terms[0]] == [one.value for one in terms[1]]
    if not terms[0] or not terms[1]:
        return False
    sizes = [len(one) for one in terms]
    if sizes == [2, 1] or sizes == [1, 2]:
        pair, single = terms if sizes == [2, 1] else terms[::-1]
        return pair[0].value == single[0].value * pair[1].value
    if sizes[0] != sizes[1]:
        return False
    first = [one[0].value for one in terms]
    return all(a.value * first[1] == b.value * first[0] for a, b in zip(*terms, strict=True)) and 0 not in first


def _terms(node: Node) -> list[Number]:
    values = _items(node) if not isinstance(node, Group) or node.kind == "ratio" else ()
    numbers = [value.number for value in values if isinstance(value, Value) and value.number is not None]
    return numbers if len(numbers) == len(values) else []


def _values(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    if not isinstance(gold, Value) or not isinstance(answer, Value):
        return False
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.base or answer.base:
        return _digits(gold) == _digits(answer) and (gold.base == answer.base or "" in (gold.base, answer.base))
    if gold.percent != answer.percent:
        return _percent(gold, answer, algebra)
    if gold.number is not None and answer.number is not None:
        return same_number(gold.number, answer.number)
    if re.fullmatch("[A-Za-z]", gold.text) and re.fullmatch("[A-Za-z]", answer.text):
        return gold.text == answer.text
    if _has_operators(gold) or _has_operators(answer):
        return algebra.same_set(gold.text, answer.text)
    return algebra.same_value(gold, answer)


def _digits(value: Value) -> str:
    return value.text.lstrip("0") or "0"


def _percent(gold: Value, answer: Value, algebra: Algebra) -> Verdict:
    """35% is 0.35; it is 35, too, where a percentage below 1 could not be meant."""
    signed, plain = (gold, answer) if gold.percent else (answer, gold)
    number = signed.number
    if number is None:
        text = rf"\frac{{{signed.text}}}{{100}}"
        hundredth = Value(text)
    else:
        places = None if number.places is None else number.places + 2
        hundredth = Value(signed.text, Number(number.value / 100, places, number.figures))
    bare = Value(signed.text, number)
    verdict = _in_order(gold, answer, hundredth, plain, algebra)
    if verdict is True or number is None or abs(number.value) < 1:
        return verdict
    return _any([verdict, _in_order(gold, answer, bare, plain, algebra)])


def _in_order(gold: Value, answer: Value, signed: Value, plain: Value, algebra: Algebra) -> Verdict:
    return _values(signed, plain, algebra) if gold.percent else _values(plain, signed, algebra)


def _last_resort(gold: Node, answer: Node, algebra: Algebra) -> Verdict:
    """A set written with set operations, against one without."""
    if _has_operators(gold) or _has_operators(answer):
        return algebra.same_set(spelling(gold), spelling(answer))
    return False


def _has_operators(node: Node) -> bool:
    return isinstance(node, Value) and re.search(r"\\setminus|\\cap(?![a-z])|\\\{", node.text) is not None


def _known(node: Node) -> bool:
    return isinstance(node, Value) and node.number is not None


def _one_name(name: str) -> str:
    """`f(x)` and `y` are both what a function of x is called."""
    return "y" if re.fullmatch(r"[a-zA-Z]\([a-z]\)", name) else name


def _distinct(items: Sequence[Node]) -> list[Node]:
    """Each thing once: `1/2 or 0.5` is one answer."""
    return list({_key(item): item for item in reversed(items)}.values())[::-1]


def _key(node: Node) -> object:
    if isinstance(node, Value) and node.number is not None and not (node.unit or node.percent):
        return node.number.value
    return node


def _matched(golds: Sequence[Node], answers: Sequence[Node], algebra: Algebra) -> Verdict:
    """Whether the two sides hold the same things in any order."""
    if len(golds) != len(answers):
        return False
    left = list(answers)
    open_question = False
    for gold in golds:
        verdicts = [same(gold, answer, algebra) for answer in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            open_question = True
        else:
            return False
    return None if open_question else True


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    open_question = False
    for verdict in verdicts:
        if verdict is False:
            return False
        open_question = open_question or verdict is None
    return None if open_question else True


def _any(verdicts: Iterable[Verdict]) -> Verdict:
    open_question = False
    for verdict in verdicts:
        if verdict:
            return True
        open_question = open_question or verdict is None
    return None if open_question else False


def _plain(text: str) -> str:
    """Words for comparison: without case, blanks, quotes, braces, `\\text`, and stops or brackets around them."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s{}\"'’]", "", text).strip(".,;:!()").casefold()


_RULES: tuple[tuple[type | tuple[type, ...], Callable[[Node, Node, Algebra], Verdict]], ...] = (
    (Choice, _choices),
    (Named, _named),
    (Words, _words),
    (Matrix, _matrices),
    (Union, _unions),
    (Interval, _intervals),
    (Group, _groups),
    (Relation, _relations),
    (Value, _values),
)
"""The first rule whose kind the gold answer or the answer is decides."""
