"""A grader on trial: the data's own answers, written as completions, must score, and what is no answer must not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

from grpo_toolbox.rewards.answers import gold_answer, same_answer
from grpo_toolbox.rewards.component import Component
from grpo_toolbox.rewards.contract import Reward
from grpo_toolbox.rewards.golds import FORMS
from grpo_toolbox.rewards.scoring import score_rollouts
from grpo_toolbox.rewards.signatures import is_async, unwrapped
from grpo_toolbox.rewards.trial_texts import last_message
from grpo_toolbox.types import Prompt, Rollout


@dataclass(frozen=True)
class Trial:
    """Shares of rows that a grader gave at least 1."""

    right: Mapping[str, float]
    """By the form in which the row's own answer was written; `as in the data` is the column as it stands."""
    wrong: Mapping[str, float]
    """By what was written instead: nothing, the prompt, or another row's answer in the form that is read best."""


def graders(reward: Reward) -> list[Component]:
    """Return the components that compare with a data column; judges, which are asked over a network, are none."""
    return [part for part in reward.components if part.signature.columns and _offline(part)]


def _offline(part: Component) -> bool:
    return not is_async(part.function) or getattr(unwrapped(part.function), "offline", False)


def try_grader(grader: Component, prompts: Sequence[Prompt]) -> Trial | str:
    """Have `grader` score made-up completions of `prompts`; or say why that cannot be done.

    Raises RewardError where the grader raises.
    """
    columns = grader.signature.columns
    column = "answer" if "answer" in columns else columns[0]
    golds = [prompt.columns.get(column) for prompt in prompts]
    if not all(gold is None or (isinstance(gold, str | Real) and not isinstance(gold, bool)) for gold in golds):
        return f"column {column!r} is neither text nor numbers"
    rows = [
        (prompt, gold, answer) for prompt, gold in zip(prompts, golds, strict=True) if (answer := gold_answer(gold))
    ]
    if not rows:
        return f"column {column!r} is empty"
    asked = [prompt for prompt, _, _ in rows]
    answers = [answer for _, _, answer in rows]
    right = {"as in the data": _accepted(grader, asked, [str(gold) for _, gold, _ in rows])}
    right |= {name: _accepted(grader, asked, [*map(write, answers)]) for name, write in FORMS.items()}
    best = max(FORMS, key=lambda name: right[name])
    wrong = {
        "empty text": _accepted(grader, asked, [""] * len(asked)),
        "the prompt": _accepted(grader, asked, [last_message(prompt) for prompt in asked]),
    }
    others = [_another(answers, row) for row in range(len(answers))]
    differing = [(prompt, other) for prompt, other in zip(asked, others, strict=True) if other is not None]
    if differing:
        texts = [FORMS[best](other) for _, other in differing]
        wrong["another row's answer"] = _accepted(grader, [prompt for prompt, _ in differing], texts)
    return Trial(right, wrong)


def _accepted(grader: Component, prompts: Sequence[Prompt], texts: Sequence[str]) -> float:
    """Return the share of scored rows that got at least 1; 0 where none was scored."""
    alone = Reward(grader.name, (replace(grader, weight=1.0),))
    rollouts = [Rollout(prompt, (), (), "stop", text) for prompt, text in zip(prompts, texts, strict=True)]
    scores: list[float] = score_rollouts(alone, rollouts, 1).total.flatten().tolist()
    scored = [score for score in scores if not math.isnan(score)]
    return sum(score >= 1 for score in scored) / len(scored) if scored else 0.0


def _another(answers: Sequence[str], row: int) -> str | None:
    """Return the next row's answer that is not this row's."""
    turned = [*answers[row + 1 :], *answers[:row]]
    return next((other for other in turned if not same_answer(other, answers[row])), None)
