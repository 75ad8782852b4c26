"""Finding the answer in a text, and comparing it with the gold answer."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

_SIGN = r"(?<![\w)\]}])[-+]"  # "12-5" is a difference, "= -5" a negative number
_CURRENCY = r"\\?[$€£¥]"
_DIGITS = (
    r"(?:(?<!\d)(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?!\d|\.\d)"  # 1.2.3 is no number
)
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN}(?:(?:(?<==[-+])|(?<== [-+])|(?<=\A[-+]))\s)?)?(?:{_CURRENCY}\s?)?(?P<sign2>(?<![\w)\]}}])-)?"
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?\d+(?!\w))?(?P<denominator>/\d+(?!\d|[./]\d))?"
)
_NO_UNIT = (  # "2 million" is not 2, and "2 pi" neither
    "hundred|thousand|million|billion|trillion|dozen|or|and|to|plus|minus|times|over|squared|cubed|factorial|mod"
    "|pi|sqrt|sin|cos|tan|log|ln|exp"
)
_UNIT = re.compile(rf"\s*(?:\\?%|(?!(?:{_NO_UNIT})\b)[^\W\d_]{{2,}}(?:[ /]+[^\W\d_]+)*)?\.?\$?\s*\Z", re.IGNORECASE)
_LABEL = re.compile(r"\A(?:[^\W\d_][^\W\d]{0,20}(?: [^\W\d_]{1,20}){0,4} ?)?[=:]\s*")  # "x = 5", "Answer: 5"
_LONGEST_NUMBER = 300

_GROUPING = re.compile(r"(?<=\d)(?:\\[, ;!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_MINUS_SIGNS = str.maketrans({"−": "-", "﹣": "-", "－": "-", "–": "-", "‒": "-"})

_NEXT_TURN = re.compile(r"^[ \t]*(?:(?:Question|Q|Problem|User|Human)\b[ \t]*\d*[ \t]*:|<\|im_start\|>)", re.MULTILINE)
_BARE_BOX = re.compile(r"\\boxed[ \t]*(?P<content>[^\s{}$\\]+|\\[a-zA-Z]+(?:\{[^{}]*\}){0,2})")
_BRACE = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_THOUGHT = re.compile(r"</?(?:think|thinking|thought|reasoning)>")
_MARKDOWN = "*_` "
MARKER = re.compile(r"(?<!#)####(?!#)")


def last_number(text: str) -> str | None:
    """The last number in a text, as written; None where it has none."""
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def numbers_in(text: str) -> list[str]:
    """The numbers in a text, as written."""
    return [match.group() for match in _NUMBER.finditer(plain_signs(text))]


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces are balanced; None where there is none."""
    open_at: list[tuple[int, bool]] = []  # where each open brace's content begins, and whether it is a box's
    last = (-1, -1)
    for match in _BRACE.finditer(text):
        token = match.group()
        if match["box"] or token == "{":
            open_at.append((match.end(), bool(match["box"])))
        elif token == "}" and open_at:
            start, boxed = open_at.pop()
            last = max(last, (start, match.start())) if boxed else last
    return text[last[0] : last[1]].strip() if last[0] >= 0 else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Every outermost box with its place in the text: `\\boxed{...}`, `\\fbox{...}`, and `\\boxed 5` without braces."""
    open_at: list[tuple[int, int]] = []  # where each open box or brace begins (-1 for a brace), and its content
    found = [(match.start(), match.end(), match["content"].rstrip(".,;:")) for match in _BARE_BOX.finditer(text)]
    for match in _BRACE.finditer(text):
        token = match.group()
        if match["box"] or token == "{":
            open_at.append((match.start() if match["box"] else -1, match.end()))
        elif token == "}" and open_at:
            start, content = open_at.pop()
            if start >= 0:
                found.append((start, match.end(), text[content : match.start()].strip()))
    outermost: list[tuple[int, int, str]] = []
    for box in sorted(found):
        if not outermost or box[0] >= outermost[-1][1]:
            outermost.append(box)
    return outermost


def after_marker(text: str) -> str | None:
    """What follows the last `####`, to the end of its line; None where there is no marker."""
    markers = list(MARKER.finditer(text))
    if not markers:
        return None
    rest = text[markers[-1].end() :].strip()
    return rest.splitlines()[0].strip() if rest else ""


def after_thinking(text: str) -> str:
    """What a completion says after its thinking; nothing where the thinking has no end."""
    tags = list(_THOUGHT.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][0].startswith("</") else ""


def whole_text(text: str) -> str | None:
    """The text itself, without the blanks around it."""
    return text.strip()


def last_match(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    """An extraction that returns the last match of `pattern`: its first group, or all of it where it has no group."""

    def extract(text: str) -> str | None:
        matches = list(pattern.finditer(text))
        return matches[-1].group(1 if pattern.groups else 0) if matches else None

    return extract


def own_turn(text: str) -> str:
    """The text up to the point where the model goes on to invent the next question."""
    for match in _NEXT_TURN.finditer(text):
        if text[: match.start()].strip():
            return text[: match.start()]
    return text


def find_answer(text: str, extract: Callable[[str], str | None]) -> str | None:
    """The answer of the model's own turn, else of the whole text; None where there is nothing to read."""
    turn = text if extract is whole_text else own_turn(text)
    for part in (turn, text) if len(turn) < len(text) else (text,):
        answer = extract(part)
        if answer and any(character.isalnum() for character in answer):
            return answer
    return None


