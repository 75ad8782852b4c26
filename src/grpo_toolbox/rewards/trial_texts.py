"""The completions that a reward is tried on: right ones, wrong ones, and ones whose worth its own rules decide."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from grpo_toolbox.rewards.answers import as_number, gold_answer, same_answer
from grpo_toolbox.rewards.contract import Component
from grpo_toolbox.rewards.golds import FORMS, Golds, Row, answer_golds
from grpo_toolbox.rewards.signatures import unwrapped
from grpo_toolbox.types import Prompt

Pairs = list[tuple[Prompt, str]]
Score = Callable[[Pairs], Sequence[float | None]]

ACCEPT, REJECT, TOLERATED = "accept", "reject", "reject most"
OWN = "gold answer"
LONG = 10_000
LONG_ROWS = 8
_FILLING = ("x", "9", "(", "\\boxed{", "a b ", "\n", "<think>", "#### ")
"""What 10,000 characters are made of, by row: patterns and parsers have trouble with different ones."""
OPEN_ROWS = 50
_SEVERAL = 20
"""Rows on which it is tried in which form a function of the user's reads an answer."""


@dataclass
class Texts:
    """Completions by kind, and what could not be written."""

    kinds: dict[str, tuple[str, Pairs]] = field(default_factory=dict)
    """By name: what must become of them, and prompts with completions; the prompt's id is its place among the rows."""
    notes: list[str] = field(default_factory=list)

    def pairs(self, kind: str) -> Pairs:
        """The completions of a kind, none where it could not be written."""
        return self.kinds[kind][1] if kind in self.kinds else []


def compares(part: Component, prompts: Sequence[Prompt], score: Score) -> bool:
    """Whether a part compares completions with the data: it needs a column, or other rows' answers earn differently."""
    if _says_golds(part):
        return bool(part.signature.columns) and _own_golds(part) is not None
    if part.signature.columns:
        return True
    golds = _plain_golds(part, prompts)
    if isinstance(golds, str):
        return False
    for form in FORMS.values():
        some = _written(answer_golds(golds.write, form), prompts[:_SEVERAL])
        texts = [text for _, text in some]
        turned = [(prompt, text) for (prompt, _), text in zip(some, [*texts[1:], *texts[:1]], strict=True)]
        if len(set(texts)) > 1 and list(score(some)) != list(score(turned)):
            return True
    return False


def texts_for(part: Component, prompts: Sequence[Prompt], score: Score, compared: bool) -> Texts:
    """Write the completions that a part is tried on."""
    found = Texts()
    golds = _own_golds(part)
    if compared and golds is None:
        golds = _read_golds(part, prompts, score, found.notes)
    if golds is not None:
        _add_golds(found, golds, prompts, compared)
    must = REJECT if OWN in found.kinds and golds is not None and not golds.charges else ""
    found.kinds["empty text"] = (must, [(prompt, "") for prompt in prompts])
    asked = TOLERATED if must and compared else ""
    found.kinds["the prompt itself"] = (asked, [(prompt, last_message(prompt)) for prompt in prompts])
    found.kinds["10k characters"] = (must, [(one, _long(row)) for row, one in enumerate(prompts[:LONG_ROWS])])
    return found


def last_message(prompt: Prompt) -> str:
    """The text of a prompt; of a conversation that of its last message."""
    text: Any = prompt.text if isinstance(prompt.text, str) else prompt.text[-1]["content"]
    return text if isinstance(text, str) else str(text)


def _says_golds(part: Component) -> bool:
    return hasattr(unwrapped(part.function), "golds")


def _own_golds(part: Component) -> Golds | None:
    return getattr(unwrapped(part.function), "golds", None)


