"""What a worker process does: grading one answer with computer algebra at hand."""

from __future__ import annotations

from grpo_toolbox.rewards.maths.algebra import ComputerAlgebra, Unparsable
from grpo_toolbox.rewards.maths.equality import same_answer
from grpo_toolbox.rewards.maths.latex import Unreadable
from grpo_toolbox.rewards.maths.nodes import Choice, Group, Interval, Matrix, Named, Node, Relation, Union, Value, Words
from grpo_toolbox.rewards.maths.reading import readings

ALGEBRA = ComputerAlgebra()
_NONSENSE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""What sympy raises on expressions that mean nothing, such as a sum up to the imaginary unit."""


def grade(job: list[str]) -> str:
    """`right` or `wrong` for a job [gold answer, answer], `unread` where the gold answer makes no sense to the parser.

    A job [gold answer] asks only for that: it is `right` when the gold answer can be read.
    """
    golds = _readings(job[0])
    try:
        if not golds or not is_read(golds[0]):
            return "unread"
    except _NONSENSE:  # of the data
        return "unread"
    if len(job) == 1:
        return "right"
    try:
        return "right" if same_answer(golds, _readings(job[1]), ALGEBRA) else "wrong"
    except Unparsable:
        return "unread"
    except _NONSENSE:  # of the model
        return "wrong"


def warm_up() -> None:
    """Import sympy and have the parser build its tables, which takes a second, before any limit runs."""
    for formula in (r"\frac{\sqrt{2}}{3}\sin(\pi x^{2})+|x|-\ln(2)", r"2^{10}!\cdot 3-x_{1}", r"\log_{2}(3)"):
        grade([formula, f"{formula}+1"])


def is_read(node: Node) -> bool:
    """Whether the parser makes sense of every formula of an answer."""
    match node:
        case Value():
            return node.number is not None or bool(node.base) or ALGEBRA.reads(node.text)
        case Relation():
            return ALGEBRA.reads_relation(node)
        case Words():
            return True
        case Interval():
            return is_read(node.low) and is_read(node.high)
        case Group():
            return all(map(is_read, node.items))
        case Union():
            return all(map(is_read, node.parts))
        case Matrix():
            return all(is_read(cell) for row in node.rows for cell in row)
        case Named():
            return is_read(node.value)
        case Choice():
            return is_read(node.content)


def _readings(text: str) -> list[Node]:
    try:
        return readings(text)
    except Unreadable:
        return []
