"""A step of ours in TRL's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_toolbox.config.fields import METRIC_MAP
from grpo_toolbox.types import Rollout, Scores, Step


def logged_metrics(step: Step) -> dict[str, float]:
    """Return the metrics of a step under TRL's names; those that TRL does not have keep ours.

    `num_tokens` are the prompt and completion tokens of this step; TRL's number is their sum over the run.
    """
    metrics = {METRIC_MAP.get(name, name.replace("eval/", "eval_")): value for name, value in step.metrics.items()}
    if not step.rollouts or step.scores is None:
        return metrics
    return metrics | _lengths(step.rollouts) | _spreads(step.scores)


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What TRL says of lengths, in tokens that the model wrote; 0 for those that ended where none did."""
    every = [one.written_tokens for one in rollouts]
    ended = [one.written_tokens for one in rollouts if one.finish_reason == "stop"] or [0]
    return {
        "num_tokens": float(sum(every) + sum(len(one.prompt.ids) for one in rollouts)),
        "completions/min_length": float(min(every)),
        "completions/max_length": float(max(every)),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def _spreads(scores: Scores) -> dict[str, float]:
    """The standard deviation of each reward function over the batch, with n − 1; 0 for a single number, as in TRL."""
    columns: dict[str, Any] = {name: scores.components[..., index].flatten() for index, name in enumerate(scores.names)}
    kept = {name: column[column.isfinite()].double() for name, column in columns.items()}
    return {
        f"rewards/{name}/std": float(column.std()) if len(column) > 1 else 0.0
        for name, column in kept.items()
        if len(column)
    }
