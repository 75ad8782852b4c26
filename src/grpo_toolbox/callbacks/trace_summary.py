"""What the action records of a run say: per reward, per prompt, lengths, repeats. One pass over the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_toolbox.callbacks.actions import judged, prompt_text
from grpo_toolbox.errors import ConfigError, DataError

KEPT_TEXTS = 10_000
"""Repeated texts counted at once; beyond twice as many, the rarer half is forgotten."""


@dataclass
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        """None while nothing was added."""
        return self.total / self.count if self.count else None


@dataclass
class StepTally:
    """The sums of one step."""

    rewards: dict[str, Mean] = field(default_factory=dict)
    tokens: dict[bool, Mean] = field(default_factory=lambda: {True: Mean(), False: Mean()})
    """By correctness."""


@dataclass
class PromptTally:
    """The sums of one prompt, over the run and in the first and the last step that saw it."""

    text: str
    first_step: int
    last_step: int
    attempts: int = 0
    solved: Mean = field(default_factory=Mean)
    first: Mean = field(default_factory=Mean)
    last: Mean = field(default_factory=Mean)
    tokens: Mean = field(default_factory=Mean)


class Tally:
    """Everything counted from the records; memory grows with steps and prompts, not with rollouts."""

    def __init__(self, reward: str | None = None) -> None:
        """`reward` names the component that says whether a completion is correct: by default the first one."""
        self._reward = reward
        self.rollouts = 0
        self.truncated = 0
        self.correct = Mean()
        self.nulls: Counter[str] = Counter()
        self.steps: dict[int, StepTally] = {}
        self.prompts: dict[int, PromptTally] = {}
        self.repeated = 0
        self.texts: dict[str, Mean] = {}
        self._group: tuple[int, int] | None = None
        self._in_group: Counter[str] = Counter()
        self._right: dict[str, bool] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one action record. Raises KeyError where a field is missing."""
        rewards = record["rewards"]
        if self._reward is not None and self._reward not in rewards:
            raise ConfigError(f"--reward {self._reward} is not in these traces: {', '.join(rewards)}.")
        value = judged(rewards, record["reward"], self._reward)
        correct = None if value is None else value >= 1
        self.rollouts += 1
        self.truncated += record["finish_reason"] == "length"
        step = self.steps.setdefault(record["step"], StepTally())
        for name, reward in {**rewards, "total": record["reward"]}.items():
            self.nulls[name] += reward is None
            mean = step.rewards.setdefault(name, Mean())
            if reward is not None:
                mean.add(reward)
        if correct is not None:
            self.correct.add(correct)
            step.tokens[correct].add(len(record["token_ids"]))
        self._add_to_prompt(record, correct)
        self._add_to_group(record, correct)

    def finish(self) -> None:
        """Count the repeats of the group that is still open."""
        for text, count in self._in_group.items():
            if count < 2:
                continue
            self.repeated += count - 1
            mean = self.texts.setdefault(text, Mean())
            mean.total += count * self._right.get(text, False)
            mean.count += count
        self._in_group.clear()
        self._right.clear()
        if len(self.texts) > 2 * KEPT_TEXTS:
            self.texts = dict(sorted(self.texts.items(), key=lambda item: -item[1].count)[:KEPT_TEXTS])

    def _add_to_prompt(self, record: Mapping[str, Any], correct: bool | None) -> None:
        number = record["step"]
        prompt = self.prompts.get(record["prompt_id"])
        if prompt is None:
            prompt = PromptTally(prompt_text(record["prompt"]), number, number)
            self.prompts[record["prompt_id"]] = prompt
        prompt.attempts += 1
        prompt.tokens.add(len(record["token_ids"]))
        if number != prompt.last_step:
            prompt.last_step, prompt.last = number, Mean()
        if correct is not None:
            prompt.solved.add(correct)
            prompt.last.add(correct)
            if number == prompt.first_step:
                prompt.first.add(correct)

    def _add_to_group(self, record: Mapping[str, Any], correct: bool | None) -> None:
        group = (record["step"], record["group"])
        if group != self._group:
            self.finish()
            self._group = group
        self._in_group[record["completion"]] += 1
        self._right[record["completion"]] = bool(correct)


