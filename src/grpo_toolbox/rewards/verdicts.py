"""Reading a judge's verdict, strictly: what is not clearly a verdict is none.

Where the reply is, ends with, or begins with a JSON object (fenced or not), its keys decide. Otherwise the verdict is
the last `[[8]]` at a line's end or line that begins with `SCORE:`, `GRADE:`, `RATING:` or `VERDICT:`; or a last line
that is a label, a number or a fraction, has one behind its last colon, says "the response is <label>", or names one
label in capitals without a doubt; or a first line that begins with a label. Where two of these disagree there is no
verdict. Text before `</think>` is not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KEYS = ("score", "match", "correct", "verdict", "label", "rating", "grade", "winner")
_YES_OR_NO = ("match", "correct")
_TRUTH = {"true": 1.0, "false": 0.0}
_YES = {**_TRUTH, "yes": 1.0, "no": 0.0, "1": 1.0, "0": 0.0}
_LONGEST = 100_000
"""Characters; a longer reply is none."""
_MOST_BRACES = 100
"""How many are tried for the one that opens the last object; a verdict has few, and each try reads to the end."""

_MARKS = "*_`#~\"' \t"
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = re.compile(rf"({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER})|\s*(%))?", re.IGNORECASE)
_RATING = re.compile(rf"\[\[\s*({_NUMBER}(?:\s*/\s*{_NUMBER})?|\w+)\s*\]\][*_`.\s]*$", re.MULTILINE)
_OUT_OF = re.compile(r"(?:/|\b(?:out )?of)[*_` \t]{0,9}\Z", re.IGNORECASE)
"""Before a rating that is the denominator of another."""
_QUOTING = re.compile(
    r"\b(?:writes?|wrote|says?|said|contains?|plant(?:s|ed)?|claims?|asks?|demands?|quotes?|inserts?|includes?)\b"
    r"(?:[^.!?:\n]*|\s*:\s*[\"'“‘]?)\Z",
    re.IGNORECASE,
)
"""Before a rating that is somebody else's."""
_NAMED = re.compile(
    r"^[*_`#~ \t]*(?:final[ \t]+)?(?:score|grade|rating|verdict|judge?ment|winner)[*_` \t]*[:=][*_` \t]*(\S[^\n]*)$",
    re.IGNORECASE | re.MULTILINE,
)
_ABOUT_SCORES = re.compile(r"\b(?:score|grade|rating|verdict|judge?ment|mark|points|total)\b", re.IGNORECASE)
_SAID = re.compile(
    r"(?:(?:so|thus|hence|therefore|overall),?\s+)?(?:(?:the|this)\s+)?(?:(?:model|student|candidate)['’]s\s+)?"
    r"(?:final\s+)?(?:response|answer|completion|candidate|solution|it|this|verdict|grade|result)\s+is\s+(.+)",
    re.IGNORECASE,
)
_SCORED = re.compile(r"(?:(?:so|the|my|its|final|overall)\s+)*(?:score|rating|grade)\s+is\s+(\S+)", re.IGNORECASE)
_SENTENCES = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")
_DOUBT = re.compile(
    r"\b(?:not|never|neither|nor|no|cannot|would|could|if|unless|almost|nearly|partly|partially|hardly|mostly|largely"
    r"|mainly|somewhat|roughly|half)\b|n['’]t\b",
    re.IGNORECASE,
)
_TURN = re.compile(r"\b(?:but|however|although|though|except|wait|if|unless|would|could)\b", re.IGNORECASE)
_FENCE = re.compile(r"```\w*\s*")


