"""Whether two expressions are equal, by math-verify's parser and arithmetic to fifty digits.

Only worker processes use this: what a model writes may take for ever, or all memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_toolbox.rewards.maths.nodes import Relation, Value
from grpo_toolbox.rewards.maths.numbers import FIGURES, Number

if TYPE_CHECKING:
    from sympy import Basic, Expr

DIGITS = 50
_SAME = 40
"""Digits in which two values agree that are one: e^(pi sqrt 163) is an integer in the first thirty."""
_LARGEST = 1e6
"""Digits of a number beyond which nothing is worked out."""
_MOST_TERMS = 1e4
"""Terms of a sum or product beyond which nothing is worked out."""

_EXACT = 2e4
"""Digits up to which a fraction is worked out exactly."""
_MOST_DIGITS = 300
"""Digits of a number that is read as digits."""

_POINTS = (0.3187, 1.7321, 4.1904, 9.6607, 23.4113, -0.6129, -2.9443, -13.7081)
"""Where expressions with variables are compared: small and large, on both sides of zero."""
_ENOUGH = 2
_DEGREES = re.compile(r"\^\{\\circ ?\}")
_ONE_TEXT = re.compile(r"\\text\{\s*([A-Za-z])\s*\}")
_UNCLEAR = re.compile(r"\d\s+\d|\\text\{|_\{[^{}]*\\text|\\dots")
_GAMMA = re.compile(r"\\([gG])amma(?![a-zA-Z])(?! ?\()")
_DECIMAL = re.compile(r"(?<![\d.])(\d+\.\d*|\.\d+)(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|dot) ?\{(\d+)\}")


class Unparsable(ValueError):
    """A text in which the parser sees no formula."""


class ComputerAlgebra:
    """Answers the questions that `equality` leaves open."""

    def same_value(self, gold: Value, answer: Value) -> bool:
        """Whether the expressions agree to forty digits, at several points where they have variables."""
        one, other = parse(gold.text), _or_none(answer.text)
        if other is None:
            return False
        if one == other:
            return True
        if out_of_reach(one) or out_of_reach(other):
            return False
        for decimal, expression in ((gold.number, other), (answer.number, one)):
            if decimal is not None and decimal.places is not None and not expression.free_symbols:
                return _rounds(decimal, expression)
        return _agree(one, other)

    def same_relation(self, gold: Relation, answer: Relation) -> bool:
        """Whether left side minus right side is the same, up to a factor (of an inequality, a positive one)."""
        one, other = _difference(gold), _difference(answer)
        if one is None:
            raise Unparsable(gold.left)
        if other is None or one.free_symbols != other.free_symbols or out_of_reach(one) or out_of_reach(other):
            return False
        return _proportional(one, other, gold.sign)

    def same_set(self, gold: str, answer: str) -> bool:
        """What math-verify says of two sets."""
        from math_verify import verify

        one, other = parse_set(gold), parse_set(answer)
        if one is None:
            raise Unparsable(gold)
        return other is not None and verify(one, other, timeout_seconds=None, float_rounding=12)

    def reads(self, text: str) -> bool:
        """Whether a text is an expression that has values, or a set."""
        expression = _or_none(text)
        if expression is None:
            return parse_set(text) is not None
        if not out_of_reach(expression):
            _at(expression, _point(sorted(expression.free_symbols, key=str), 0))
        return True

    def reads_relation(self, relation: Relation) -> bool:
        """Whether both sides of an equation or inequality are expressions."""
        return _difference(relation) is not None


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """The expression that canonical LaTeX stands for, decimals exact, nothing multiplied out; Unparsable where none."""
    import sympy

    found = _parsed(text)
    if not isinstance(found, sympy.Expr) or found.has(sympy.nan, sympy.zoo):
        raise Unparsable(text)
    if found.has(sympy.Limit, sympy.Derivative) or (found.free_symbols and found.has(sympy.Sum, sympy.Product)):
        found = found.doit()  # which has no values at points otherwise
    exact: dict[Any, Any] = {decimal: sympy.Rational(str(decimal)) for decimal in found.atoms(sympy.Float)}
    if sympy.Symbol("i") in found.free_symbols:  # and no index of a sum
        exact[sympy.Symbol("i")] = sympy.I
    return found.xreplace(exact)


def parse_set(text: str) -> Any:
    """The set that canonical LaTeX stands for; None where it stands for something else."""
    import sympy

    try:
        found = _parsed(text)
    except Unparsable:
        return None
    return found if isinstance(found, sympy.Set) else None


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    text = _readable(text)
    try:
        return latex2sympy(
            text,
            is_real=None,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:  # the parser raises bare Exceptions, and whatever its own mistakes raise
        raise Unparsable(text) from error


def _readable(text: str) -> str:
    text = _ONE_TEXT.sub(r"\1", text)
    if _UNCLEAR.search(text):  # the parser adds the numbers of "2 3"
        raise Unparsable(text)
    text = _GAMMA.sub(r"\\mu_{7\1}", text)  # which the parser takes for a constant
    text = _REPEATING.sub(_as_fraction, text)
    text = _DECIMAL.sub(_as_fraction, text)
    return _DEGREES.sub(r"\\cdot\\frac{\\pi}{180}", text)


def _as_fraction(match: re.Match[str]) -> str:
    if len(match.groups()) == 1:
        value = Fraction(match[1].rstrip("."))
    else:
        whole, fixed, turn = match.groups()
        value = int(whole or 0) + Fraction(int(fixed or 0), 10 ** len(fixed))
        value += Fraction(int(turn), 10 ** len(fixed) * (10 ** len(turn) - 1))
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _or_none(text: str) -> Expr | None:
    try:
        return parse(text)
    except Unparsable:
        return None


def out_of_reach(expression: Basic) -> bool:
    """Whether some number in an expression has more than a million digits, or takes ten thousand terms."""
    import sympy

    growing = (sympy.Pow, sympy.exp, sympy.factorial, sympy.factorial2, sympy.gamma)
    return any(
        (isinstance(part, growing) and not part.free_symbols and not magnitude(part) <= _LARGEST)
        or (isinstance(part, sympy.Sum | sympy.Product) and _is_long(part))
        for part in sympy.preorder_traversal(expression)
    )


def exact(expression: Any) -> Fraction | None:
    """The value of an expression of integers, powers and factorials; None for others, and beyond 20,000 digits."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return Fraction(int(expression.p), int(expression.q))
    if not isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial):
        return None
    if not magnitude(expression) <= _EXACT:
        return None
    parts = [exact(part) for part in expression.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if isinstance(expression, sympy.Add):
        return sum(known, Fraction(0))
    if isinstance(expression, sympy.Mul):
        return math.prod(known, start=Fraction(1))
    whole = known[-1].denominator == 1 and (known[-1] >= 0 or known[0] != 0)
    if isinstance(expression, sympy.Pow):
        return known[0] ** int(known[1]) if whole else None
    return Fraction(math.factorial(int(known[0]))) if whole and known[0] >= 0 else None


def _is_long(terms: Any) -> bool:
    """Whether a sum or product has more than ten thousand terms to be taken one by one."""
    import sympy

    for name, *limits in terms.limits:
        count = limits[-1] - limits[0] if len(limits) == 2 else sympy.oo
        listed = isinstance(terms, sympy.Product) or not terms.function.is_rational_function(name)
        if listed and count.is_finite and not count.free_symbols and not _size(count) <= _MOST_TERMS:
            return True
    return False


def magnitude(expression: Any) -> float:
    """A bound of the digits of |x| before or after the point; infinite where there are too many to tell."""
    import sympy

    if isinstance(expression, sympy.Pow | sympy.exp):
        base, exponent = expression.as_base_exp()
        return _size(exponent) * max(magnitude(base), 1.0)
    if isinstance(expression, sympy.factorial | sympy.factorial2 | sympy.gamma):
        size = _size(expression.args[0])
        return size * math.log10(size + 1) if math.isfinite(size) else math.inf
    if isinstance(expression, sympy.Rational):
        return max(expression.p.bit_length(), expression.q.bit_length()) * math.log10(2) + 1
    return sum((magnitude(part) for part in expression.args), 1.0)


def _size(expression: Any) -> float:
    """A bound of |x|."""
    digits = magnitude(expression)
    if digits > 300:
        return math.inf
    try:
        return abs(complex(expression.evalf(15)))
    except (TypeError, ValueError, OverflowError):
        return 10.0**digits


def _rounds(decimal: Number, expression: Expr) -> bool:
    """Whether a decimal stands for a number: exactly, or by six or more figures of it."""
    import sympy

    if magnitude(expression) > 2 * _MOST_DIGITS:
        return False
    value = expression.evalf(DIGITS)
    if not (value.is_Number and value.is_finite):
        return False
    exact = Fraction(str(sympy.Rational(str(value))))
    if abs(exact - decimal.value) <= abs(exact) / 10**_SAME:
        return True
    return decimal.figures >= FIGURES and decimal.rounds(exact)


def _agree(one: Expr, other: Expr) -> bool:
    """Whether two expressions have one value at every point where both are real, or else at every point."""
    return _compare(one, other, lambda a, b: _close(a, b))


def _compare(one: Expr, other: Expr, agree: Callable[[Any, Any], bool]) -> bool:
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    fractions = [None if names else exact(expression) for expression in (one, other)]
    if fractions[0] is not None and fractions[1] is not None:
        return fractions[0] == fractions[1]
    if not names:
        values = [_at(expression, {}) for expression in (one, other)]
        return None not in values and agree(*values)
    real: list[bool] = []
    complex_: list[bool] = []
    for index in range(len(_POINTS)):
        point = _point(names, index)
        a, b = _at(one, point), _at(other, point)
        if a is None or b is None:
            continue
        (real if a.is_real and b.is_real else complex_).append(agree(a, b))
        if real and not real[-1]:
            return False
    return all(real) if len(real) >= _ENOUGH else all(complex_) and len(real) + len(complex_) >= _ENOUGH


def _point(names: list[Any], index: int) -> dict[Any, Any]:
    """A value for each variable, different ones for different variables."""
    import sympy

    chosen = sympy.Rational(str(_POINTS[index]))
    return {
        name: sympy.Rational(str(chosen)) * (1 + sympy.Rational(17 * place, 100))
        + sympy.Rational(place, 7) * int(bool(chosen > 0))
        for place, name in enumerate(names)
    }


def _at(expression: Expr, point: dict[Any, Any]) -> Any:
    """The value at a point, to fifty digits; None where it has none that is finite."""
    try:
        value = expression.evalf(DIGITS, subs=point) if point else expression.evalf(DIGITS)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError, AttributeError):
        return None
    if not value.is_number or not value.is_finite or value.has(*_unevaluated()):
        return None
    return value if value.is_real else (value.as_real_imag()[0] + 0 if _negligible(value) else value)