def gold_answer(gold: Any) -> str | None:
    """The gold answer of a data column: what follows its last `####`, else all of it; None where it is empty.

    Raises TypeError for what is neither text nor a number; a bool is not a number here.
    """
    if gold is None or gold != gold:  # NaN is how data frames write a missing cell
        return None
    if isinstance(gold, bool) or not isinstance(gold, str | Real | Decimal):
        raise TypeError(f"the gold answer {gold!r} is neither text nor a number")
    text = str(gold)
    return (text.rpartition("####")[2] if "####" in text else text).strip() or None


def same_answer(answer: str, gold: str, ignore_case: bool = True) -> bool:
    """Whether two answers are equal: as exact numbers where both are numbers, else as normalised text."""
    said, wanted = as_number(answer), as_number(gold)
    if said is not None and wanted is not None:
        return said == wanted
    return normalise(answer, ignore_case) == normalise(gold, ignore_case)


@functools.lru_cache(maxsize=65_536)  # a group says the same few answers over and over
def as_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, as in `5`, `Answer: 5`, `x = 5` or `5 apples`; else None."""
    text = _LABEL.sub("", plain_signs(text).strip().strip(_MARKDOWN)).strip(_MARKDOWN)
    match = _NUMBER.match(text)
    if match is None or not _UNIT.match(text, match.end()) or len(match.group()) > _LONGEST_NUMBER:
        return None
    exponent = int((match["exponent"] or "e0")[1:])
    if abs(exponent) > _LONGEST_NUMBER:  # 1e999999999 must not be written out
        return None
    denominator = int((match["denominator"] or "/1")[1:])
    if denominator == 0:
        return None
    value = Fraction(match["digits"].replace(",", "")) * Fraction(10) ** exponent / denominator
    return -value if "-" in ((match["sign"] or "").strip(), match["sign2"]) else value


def plain_signs(text: str) -> str:
    """Unicode minus signs as `-`, thousands separators of LaTeX and typography as nothing."""
    return _GROUPING.sub("", text.translate(_MINUS_SIGNS).replace("{,}", ","))


def normalise(text: str, ignore_case: bool = True) -> str:
    """Text for comparison: Unicode forms united, blanks collapsed, Markdown marks around it and a full stop dropped."""
    text = " ".join(unicodedata.normalize("NFKC", text).split()).strip(_MARKDOWN)
    text = text.removesuffix(".").rstrip(_MARKDOWN)
    return text.casefold() if ignore_case else text
