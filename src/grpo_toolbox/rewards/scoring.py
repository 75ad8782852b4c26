"""The reward stage: rollouts in, scores out."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

from grpo_toolbox.errors import DataError, RewardError
from grpo_toolbox.rewards.calling import Rows, call_components
from grpo_toolbox.rewards.contract import Reward, TrainerState
from grpo_toolbox.rewards.signatures import CONTRACT
from grpo_toolbox.types import Rollout, Scores

log = logging.getLogger(__name__)


def score_rollouts(
    reward: Reward, rollouts: Sequence[Rollout], group_size: int, trainer_state: TrainerState | None = None
) -> Scores:
    """Score P·G rollouts, prompt-major, with every function of `reward`.

    Returns components (P, G, R) and their weighted total (P, G) in float32, NaN where a function returned None; the
    metrics `reward_errors`, `unscored_rows`, `time/<component>` in seconds, and what the functions logged.
    RewardError names function, prompt, completion and value where one fails or returns no finite number.
    """
    import torch

    rows = rows_from_rollouts(rollouts, group_size, trainer_state)
    outcomes = call_components(reward.components, rows)
    scores = list(zip(*(outcome.scores for outcome in outcomes), strict=True))  # B rows of R
    totals = [reward.total(row, rows.place(index)) for index, row in enumerate(scores)]
    unscored = totals.count(None)
    if unscored:
        _say_unscored(reward.name)
    shape = (rows.size // group_size, group_size)
    return Scores(
        names=tuple(component.name for component in reward.components),
        weights=tuple(component.weight for component in reward.components),
        components=torch.tensor([_numbers(row) for row in scores]).reshape(*shape, len(reward.components)),
        total=torch.tensor(_numbers(totals)).reshape(shape),
        extras=reward.extras(outcomes),
        metrics={
            **reward.metrics(outcomes),
            "reward_errors": float(sum(outcome.errors for outcome in outcomes)),
            "unscored_rows": float(unscored),
            **{
                f"time/{component.name}": outcome.seconds
                for component, outcome in zip(reward.components, outcomes, strict=True)
            },
        },
    )


def rows_from_rollouts(rollouts: Sequence[Rollout], group_size: int, trainer_state: TrainerState | None) -> Rows:
    """What the functions are called with: conversational prompts get their completions as message lists."""
    if group_size < 1 or len(rollouts) % group_size:
        raise RewardError(f"{len(rollouts)} rollouts are not whole groups of {group_size}.")
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
    ids = tuple((rollout.prompt.id, index % group_size) for index, rollout in enumerate(rollouts))
    return Rows(inputs, len(rollouts), trainer_state, ids)


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