@dataclass(frozen=True)
class Scale:
    """How words and numbers become scores from 0 to 1: labels have their value, numbers run from `low` to `high`.

    With `low` = `high` numbers, true and false are no verdict, only labels.
    """

    labels: Mapping[str, float]
    low: float = 0.0
    high: float = 1.0

    def number(self, value: float) -> float | None:
        """The score of a number; None outside the scale, and for NaN."""
        return (value - self.low) / (self.high - self.low) if self._numbers and self.low <= value <= self.high else None

    def fraction(self, value: float, of: float) -> float | None:
        """The score of `value` out of `of`: the scale's own maximum, or another where the scale begins at 0."""
        if of == self.high:
            return self.number(value)
        return value / of if self._numbers and self.low == 0 and 0 <= value <= of and 0 < of < math.inf else None

    def label(self, text: str) -> float | None:
        """The score of a label, upper and lower case alike."""
        return next((value for label, value in self.labels.items() if label.casefold() == text.casefold()), None)

    def text(self, text: str) -> float | None:
        """The score of a text that is a label, a number or a fraction and nothing else."""
        text = _bare(text)
        named = self.label(text)
        match = _FRACTION.fullmatch(text)
        if named is not None or match is None:
            return named
        value, of = float(match[1]), 100.0 if match[3] else match[2]
        return self.number(value) if of is None else self.fraction(value, float(of))

    def json(self, value: Any, yes_or_no: bool = False) -> float | None:
        """The score of a JSON value; where the question was `yes_or_no`, numbers other than 0 and 1 are none."""
        if isinstance(value, bool):
            return float(value) if self._numbers else None
        if isinstance(value, str):
            words = (_YES if yes_or_no else _TRUTH) if self._numbers else {}
            spoken = words.get(value.strip().casefold())
            return spoken if spoken is not None else self.label(_bare(value)) if yes_or_no else self.text(value)
        if not isinstance(value, int | float):
            return None
        return self.number(value) if not yes_or_no else float(value) if value in (0, 1) else None

    @property
    def _numbers(self) -> bool:
        return self.low < self.high


def read_verdict(reply: str | None, scale: Scale) -> float | None:
    """The score that a judge's reply states, None where it states none."""
    text = _spoken(reply)
    if text is None:
        return None
    found, rest = _json_object(text)
    if found is None:
        cut_off = text.rfind("{") > text.rfind("}")  # inside an object, where half a number is another number
        return None if cut_off else _from_text(text, scale)
    verdict = _from_json(found, scale)
    return verdict if not rest or _from_text(rest, scale) in (None, verdict) else None


def _from_text(text: str, scale: Scale) -> float | None:
    stated = [match for pattern in (_RATING, _NAMED) for match in pattern.finditer(text)]
    closing = _from_last_line(text.splitlines()[-1], scale)
    if stated:
        last = max(stated, key=lambda match: match.end())
        before = text[: last.start()]
        verdict = None if _OUT_OF.search(before) or _QUOTING.search(before) else scale.text(last[1])
        return verdict if closing in (None, verdict) else None
    lines = text.splitlines()
    alone = scale.label(_bare(lines[0])) if scale.text(lines[-1]) is not None else None
    if alone not in (None, closing):  # a label on the first line, another on the last, and nothing more said of either
        return None
    opening = _from_first_word(text, scale)
    return closing if opening in (None, closing) else opening if closing is None else None


def read_criteria(reply: str | None, names: Sequence[str], scale: Scale) -> dict[str, float] | None:
    """The score of each criterion, None where any is missing or no score.

    They stand in a JSON object under their names (or there in an object under `scores`), each as a value or as an
    object that `read_verdict` would read; or on lines `name: value`, once each.
    """
    text = _spoken(reply)
    if text is None:
        return None
    found, _ = _json_object(text)
    if found is not None:
        inner = found.get("scores", found)
        found = inner if isinstance(inner, dict) else found
        said = {name: found.get(name.casefold()) for name in names}
        scores = {
            name: _from_json(value, scale) if isinstance(value, dict) else scale.json(value)
            for name, value in said.items()
        }
    else:
        scores = {name: _from_line(text, name, scale) for name in names}
    whole = {name: score for name, score in scores.items() if score is not None}
    return whole if len(whole) == len(names) else None


def _spoken(reply: str | None) -> str | None:
    """What of a reply is read: behind the reasoning; None where there is nothing."""
    if not reply or len(reply) > _LONGEST:
        return None
    before, closed, answer = reply.rpartition("</think>")
    text = _fenced((answer if closed else before + answer).strip())
    return text if text and "<think>" not in text else None  # else the reasoning never ended


def _fenced(text: str) -> str:
    """What one fence around everything holds."""
    whole = re.fullmatch(r"```\w*[ \t]*\n((?:(?!```)[^\0])*)\n?[ \t]*```", text)
    return whole[1].strip() if whole else text