@lru_cache(maxsize=1)
def _unevaluated() -> tuple[Any, ...]:
    import sympy

    return (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.nan, sympy.zoo)


def _negligible(value: Any) -> bool:
    real, imaginary = value.as_real_imag()
    return bool(abs(imaginary) <= abs(real) * 10**-_SAME)


def _close(a: Any, b: Any) -> bool:
    scale = max(abs(a), abs(b))
    return bool(scale == 0 or abs(a - b) <= scale * 10**-_SAME)


def _difference(relation: Relation) -> Expr | None:
    import sympy

    left, right = _or_none(relation.left), _or_none(relation.right)
    if left is None or right is None:
        return None
    return sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False)


def _proportional(one: Expr, other: Expr, sign: str) -> bool:
    """Whether `one` is a constant times `other`, by their quotient at several points."""
    names = sorted(one.free_symbols, key=str)
    quotients = []
    for index in range(len(_POINTS)):
        point = _point(names, index)
        a, b = _at(one, point), _at(other, point)
        if a is None or b is None or not (a.is_real and b.is_real):
            continue
        if a == 0 or b == 0:
            return False
        quotients.append(a / b)
    if len(quotients) < _ENOUGH or not all(_close(quotients[0], quotient) for quotient in quotients):
        return False
    return sign in ("=", r"\neq") or quotients[0] > 0
