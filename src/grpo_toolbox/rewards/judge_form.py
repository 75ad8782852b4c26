"""What a judge is asked about a completion, or a pair, and how its reply becomes a score."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.judge_panel import Scored
from grpo_toolbox.rewards.judge_prompts import (
    PAIRWISE,
    REFERENCE,
    RUBRIC,
    UNTRUSTED,
    check_template,
    column_text,
    fill,
    template_fields,
)
from grpo_toolbox.rewards.verdicts import Scale, read_criteria, read_verdict

LABELS = {"CORRECT": 1.0, "INCORRECT": 0.0}
PAIR_LABELS = {"A": 1.0, "B": 0.0, "TIE": 0.5}
"""From the side of the response that is shown first."""
PAIRWISE_WITH = ("group", "reference")

_ALONE = "score"


@dataclass(frozen=True)
class Form:
    """One way of asking."""

    template: str
    system: str | None
    scale: Scale
    weights: Mapping[str, float]
    """Of the rubric's criteria; without a rubric there is one, without a name."""
    fixed: Mapping[str, str]
    """What fills the template and is the same for every row."""
    columns: tuple[str, ...]
    """What of a row fills the template, `prompt` among it."""

    def messages(self, row: Mapping[str, Any], texts: Mapping[str, str]) -> list[dict[str, str]]:
        """The chat that asks about `texts`, which the policy wrote, by the name of their slot."""
        values = {name: column_text(row[name]) for name in self.columns}
        filled = fill(self.template, {**self.fixed, **values, **texts})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": filled}]

    def read(self, reply: str | None) -> Scored | None:
        """The score of each criterion that a reply states, None where it states them not all."""
        if _ALONE not in self.weights or len(self.weights) > 1:
            return read_criteria(reply, [*self.weights], self.scale)
        score = read_verdict(reply, self.scale)
        return None if score is None else {_ALONE: score}

    def score(self, scores: Scored) -> float:
        """The weighted mean over the criteria."""
        return sum(self.weights[name] * value for name, value in scores.items()) / sum(self.weights.values())


def build_form(
    template: str | None,
    system: str | None,
    rubric: Sequence[Mapping[str, Any]] | None,
    pairwise: str | None,
    labels: Mapping[str, float] | None,
    scale: float | Sequence[float],
) -> Form:
    """The form that the reward's options describe; ConfigError where they cannot go together."""
    if pairwise is not None and pairwise not in PAIRWISE_WITH:
        raise unknown_option("reward.pairwise", pairwise, PAIRWISE_WITH)
    if pairwise and rubric:
        raise ConfigError("reward.pairwise and reward.rubric are two ways to score: set one of them to null.")
    low, high = _range(scale)
    slots: tuple[str, ...] = ("first", "second") if pairwise else ("completion",)
    own = PAIRWISE if pairwise else RUBRIC if rubric else REFERENCE
    spoken = Scale(_labels(labels, PAIR_LABELS), 0.0, 0.0) if pairwise else Scale(_labels(labels, LABELS), low, high)
    template = own if template is None else template
    check_template(template, slots)
    weights, described = _criteria(rubric)
    fixed = {
        "rubric": described,
        "scale": f"from {low:g} to {high:g}",
        "form": json.dumps(dict.fromkeys(weights, high)),
    }
    fixed = fixed if rubric else {}
    columns = template_fields(template) - {"fence", *slots, *fixed}
    wrong = columns & {*UNTRUSTED}
    if wrong:
        raise ConfigError(f"reward.prompt_template has {{{min(wrong)}}}, which is only there with reward.pairwise.")
    return Form(template, system, spoken, weights, fixed, tuple(sorted(columns)))


def _labels(labels: Mapping[str, float] | None, own: Mapping[str, float]) -> dict[str, float]:
    labels = own if labels is None else labels
    for label, value in labels.items() if isinstance(labels, Mapping) else [(labels, None)]:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(label, str) or not label.strip() or not number:
            raise ConfigError(
                f"reward.labels.{label}={value!r}: labels are words with a number each, such as"
                ' {"yes": 1.0, "no": 0.0} (YAML reads an unquoted yes or no as true or false).'
            )
    return {str(label): float(value) for label, value in labels.items()}


def _range(scale: float | Sequence[float]) -> tuple[float, float]:
    bounds = [0.0, scale] if isinstance(scale, int | float) else scale
    whole = isinstance(bounds, Sequence) and len(bounds) == 2 and all(type(one) in (int, float) for one in bounds)
    if not whole or not bounds[0] < bounds[1] < math.inf or bounds[0] == -math.inf:
        raise ConfigError(
            f"reward.scale={scale!r} must be what a full score is (above 0), or the lowest and the highest number, such"
            " as [1, 5]."
        )
    return float(bounds[0]), float(bounds[1])


def _criteria(rubric: Sequence[Mapping[str, Any]] | None) -> tuple[dict[str, float], str]:
    """The weights of the criteria, and the criteria as the judge reads them."""
    if rubric is None:
        return {_ALONE: 1.0}, ""
    shape = "[{name: clarity, weight: 1.0, description: easy to follow}]"
    if isinstance(rubric, str | Mapping) or not isinstance(rubric, Sequence) or not rubric:
        raise ConfigError(f"reward.rubric={rubric!r} must be a list such as {shape}, or null.")
    weights: dict[str, float] = {}
    lines = []
    for index, one in enumerate(rubric):
        where = f"reward.rubric[{index}]"
        if not isinstance(one, Mapping) or not {"name"} <= set(one) <= {"name", "weight", "description"}:
            raise ConfigError(f"{where}={one!r} must have a name, and may have a weight and a description: {shape}.")
        name, weight = str(one["name"]).strip(), one.get("weight", 1.0)
        if not name or name.casefold() in map(str.casefold, weights):
            raise ConfigError(f"{where}.name={name!r} must be there and differ from the other criteria's.")
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ConfigError(f"{where}.weight={weight!r} must be a number above 0.")
        weights[name] = float(weight)
        lines.append(f"- {name}: {one['description']}" if one.get("description") else f"- {name}")
    return weights, "\n".join(lines)
