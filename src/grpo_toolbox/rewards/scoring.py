"""The reward stage: rollouts in, scores out; what can wait is asked while the engine still decodes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from grpo_toolbox.errors import DataError, RewardError
from grpo_toolbox.rewards.budget import ErrorBudget
from grpo_toolbox.rewards.calling import Batch, Rows
from grpo_toolbox.rewards.component import Component
from grpo_toolbox.rewards.contract import TOTAL, Reward
from grpo_toolbox.rewards.outcomes import Kind, Outcome
from grpo_toolbox.rewards.signatures import CONTRACT
from grpo_toolbox.rewards.token_rewards import COLUMN, token_rewards
from grpo_toolbox.rewards.weights import TrainerState
from grpo_toolbox.types import Rollout, Scores

log = logging.getLogger(__name__)

COUNTS = ("reward_errors", "unscored_rows")
"""Metrics that add up where a step is scored in several parts."""


class Scoring:
    """One batch of rollouts being scored while its groups come in, in any order.

        with Scoring(reward, group_size, trainer_state) as scoring:
            scoring.add(first_row, rollouts)  # as often as groups have finished
            scores = scoring.scores()

    Functions that return coroutines are called in `add`, once per call of it, and run from then on; plain functions
    are called in `scores`, once, on all rows and in the caller's thread. What comes out does not depend on the order
    of the calls of `add`. Leaving the block cancels what is still running.
    """

    def __init__(
        self,
        reward: Reward,
        group_size: int,
        trainer_state: TrainerState | None = None,
        budget: ErrorBudget | None = None,
    ) -> None:
        self._reward = reward.at(trainer_state)
        self._group_size = group_size
        self._state = trainer_state
        self._batch = Batch(self._reward.components, budget)
        self._parts: dict[int, Sequence[Rollout]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch.close()

    def add(self, first_row: int, rollouts: Sequence[Rollout]) -> None:
        """Take in finished rollouts, the first of which is row `first_row` of the batch."""
        self._parts[first_row] = rollouts
        if self._batch.waits:
            self._batch.add(rows_from_rollouts(rollouts, self._group_size, self._state, first_row))

    def scores(self) -> Scores:
        """Finish and return the scores of all rows.

        Components (P, G, R) and their weighted total (P, G) are float32, NaN where a function returned None or failed.
        Metrics: `reward_errors`, `unscored_rows`; per component `rewards/<name>/` `scored`, `not_applicable`, `errors`,
        `timeouts`, and `time/<name>` and `time/<name>/slowest` in seconds; and what the functions logged. RewardError
        names function, prompt, completion and value where one fails or returns no finite number.
        """
        rollouts: list[Rollout] = []
        for first_row, part in sorted(self._parts.items()):
            if first_row != len(rollouts):
                raise RewardError(f"the scored rollouts have a gap or an overlap at row {len(rollouts)}.")
            rollouts += part
        if len(rollouts) % self._group_size:
            raise RewardError(f"{len(rollouts)} rollouts are not whole groups of {self._group_size}.")
        rows = rows_from_rollouts(rollouts, self._group_size, self._state)
        written = [one.written or (True,) * len(one.ids) for one in rollouts]
        return _scores(self._reward, rows, self._batch.outcomes(rows), self._group_size, written)


def score_rollouts(
    reward: Reward,
    rollouts: Sequence[Rollout],
    group_size: int,
    trainer_state: TrainerState | None = None,
    budget: ErrorBudget | None = None,
) -> Scores:
    """Score P·G rollouts, prompt-major, as `Scoring` does; every function is called once, on all rows."""
    if group_size < 1 or len(rollouts) % group_size:
        raise RewardError(f"{len(rollouts)} rollouts are not whole groups of {group_size}.")
    with Scoring(reward, group_size, trainer_state, budget) as scoring:
        scoring.add(0, rollouts)
        return scoring.scores()


def rows_from_rollouts(
    rollouts: Sequence[Rollout], group_size: int, trainer_state: TrainerState | None, first_row: int = 0
) -> Rows:
    """What the functions are called with: conversational prompts get their completions as message lists."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
    reserved = [name for name in names if name in CONTRACT]
    if reserved:
        raise DataError(f"data column {reserved[0]!r} bears a name that rewards are passed anyway: rename it.")
    inputs: dict[str, Sequence[Any]] = {
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [_completion(rollout) for rollout in rollouts],
        "completion_ids": [list(rollout.ids) for rollout in rollouts],
        **{name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in names},
    }
    ids = tuple((rollout.prompt.id, (first_row + row) % group_size) for row, rollout in enumerate(rollouts))
    return Rows(inputs, len(rollouts), trainer_state, ids, first_row)


