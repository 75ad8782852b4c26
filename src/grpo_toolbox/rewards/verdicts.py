"""Reading a judge's verdict, strictly: what is not clearly a verdict is none.

Where the reply is or ends with a JSON object (fenced or not), its key score, match, correct, verdict or label decides.
Otherwise the verdict is the last `[[8]]` at a line's end or line that begins with `SCORE:`, `GRADE:`, `RATING:` or
`VERDICT:`; or a last line that is a label, a number or a fraction, has one behind its last colon, or names one label in
capitals without a negation. Where the two disagree there is no verdict. Text before `</think>` is not read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_KEYS = ("score", "match", "correct", "verdict", "label")
_MARKS = "*_`#~\"' \t"
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = re.compile(rf"({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?", re.IGNORECASE)
_RATING = re.compile(rf"\[\[\s*({_NUMBER}(?:\s*/\s*{_NUMBER})?|\w+)\s*\]\][*_`.\s]*$", re.MULTILINE)
_NAMED = re.compile(
    r"^[*_`#~ \t]*(?:final[ \t]+)?(?:score|grade|rating|verdict|judge?ment)[*_` \t]*[:=][*_` \t]*(\S[^\n]*)$",
    re.IGNORECASE | re.MULTILINE,
)
_WORD = re.compile(r"\w+")
_NEGATION = re.compile(r"\b(?:not|never|neither|nor|no|cannot)\b|n['’]t\b", re.IGNORECASE)


def read_verdict(reply: str | None, labels: Mapping[str, float], scale: float = 1.0) -> float | None:
    """The score that a judge's reply states, None where it states none.

    Numbers count from 0 to `scale` and are divided by it, fractions (`8/10`) by their own denominator; labels have the
    value of `labels`. Numbers outside, NaN and infinities are no verdict.
    """
    if not reply:
        return None
    before, closed, answer = reply.rpartition("</think>")
    text = (answer if closed else before + answer).strip()
    if not text or "<think>" in text:  # the reasoning never ended
        return None
    found = _json_object(text)
    if found is not None:
        return _from_json(found, labels, scale)
    stated = [match for pattern in (_RATING, _NAMED) for match in pattern.finditer(text)]
    closing = _from_last_line(text.splitlines()[-1], labels, scale)
    if not stated:
        return closing
    verdict = _from_text(max(stated, key=lambda match: match.end())[1], labels, scale)
    return verdict if closing in (None, verdict) else None


def _json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, or ends with (a code fence around it put aside)."""
    text = text.removesuffix("```").rstrip()
    if not text.endswith("}"):
        return None
    start = text.rfind("{")
    while start >= 0:
        try:
            found = json.loads(text[start:])
        except (ValueError, RecursionError):  # the judge's text: this brace does not open the object
            start = text.rfind("{", 0, start)
            continue
        return found if isinstance(found, dict) else None
    return None


def _from_json(found: Mapping[str, Any], labels: Mapping[str, float], scale: float) -> float | None:
    value = next((found[key] for key in _KEYS if key in found), None)
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        spoken = {"true": 1.0, "false": 0.0}.get(value.strip().lower())
        return spoken if spoken is not None else _from_text(value, labels, scale)
    return _scaled(value, scale) if isinstance(value, int | float) else None


def _from_text(text: str, labels: Mapping[str, float], scale: float) -> float | None:
    """The value of a text that is a label, a number or a fraction and nothing else."""
    text = text.strip().strip(_MARKS).rstrip(".!").strip(_MARKS)
    by_name = {label.casefold(): value for label, value in labels.items()}
    if text.casefold() in by_name:
        return by_name[text.casefold()]
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    return _scaled(float(match[1]), scale if match[2] is None else float(match[2]))


def _from_last_line(line: str, labels: Mapping[str, float], scale: float) -> float | None:
    """The verdict of a last line that is one, has one behind its last colon, or names one label in capitals."""
    for part in (line, line.rpartition(":")[2]):
        verdict = _from_text(part, labels, scale)
        if verdict is not None:
            return verdict
    named = {word for word in _WORD.findall(line) if word in labels and word.isupper() and len(word) > 1}
    rest = " ".join(word for word in line.split() if word.strip(_MARKS + ".,!") not in named)
    return labels[named.pop()] if len(named) == 1 and not _NEGATION.search(rest) else None


def _scaled(value: float, scale: float) -> float | None:
    return value / scale if 0 <= value <= scale and 0 < scale < math.inf else None