def _json_object(text: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object that the text ends with or begins with, its keys in lower case, and the text behind it.

    At the end it stands at the beginning of a line or behind a colon, so that words which quote one are not taken for
    a verdict. At the beginning it stands alone on its lines, and no brace follows: a judge that goes on to another is
    not finished.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_without_contradictions)
    ending = text.rstrip(_MARKS + "\n")
    for start in _last_braces(ending) if ending.endswith("}") else ():
        found, end = _decoded(decoder, ending, start)
        if found is not None and end == len(ending):
            return (found, "") if _opens(ending[:start]) else (None, "")
    fence = _FENCE.match(text)
    found, end = _decoded(decoder, text, fence.end() if fence else 0)
    rest = text[end:]
    alone = re.match(r"\s*```[ \t]*(\n|$)" if fence else r"[ \t]*\n", rest)
    return (found, rest[alone.end() :].strip()) if found is not None and alone and "{" not in rest else (None, "")


def _last_braces(text: str) -> Iterator[int]:
    place = len(text)
    for _ in range(_MOST_BRACES):
        place = text.rfind("{", 0, place)
        if place < 0:
            return
        yield place


def _opens(before: str) -> bool:
    before = before.rstrip(_MARKS + ">-").removesuffix("json").rstrip(_MARKS + ">-")
    return before.endswith(("\n", ":")) or not before


def _decoded(decoder: json.JSONDecoder, text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    try:
        found, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):  # the judge's text: no object begins here
        return None, start
    return (found, end) if isinstance(found, dict) else (None, start)


def _without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which a key that came twice with different values has none."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        key = key.strip().casefold()
        found[key] = value if key not in found or found[key] == value else None
    return found


def _from_json(found: Mapping[str, Any], scale: Scale) -> float | None:
    """The first key of `_KEYS` decides, unless another says the opposite."""
    said = [scale.json(found[key], key in _YES_OR_NO) for key in _KEYS if key in found]
    return None if not said or {0.0, 1.0} <= set(said) else said[0]


def _from_line(text: str, name: str, scale: Scale) -> float | None:
    lines = re.findall(
        rf"^[-*_`#~ \t]*{re.escape(name)}[*_` \t]*[:=][*_` \t]*(\S[^\n]*)$", text, re.IGNORECASE | re.MULTILINE
    )
    return scale.text(lines[0]) if len(lines) == 1 else None


def _from_last_line(line: str, scale: Scale) -> float | None:
    """The verdict of a last line that is one, has one behind its last colon, or says or names it."""
    whole = scale.text(line)
    if whole is not None:
        return whole
    before, _, behind = line.rpartition(":")
    verdict = scale.text(behind) if _ABOUT_SCORES.search(before) else scale.label(_bare(behind))
    sentence = _bare(_SENTENCES.split(line.strip())[-1])
    said = _SAID.fullmatch(sentence) or _SAID.fullmatch(_bare(behind))
    if verdict is None and said is not None:
        verdict = scale.label(_bare(said[1]))
    scored = _SCORED.fullmatch(sentence)
    if verdict is None and scored is not None:
        verdict = scale.text(scored[1])
    if verdict is not None:
        return verdict
    named = {word for word in _WORD.findall(line) if word in scale.labels and word.isupper() and len(word) > 1}
    rest = " ".join(word for word in line.split() if word.strip(_MARKS + ".,!") not in named)
    return scale.labels[named.pop()] if len(named) == 1 and not _DOUBT.search(rest) else None


def _from_first_word(text: str, scale: Scale) -> float | None:
    """The value of a label that the text begins with, where nothing behind it takes it back or names another."""
    for label, value in scale.labels.items():
        head = re.match(rf"[*_`#~ \t]*{re.escape(label)}[*_`]*(?:[.,:;!—–-]|\s*\n)", text, re.IGNORECASE)
        if head is None:
            continue
        rest = text[head.end() :]
        others = (other for other in scale.labels if other != label)
        named = any(re.search(rf"\b{re.escape(other)}\b", rest, re.IGNORECASE) for other in others)
        return None if named or _TURN.search(rest) else value
    return None


def _bare(text: str) -> str:
    """The text without marks of emphasis and a pair of brackets around it and the stop behind it."""
    text = text.strip().strip(_MARKS).rstrip(".!").strip(_MARKS)
    return text[1:-1].strip() if text[:1] + text[-1:] in ("()", "[]") else text