def joined_metrics(metrics: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """Put together the metrics of several parts of a step: means by rows, counts and times added, the slowest call."""
    return {
        name: _joined(name, [(part[name], size) for part, size in zip(metrics, rows, strict=True) if name in part])
        for name in dict.fromkeys(name for part in metrics for name in part)
    }


def _joined(name: str, values: Sequence[tuple[float, int]]) -> float:
    if name.startswith("time/") and name.endswith("/slowest"):
        return max(value for value, _ in values)
    counted = name.startswith("rewards/") and name.rpartition("/")[2] in {str(kind) for kind in Kind}
    if counted or name.startswith("time/") or name.endswith(TOTAL) or name in COUNTS:
        return sum(value for value, _ in values)
    return sum(value * size for value, size in values) / sum(size for _, size in values)


def _scores(
    reward: Reward, rows: Rows, outcomes: Sequence[Outcome], group_size: int, written: Sequence[Sequence[bool]]
) -> Scores:
    import torch

    scores = list(zip(*(outcome.scores for outcome in outcomes), strict=True))  # B rows of R
    totals = [reward.total(row, rows.place(index)) for index, row in enumerate(scores)]
    unscored = totals.count(None)
    if unscored:
        _say_unscored(reward.name)
    shape = (rows.size // group_size, group_size)
    metrics = reward.metrics(outcomes)
    for component, outcome in zip(reward.components, outcomes, strict=True):
        metrics |= _outcome_metrics(component, outcome)
    metrics["reward_errors"] = float(sum(len(outcome.failures) for outcome in outcomes))
    metrics["unscored_rows"] = float(unscored)
    parts = zip(reward.components, outcomes, strict=True)
    paid = token_rewards(
        [(component.name, component.weight, outcome) for component, outcome in parts],
        written,
        rows.place,
    )
    return Scores(
        names=tuple(component.name for component in reward.components),
        weights=tuple(component.weight for component in reward.components),
        components=torch.tensor([_numbers(row) for row in scores]).reshape(*shape, len(reward.components)),
        total=torch.tensor(_numbers(totals)).reshape(shape),
        extras={name: column for name, column in reward.extras(outcomes).items() if paid is None or not _paid(name)},
        metrics=metrics,
        token_rewards=None if paid is None else paid.reshape(*shape, -1),
    )


def _paid(column: str) -> bool:
    """Whether an extra column is what was paid per token: too large to be shown beside the others."""
    return column.rpartition("/")[2] == COLUMN


def _outcome_metrics(component: Component, outcome: Outcome) -> dict[str, float]:
    kinds = outcome.kinds
    return {f"rewards/{component.name}/{kind}": float(kinds.count(kind)) for kind in Kind} | {
        f"time/{component.name}": outcome.seconds,
        f"time/{component.name}/slowest": outcome.slowest,
    }


def _completion(rollout: Rollout) -> str | list[dict[str, str]]:
    return [{"role": "assistant", "content": rollout.text}] if rollout.prompt.conversational else rollout.text


def _numbers(scores: Sequence[float | None]) -> list[float]:
    return [math.nan if score is None else score for score in scores]


@functools.cache
def _say_unscored(reward: str) -> None:
    log.warning(
        "reward %r: every function returned None for some completions. They get advantage 0;"
        " the metric unscored_rows counts them.",
        reward,
    )
