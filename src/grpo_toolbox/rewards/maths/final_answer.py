"""Where in a completion its final answer stands, and what a data column's gold answer is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from grpo_toolbox.rewards.answers import after_marker, after_thinking, boxes, gold_answer, last_number, own_turn

_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(
    r"(?:\banswer\b|答案)[ \t*_]*"
    r"(?:(?:is|are|equals|would be|will be|should be|must be)\b[ \t]*:?|[:=：是为]|\n)[*_:\s]*(?=[^\n])"
    r"|\b(?:correct|right|best)[ \t]+(?:option|choice)[ \t*_]*(?:is\b|:)[*_:\s]*"
    r"(?=(?-i:\W{0,9}[A-J]\b(?![ \t]+[a-z])))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<!\d)[.!](?=\s|\Z)|(?<=\d)\.(?=\s|\Z)")
_ASIDE = re.compile(
    r"(?<=[\w)}$%*])"
    r"(?:\s+\((?=[a-z]{2,}[ \w]*\))|,?\s+(?:and not|not|rather than|instead of|because|since|as we|which)\b)"
)
_JOINT = re.compile(r"(?:\s|[$,;&()*]|\\[,;()\[\]]|\\q?quad|\\text\{|\}|\b(?:and|or)\b|\\\\)*")
_JOINING = re.compile(r"\b(?:and|or)\b|,|;")
_DOTS = re.compile(r"(?:\s|\.|…|\\[lc]?dots|\?|_|-|\\square|\\text\{\s*\})*")
_LONGEST_LINE = 100
_MARKDOWN = "*_` \t"


def boxed_answer(text: str) -> str | None:
    """The content of the last box that is not empty.

    Boxes that only `,`, `and` or `or` stand between are one answer: `\\boxed{3} and \\boxed{5}` is `3,5`, and a row
    of guesses is no single answer.
    """
    found = [box for box in boxes(text) if not _DOTS.fullmatch(box[2])]
    if not found:
        return None
    contents = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[end:start]
        if not _JOINT.fullmatch(between) or not _JOINING.search(between):
            break
        contents.append(content)
    return ", ".join(dict.fromkeys(reversed(contents)))


def stated_answer(text: str) -> str | None:
    """The answer where it is announced, not boxed: in answer tags, after `####`, after `the answer is`, or alone."""
    tags = _ANSWER_TAG.findall(text)
    if tags:
        stated = list(_STATED.finditer(tags[-1]))
        return tags[-1][stated[-1].end() if stated else 0 :].strip() or None
    marked = after_marker(text)
    if marked:
        return marked
    stated = list(_STATED.finditer(text))
    if stated:
        return _first_sentence(text[stated[-1].end() :].partition("\n")[0])
    line = text.strip()
    alone = "\n" not in line and len(line) <= _LONGEST_LINE and r"\boxed" not in line
    return line if alone and any(map(_says_something, line)) else None


def number_or_stated(text: str) -> str | None:
    """The announced answer, else the last number in the text."""
    text = text.strip()
    stated = stated_answer(text)
    return stated if stated is not None and stated != text else last_number(text) or stated


def no_other(text: str) -> None:
    """No answer but the boxed one counts."""
    return None


FALLBACKS: dict[str, Callable[[str], str | None]] = {
    "none": no_other,
    "announced": stated_answer,
    "last_number": number_or_stated,
}
"""Where a completion without box may have its answer."""


def final_answer(text: str, fallback: str) -> str | None:
    """The final answer of a completion, of its own turn rather than of one it invents; None where it has none."""
    text = after_thinking(text)
    turn = own_turn(text)
    for part in (turn, text) if len(turn) < len(text) else (text,):
        answer = boxed_answer(part) or FALLBACKS[fallback](part)
        if answer and (answer := answer.strip(_MARKDOWN)):
            return answer
    return None


def gold_formula(gold: Any) -> str | None:
    """The gold answer of a data column: its last box, what follows its last `####`, else all of it.

    None where it is empty. Raises TypeError for what is neither text nor a number.
    """
    if isinstance(gold, str) and (boxed := boxed_answer(gold)):
        return boxed
    return gold_answer(gold)


def _says_something(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character) == "Sm"


def _first_sentence(text: str) -> str | None:
    """The first sentence without what is said about it behind: `58 (see above)`, `3.5 and not 4`."""
    end = _SENTENCE_END.search(text)
    sentence = text[: end.start()] if end else text
    aside = _ASIDE.search(sentence)
    return (sentence[: aside.start()] if aside else sentence).strip() or None
