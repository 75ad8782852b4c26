"""A value with what is written around it: currency, percent sign, degrees, a unit, a base."""

from __future__ import annotations

import re

from grpo_toolbox.rewards.maths.latex import FUNCTIONS, TEXT, trimmed
from grpo_toolbox.rewards.maths.nodes import Value
from grpo_toolbox.rewards.maths.numbers import Number, number
from grpo_toolbox.rewards.maths.units import CURRENCIES, MULTIPLIERS, counts_something, unit_name

_TEXT_AT_END = re.compile(r"\\text\{(?P<words>[^{}]*)\}(?P<power>\^\{-?\d\})?\Z")
_WORDS_AT_END = re.compile(r"(?<=[\d.!}) ]) ?(?P<words>[^\W\d_]+\.?(?:[ /][^\W\d_]+\.?)*)(?P<power>\^\{-?\d\})?\Z")
_LETTERS = {"m", "s", "g", "h", "l", "L"}
"""Units of one letter; `5 m` may be five metres, `5m` is five times m."""
_UNIT_FRACTION = re.compile(r"\\frac\{\\text\{([^{}]*)\}(?:\^\{(\d)\})?\}\{(\\text\{[^{}]*\}(?:\^\{\d\})?)\}\Z")
_UNITS_JOINED = re.compile(r"\}(?:\^\{(\d)\})?(?P<sign>/|\\cdot ?)\\text\{")
_MODULUS = re.compile(r"(?P<rest>[^()]+)\(?\\text\{ ?mod ?\}\(?(?P<modulus>\w+|\{\w+\})\)?\)?")
_DEGREES = re.compile(r"\^\{\\circ ?\}(?:\\text\{)?(?P<scale>[CFK])?\}?\Z")
_ANGLE_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_BASE = re.compile(r"(?P<digits>[0-9A-F]+)_\{(?:\\text\{)?(?P<base>\w+)\}?\}")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def plain_value(text: str) -> Value:
    """An expression as it stands, without brackets around all of it."""
    text = trimmed(text)
    while match := re.fullmatch(r"\(([^(),]*)\)", text):
        text = trimmed(match[1])
    return Value(text, number(text))


def based(text: str) -> Value | None:
    """A number in a base of its own: `101_2`."""
    match = _BASE.fullmatch(text)
    base = _BASES.get(match["base"], match["base"]) if match else ""
    return Value(match["digits"].lstrip("0") or "0", base=base) if match and base.isdigit() else None


def quantity(text: str) -> Value | None:
    """A number with currency, percent sign, degrees, multiplier, unit or modulus; None where nothing such is there."""
    text = _with_one_unit(text)
    if modulo := _MODULUS.fullmatch(text):
        return _in(f"mod {modulo['modulus'].strip('{}')}", plain_value(modulo["rest"]))
    sign = "-" if text.startswith("-") else ""
    unsigned = text[len(sign) :]
    if unsigned[:1] in CURRENCIES and len(unsigned) > 1:
        amount = sign + unsigned[1:]
        return _in(CURRENCIES[unsigned[0]], _with_words(amount) or plain_value(amount))
    if text[-1] in CURRENCIES and len(text) > 1:
        return _in(CURRENCIES[text[-1]], plain_value(text[:-1]))
    if text.endswith("%") and len(text) > 1:
        return _percent(plain_value(text[:-1]))
    degrees = _DEGREES.search(text)
    if degrees and degrees.start() and not _ANGLE_FUNCTION.search(text):
        return _in(f"deg{degrees['scale'] or ''}", plain_value(text[: degrees.start()]))
    return _with_words(text)


def _with_one_unit(text: str) -> str:
    """Units in several pieces, `\\frac{\\text{m}}{\\text{s}}` or `\\text{m}/\\text{s}`, in one: `\\text{m/s}`."""
    text = _UNIT_FRACTION.sub(lambda one: rf"\text{{{one[1]}{_raised(one[2])}/" + one[3].removeprefix(r"\text{"), text)
    return _UNITS_JOINED.sub(lambda one: _raised(one[1]) + ("/" if one["sign"] == "/" else " "), text)


def _raised(power: str | None) -> str:
    return f"^{power}" if power else ""


def as_product(value: Value, text: str) -> Value | None:
    """`5 m` read as five times m; None where that is not how it could be meant."""
    return Value(text.replace(" ", "")) if value.unit in _LETTERS and text[-1:] in _LETTERS else None


def _with_words(text: str) -> Value | None:
    """A value with a unit, or with words for what is counted, at its end."""
    match = _TEXT_AT_END.search(text) or _WORDS_AT_END.search(text)
    if match is None or not match.start():
        return None
    head, words, in_text = text[: match.start()].strip(), match["words"].strip(), match[0].startswith("\\")
    value = plain_value(head)
    first, _, rest = words.partition(" ")
    if first.lower() in MULTIPLIERS and value.number is not None:
        times = Number(value.number.value * MULTIPLIERS[first.lower()])
        return _in(unit_name(rest) if rest else None, Value(head, times))
    if TEXT.search(head):
        return None
    unit = unit_name(words + (match["power"] or "").replace("{", "").replace("}", ""))
    spaced_letter = words in _LETTERS and text[match.start()] == " "
    if unit and (in_text or (value.number is not None and (len(words) > 1 or spaced_letter))):
        return _percent(value) if unit == "percent" else _in(unit, value)
    constant = value.number is not None or not re.search(r"[a-zA-Z]", _COMMAND.sub("", head))
    word_alone = value.number is not None and words not in FUNCTIONS and len(words) > 2
    return value if constant and (in_text or word_alone) and counts_something(words) else None


def _percent(value: Value) -> Value:
    return Value(value.text, value.number, percent=True)


def _in(unit: str | None, value: Value) -> Value:
    return Value(value.text, value.number, unit)
