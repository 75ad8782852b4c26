"""Numbers as they are written in formulas, read exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

FIGURES = 6
"""Significant figures from which a decimal may stand for a number that it only approximates."""
_LONGEST = 300
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(rf"(?P<digits>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
_SCIENTIFIC = re.compile(
    rf"(?P<digits>{_DECIMAL})(?:\\times ?|\\cdot ?| ?[xX] ?)10\^\{{(?P<exponent>[-+]?\d{{1,3}})\}}"
)
_POWER = re.compile(r"(?P<base>\d{1,4})\^\{(?P<exponent>-?\d{1,3})\}")
_FRACTION = re.compile(rf"(?:(?P<whole>\d+) ?)?\\frac\{{(?P<above>[-+]?{_DECIMAL})\}}\{{(?P<below>[-+]?{_DECIMAL})\}}")
_SLASH = re.compile(rf"(?:(?P<whole>\d+) )?(?P<above>{_DECIMAL})/(?P<below>[-+]?{_DECIMAL})")
_REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)(?:\\(?:overline|bar|dot) ?\{(?P<turn>\d+)\}|\((?P<round>\d+)\))"
)
_OF_INTEGERS = re.compile(r"\\(?P<name>gcd|lcm|max|min) ?(?:\(|\\\{)(?P<numbers>-?\d+(?:,-?\d+){1,9})(?:\)|\\\})")


@dataclass(frozen=True)
class Number:
    """An exact rational number, and how it was written."""

    value: Fraction
    places: int | None = None
    """Decimal places where it was written as a decimal (of 1.50e3 minus one), else None."""
    figures: int = 0
    """Significant figures of that decimal."""

    @property
    def approximate(self) -> bool:
        """Whether it may stand for a number that has more digits."""
        return self.places is not None and self.places > 0 and self.figures >= FIGURES

    def rounds(self, value: Fraction) -> bool:
        """Whether this decimal is `value`, rounded or cut off at its last place (the last of 15 digits may be off)."""
        if not self.approximate or self.places is None:
            return False
        step = Fraction(10) ** -self.places
        if (value / step).denominator == 1:  # it could have been written out
            return False
        gap = abs(value - self.value)
        cut_off = abs(self.value) < abs(value) and gap < step
        return cut_off or gap <= step / 2 or (self.figures >= 15 and gap <= abs(value) / 10**14)


def number(text: str) -> Number | None:
    """The number that a canonical formula is, in digits, as fraction, mixed number, power or repeating decimal."""
    if len(text) > _LONGEST:
        return None
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-") if sign < 0 else text.removeprefix("+")
    for pattern, read in _FORMS:
        if match := pattern.fullmatch(text):
            found = read(match)
            return None if found is None else Number(sign * found.value, found.places, found.figures)
    return None


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, or one is a decimal of at least six figures that rounds the other.

    Two decimals are one, too, where all that differs is what floats leave: beyond the fourteenth figure of one that has
    as many, or the twelfth of two.
    """
    if gold.value == answer.value:
        return True
    if gold.places is None or answer.places is None:
        return gold.rounds(answer.value) or answer.rounds(gold.value)
    figures, places = sorted((gold.figures, answer.figures)), max(gold.places, answer.places)
    gap = abs(gold.value - answer.value)
    floats = figures[1] >= 16 and places >= 10 and gap <= abs(gold.value) / 10**14
    return floats or (figures[0] >= 12 and min(gold.places, answer.places) > 0 and gap <= abs(gold.value) / 10**12)


def _decimal(match: re.Match[str]) -> Number:
    digits, exponent = match["digits"], int(match["exponent"] or 0)
    whole, _, decimals = digits.partition(".")
    figures = len((whole + decimals).lstrip("0"))
    return Number(Fraction(digits.rstrip(".")) * Fraction(10) ** exponent, len(decimals) - exponent, figures)


def _power(match: re.Match[str]) -> Number | None:
    base, exponent = int(match["base"]), int(match["exponent"])
    return None if base == 0 and exponent <= 0 else Number(Fraction(base) ** exponent)


def _ratio(match: re.Match[str]) -> Number | None:
    above, below = Fraction(match["above"]), Fraction(match["below"])
    whole = int(match["whole"] or 0)
    if below == 0 or (match["whole"] and (above < 0 or below < 0)):
        return None
    return Number(whole + above / below)


def _repeating(match: re.Match[str]) -> Number:
    fixed, turn = match["fixed"], match["turn"] or match["round"]
    tail = Fraction(int(turn), 10 ** len(fixed) * (10 ** len(turn) - 1))
    return Number(int(match["whole"] or 0) + Fraction(int(fixed or 0), 10 ** len(fixed)) + tail)


_CHOSEN: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm, "max": max, "min": min}


def _of_integers(match: re.Match[str]) -> Number:
    numbers = map(int, match["numbers"].split(","))
    return Number(Fraction(_CHOSEN[match["name"]](*numbers)))


_FORMS = (
    (_PLAIN, _decimal),
    (_SCIENTIFIC, _decimal),
    (_POWER, _power),
    (_FRACTION, _ratio),
    (_SLASH, _ratio),
    (_REPEATING, _repeating),
    (_OF_INTEGERS, _of_integers),
)