def read_actions(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, record); the record is None for a line that is not JSON, such as a last one cut off."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, json.loads(line)
            except ValueError:  # a process killed while writing leaves half a line
                yield number, None


def summarise(path: Path, prompts: int = 5, reward: str | None = None) -> dict[str, Any]:
    """Return the summary of an actions.jsonl as plain JSON values, with `prompts` hardest and easiest prompts.

    Correct means that the component `reward` (by default the first, or the total where it is null) is at least 1.
    `first` and `last` are means over the first and the last fifth of the steps.
    Raises DataError on a file without action records, ConfigError on an unknown reward.
    """
    tally, unreadable = Tally(reward), 0
    for number, record in read_actions(path):
        if record is None:
            unreadable += 1
            continue
        try:
            tally.add(record)
        except (KeyError, TypeError) as error:  # another program's file
            raise DataError(
                f"{path}, line {number} is not an action record ({error}): give an actions.jsonl."
            ) from error
    tally.finish()
    if not tally.rollouts:
        raise DataError(f"{path} holds no whole record yet: wait for the first step to finish.")
    return {"path": str(path), "unreadable_lines": unreadable, **_report(tally, prompts)}


def _report(tally: Tally, prompts: int) -> dict[str, Any]:
    first, last = _ends(tally.steps)
    return {
        "rollouts": tally.rollouts,
        "steps": len(tally.steps),
        "first_step": min(tally.steps),
        "last_step": max(tally.steps),
        "prompts": len(tally.prompts),
        "correct": tally.correct.value,
        "truncated": tally.truncated / tally.rollouts,
        "rewards": {
            name: {
                "first": _pool(step.rewards.get(name) for step in first),
                "last": _pool(step.rewards.get(name) for step in last),
                "null": count / tally.rollouts,
            }
            for name, count in tally.nulls.items()
        },
        "length": {
            label: {
                "first": _pool(step.tokens[correct] for step in first),
                "last": _pool(step.tokens[correct] for step in last),
            }
            for label, correct in (("correct", True), ("wrong", False))
        },
        **_prompts(tally.prompts, prompts),
        "repeats": {
            "share": tally.repeated / tally.rollouts,
            "texts": [
                {"text": text, "count": mean.count, "correct": mean.value}
                for text, mean in sorted(tally.texts.items(), key=lambda item: (-item[1].count, item[0]))[:5]
            ],
        },
    }


def _ends(steps: Mapping[int, StepTally]) -> tuple[Sequence[StepTally], Sequence[StepTally]]:
    ordered = [steps[number] for number in sorted(steps)]
    fifth = max(1, len(ordered) // 5)
    return ordered[:fifth], ordered[-fifth:]


def _pool(means: Iterable[Mean | None]) -> float | None:
    """Return the mean over all rollouts behind the means, each rollout counting once."""
    pooled = Mean()
    for mean in means:
        if mean is not None:
            pooled.total += mean.total
            pooled.count += mean.count
    return pooled.value


def _prompts(prompts: Mapping[int, PromptTally], n: int) -> dict[str, Any]:
    """Return the hardest and the easiest `n` prompts by solve rate; where they would overlap, all are `hardest`."""
    rows: list[dict[str, Any]] = [
        {
            "prompt_id": prompt_id,
            "prompt": prompt.text,
            "solve_rate": prompt.solved.value,
            "attempts": prompt.attempts,
            "mean_tokens": prompt.tokens.value,
            "first": prompt.first.value,
            "last": prompt.last.value,
        }
        for prompt_id, prompt in prompts.items()
    ]
    rows.sort(key=lambda row: (row["solve_rate"] is None, row["solve_rate"], -row["attempts"], row["prompt_id"]))
    if len(rows) <= 2 * n:
        return {"hardest": rows, "easiest": []}
    scored = [row for row in rows if row["solve_rate"] is not None]
    return {"hardest": rows[:n], "easiest": scored[::-1][:n]}
