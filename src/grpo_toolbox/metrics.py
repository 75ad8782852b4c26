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
    lengths = torch.tensor([one.written_tokens for one in rollouts], dtype=torch.float32)
    scored = total.isfinite().sum(dim=1)
    values = {
        "reward_mean": total.nanmean(),
        "reward_std": _std(total.flatten()),
        "group_reward_std": torch.stack([_std(group) for group in total]).nanmean(),
        "frac_reward_zero_std": without_spread(total)[scored > 1].float().mean(),
        "pass_rate": pass_rate(scores),
        "completion_tokens": lengths.mean(),
        "completions/clipped_ratio": torch.tensor([one.finish_reason == "length" for one in rollouts]).float().mean(),
        "duplicate_rate": torch.tensor(_duplicate_rate(rollouts, group_size)),
    }
    for index, name in enumerate(scores.names):
        values[f"rewards/{name}/mean"] = scores.components[..., index].nanmean()
    return finite_metrics(values) | dict(scores.metrics)


def _std(values: Tensor) -> Tensor:
    """Sample standard deviation over the entries that are not NaN; NaN for fewer than two."""
    kept = values[values.isfinite()].double()
    return kept.std() if len(kept) > 1 else torch.tensor(float("nan"), dtype=torch.float64)


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
