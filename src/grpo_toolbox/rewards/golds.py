"""How a row's gold answer is written as a completion, and what makes a written answer wrong.

A reward function that has the attribute `golds` (a `Golds`) says for itself how a right completion of a row looks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.rewards.answers import as_number

Row = Mapping[str, Any]
"""The data columns of one row."""

FORMS: dict[str, Callable[[str], str]] = {
    "bare": lambda answer: answer,
    "boxed": lambda answer: rf"\boxed{{{answer}}}",
    "hash": lambda answer: f"#### {answer}",
    "sentence": lambda answer: f"The answer is {answer}.",
    "label": lambda answer: f"Answer: {answer}",
    "tags": lambda answer: f"<answer>{answer}</answer>",
}
"""Ways in which models write an answer; a grader reads some of them."""

_FIRST_DIGIT = re.compile(r"(?<![\d_^])(?<![_^]\{)\d")
_WORD = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_SIGNED = re.compile(r"(?:-|\.?\d|\\[dt]?frac|\\sqrt)[^,;=<>&]*")
_NO_SIGN = re.compile(r"\\pm|\\mp|mod|\bor\b|\band\b")
_PIECES = (
    (r"\\s[*+?]*\??", " "),
    (r"\\[dD][*+]?\??", "1"),
    (r"\\[wS][*+]?\??", "x"),
    (r"(?<!\\)\.[*+]\??", "x"),
    (r"(?<!\\)\[(?!\^)\\?([^\]])[^\]]*\][*+?]?", r"\1"),
    (r"\(\?[aimsx]+\)|(?<!\\)[\^$?*+]|\\[bAZ]", ""),
    (r"\\(\W)", r"\1"),
)


def nothing(row: Row) -> Mapping[str, str]:
    """No completions."""
    return {}


@dataclass(frozen=True)
class Golds:
    """Completions of a row whose worth is known."""

    write: Callable[[Row], str | None]
    """The row's gold answer in the form that the reward reads; None for a row without one."""
    wrong: Callable[[Row], Mapping[str, str]] = nothing
    """Completions with another answer in the same form, by what was changed."""
    open: Callable[[Row], Mapping[str, str]] = nothing
    """Completions that may count or not, as the reward's rules say: they are shown and never judged."""
    answer: Callable[[Row], str | None] | None = None
    """The gold answer alone, as text, where it is one: two answers that are equal may be written differently."""
    charges: bool = False
    """Whether the reward only charges for something: then nothing else has to be rejected."""


def charge_golds(free: str, charged: Mapping[str, str]) -> Golds:
    """The golds of a reward that compares with nothing and charges for something: a text that is free, others not."""
    return Golds(lambda row: free, lambda row: charged, charges=True)


def answer_golds(answer_of: Callable[[Row], str | None], write: Callable[[str], str | None]) -> Golds:
    """The golds of a reward that compares texts or numbers: `answer_of` a row, put into its form by `write`."""

    def written(row: Row) -> str | None:
        answer = answer_of(row)
        return None if answer is None else write(answer)

    def wrong(row: Row) -> dict[str, str]:
        answer = answer_of(row)
        changed = {} if answer is None else {"sign": other_sign(answer), "digit or letter": other_digit(answer)}
        return _present({name: None if one is None else write(one) for name, one in changed.items()})

    def open_(row: Row) -> dict[str, str]:
        answer = answer_of(row)
        if answer is None:
            return {}
        own = write(answer)
        forms = {f"form: {name}": form(answer) for name, form in FORMS.items() if form(answer) != own}
        number = as_number(answer)
        if number is None:
            return forms
        digits = f"{int(number):,}.00" if number.denominator == 1 else None
        return _present({"unit: kg": write(f"{answer} kg"), "digits: 1,234.00": digits and write(digits)}) | forms

    return Golds(written, wrong, open_, answer_of)


def other_sign(answer: str) -> str | None:
    """The answer's negative; None where a sign would be no certain difference (zero, ±, a list, an equation, words)."""
    value = as_number(answer)
    text = answer.strip().replace("−", "-")
    if value is not None:
        flipped = text[1:] if text.startswith("-") else f"-{text}"
        return flipped if value and as_number(flipped) == -value else None
    if not _SIGNED.fullmatch(text) or _NO_SIGN.search(text) or not re.search(r"[1-9]", text):
        return None
    return f"-({text})"


def other_digit(answer: str) -> str | None:
    """The answer with its first digit changed, or its first letter where it is plain words; None where it has neither.

    Digits of exponents and indices stay, so that a unit such as `m^2` is not what is changed.
    """
    digit = _FIRST_DIGIT.search(answer)
    if digit is not None:
        changed = _put(answer, digit.start(), str(int(digit[0]) + 1 if digit[0] < "9" else 8))
        value = as_number(answer)
        return None if value is not None and as_number(changed) in (None, value) else changed
    if not _WORD.fullmatch(answer.strip()):
        return None
    place = len(answer) - len(answer.lstrip())
    return _put(answer, place, {"z": "y", "Z": "Y"}.get(answer[place], chr(ord(answer[place]) + 1)))


def from_pattern(pattern: str, answer: str) -> str:
    """A text that a plain pattern may match, with `answer` for its first group: to be tried, it is only a guess."""
    start = re.search(r"(?<!\\)\((?!\?)", pattern)
    if start is None:
        return _literal(pattern)
    depth, end = 0, len(pattern)
    for token in re.finditer(r"\\.|[()]", pattern[start.start() :]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[0] == ")":
            end = start.start() + token.end()
            break
    return _literal(pattern[: start.start()]) + answer + _literal(pattern[end:])


def _literal(pattern: str) -> str:
    pattern = pattern.replace("\\\\", "\0")  # an escaped backslash begins no other escape
    for piece, text in _PIECES:
        pattern = re.sub(piece, text, pattern)
    return pattern.replace("\0", "\\")


def _put(text: str, place: int, character: str) -> str:
    return text[:place] + character + text[place + 1 :]


def _present(texts: Mapping[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text}