def _read_golds(part: Component, prompts: Sequence[Prompt], score: Score, notes: list[str]) -> Golds | None:
    """Golds for a function that does not say how its answers are written: the form that earns most on some rows."""
    golds = None if _says_golds(part) else _plain_golds(part, prompts)
    if golds is None:
        return None
    if isinstance(golds, str):
        notes.append(f"right answers cannot be written: {golds}; give the function an attribute golds")
        return None
    by_form = {name: answer_golds(golds.write, form) for name, form in FORMS.items()}
    earned = {name: _mean(score(_written(one, prompts[:_SEVERAL]))) for name, one in by_form.items()}
    best = max(by_form, key=lambda name: earned[name])
    notes.append(f"right answers are written in the form that earns most, of {', '.join(FORMS)}: {best}")
    return by_form[best]


def _plain_golds(part: Component, prompts: Sequence[Prompt]) -> Golds | str:
    """The data's answers as they stand, or why there are none."""
    there = prompts[0].columns
    asked = [*part.signature.columns, *(one for one in part.signature.optional if one in there)]
    column = "answer" if "answer" in there and ("answer" in asked or part.signature.everything) else None
    column = column or next(iter(asked), None)
    if column is None:
        return "it asks for no column of the data"
    values = [prompt.columns.get(column) for prompt in prompts]
    if not all(one is None or (isinstance(one, str | Real) and not isinstance(one, bool)) for one in values):
        return f"column {column!r} is neither text nor numbers"
    if not any(gold_answer(one) for one in values):
        return f"column {column!r} is empty"
    return Golds(lambda row: gold_answer(row.get(column)))


def _add_golds(found: Texts, golds: Golds, prompts: Sequence[Prompt], compared: bool) -> None:
    """Add the kinds that are written from gold answers."""
    own = _written(golds, prompts)
    if not own:
        found.notes.append("right answers cannot be written: no row says how one looks, so only wrong ones were tried")
        return
    left = len(prompts) - len(own)
    found.notes += [f"{left} of {len(prompts)} rows have no answer that can be written"] if left else []
    found.kinds[OWN] = (ACCEPT, own)
    _add_changed(found, REJECT, golds.wrong, prompts)
    if compared:
        found.kinds["another row's gold"] = (REJECT, _exchanged(golds, own))
    _add_changed(found, "", golds.open, prompts[:OPEN_ROWS])


def _add_changed(found: Texts, must: str, write: Callable[[Row], Mapping[str, str]], prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        for name, text in write(_row(prompt)).items():
            found.kinds.setdefault(name, (must, []))[1].append((prompt, text))


def _written(golds: Golds, prompts: Sequence[Prompt]) -> Pairs:
    return [(prompt, text) for prompt in prompts if (text := golds.write(_row(prompt)))]


def _row(prompt: Prompt) -> Row:
    return {"prompt": prompt.text, **prompt.columns}


def _exchanged(golds: Golds, own: Pairs) -> Pairs:
    """Each prompt with the gold of the next row whose answer is certainly another one."""
    answer_of = golds.answer or golds.write
    answers = [answer_of(_row(prompt)) or "" for prompt, _ in own]
    pairs = []
    for place, (prompt, _) in enumerate(own):
        turned = [*range(place + 1, len(own)), *range(place)]
        other = next((one for one in turned if _differ(answers[one], answers[place])), None)
        pairs += [] if other is None else [(prompt, own[other][1])]
    return pairs


def _differ(one: str, other: str) -> bool:
    """Whether two answers are certainly not equal: different numbers, or texts that differ in more than layout."""
    numbers = as_number(one), as_number(other)
    if None not in numbers:
        return numbers[0] != numbers[1]
    if numbers != (None, None):
        return False
    bare = [re.sub(r"\\[a-zA-Z]+|[\W_]", "", text).casefold() for text in (one, other)]
    return bare[0] != bare[1] and not same_answer(one, other)


def _mean(scores: Sequence[float | None]) -> float:
    return sum(score or 0.0 for score in scores) / max(1, len(scores))


def _long(row: int) -> str:
    piece = _FILLING[row % len(_FILLING)]
    return (piece * (LONG // len(piece) + 1))[:LONG]
