"""What one step's rollouts and scores look like in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_toolbox.types import Rollout, Scores

SOLVED = 1.0
"""A completion is solved when its first reward component reaches this."""


def solved(scores: Scores) -> Tensor:
    """Return (P, G) True where the first reward component (the correctness by convention) is at least 1."""
    return scores.components[..., 0] >= SOLVED


def pass_rate(scores: Scores) -> Tensor:
    """Return the share solved of the completions that the first component applies to; NaN where there are none."""
    return solved(scores)[scores.components[..., 0].isfinite()].float().mean()


def finite_metrics(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the scalars as numbers, without those that are NaN: a mean over nothing is left out."""
    return {name: float(value) for name, value in values.items() if bool(torch.isfinite(value))}


def step_metrics(rollouts: Sequence[Rollout], scores: Scores) -> dict[str, float]:
    """Return the metrics of one step that do not need the model; a mean over nothing is left out."""
    total = scores.total
    group_size = total.shape[1]
    scored = total.isfinite().sum(dim=1)
    values = {
        "reward_mean": total.nanmean(),
        "reward_std": _std(total.flatten()),
        "group_reward_std": _std(total).nanmean(),
        "frac_reward_zero_std": without_spread(total)[scored > 1].float().mean(),
        "pass_rate": pass_rate(scores),
        "duplicate_rate": torch.tensor(_duplicate_rate(rollouts, group_size)),
    }
    return finite_metrics(values) | length_metrics(rollouts) | component_metrics(scores) | dict(scores.metrics)


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return what there is to say of lengths, in tokens that the model wrote; 0 for those that ended where none did."""
    every = [one.written_tokens for one in rollouts]
    ended = [length for length, one in zip(every, rollouts, strict=True) if one.finish_reason == "stop"] or [0]
    return {
        "completion_tokens": sum(every) / len(every),
        "completions/min_length": float(min(every)),
        "completions/max_length": float(max(every)),
        "completions/clipped_ratio": sum(one.finish_reason == "length" for one in rollouts) / len(rollouts),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def component_metrics(scores: Scores) -> dict[str, float]:
    """Return mean and spread of each component over all completions that it applies to; those of none are left out.

    The spread is the standard deviation with n − 1, and 0 for a single number.
    """
    columns = {name: scores.components[..., index].flatten() for index, name in enumerate(scores.names)}
    kept = {name: column[column.isfinite()] for name, column in columns.items()}
    means = {f"rewards/{name}/mean": float(column.mean()) for name, column in kept.items() if len(column)}
    spreads = {name: float(_std(column)) if len(column) > 1 else 0.0 for name, column in kept.items() if len(column)}
    return means | {f"rewards/{name}/std": spread for name, spread in spreads.items()}


def _std(values: Tensor) -> Tensor:
    """Sample standard deviation over the entries (…, n) that are finite; NaN for fewer than two."""
    finite = values.isfinite()
    kept, count = values.double().where(finite, 0.0), finite.sum(dim=-1)
    centred = (kept - (kept.sum(dim=-1) / count).unsqueeze(-1)).where(finite, 0.0)
    return (centred.square().sum(dim=-1) / (count - 1)).sqrt().where(count > 1, torch.nan)


def without_spread(total: Tensor) -> Tensor:
    """Return (P,) True for groups whose scored rewards are all equal: they carry no gradient."""
    high = total.nan_to_num(float("-inf")).amax(dim=1)
    low = torch.where(total.isfinite(), total, float("inf")).amin(dim=1)
    return high <= low


def _duplicate_rate(rollouts: Sequence[Rollout], group_size: int) -> float:
    """Share of completions that repeat an earlier one of their group, token for token."""
    groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
    repeated = sum(len(group) - len({one.ids for one in group}) for group in groups)
    return repeated / len(rollouts)
