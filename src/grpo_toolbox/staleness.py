"""How old the weights were that drew a rollout's tokens.

The age of a token in step n is n − 1 − v, where v is the version of the weights that drew it: the number of updates
that the policy has had since. In synchronous training it is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_toolbox.types import Rollout


def group_ages(rollouts: Sequence[Rollout], group_size: int, number: int) -> list[int]:
    """Return the age in step `number` of the oldest token of each group (P,) of prompt-major rollouts."""
    ages = [number - 1 - one.oldest_version for one in rollouts]
    return [max(ages[start : start + group_size]) for start in range(0, len(ages), group_size)]


def drawn_since(rollouts: Sequence[Rollout], version: int) -> Tensor:
    """Return (B, T) True on tokens that weights of `version` or newer ones drew, False behind the end."""
    width = max(len(one.ids) for one in rollouts)
    rows = [[drawn >= version for drawn in one.token_versions] for one in rollouts]
    return torch.tensor([[*row, *([False] * (width - len(row)))] for row in rows], dtype=torch.bool)


def tokens_before(rollouts: Sequence[Rollout], version: int) -> int:
    """Return how many tokens weights older than `version` drew."""
    return sum(drawn < version for one in rollouts for drawn in one.token_versions)


def age_metrics(rollouts: Sequence[Rollout], group_size: int, number: int) -> dict[str, float]:
    """Return the mean and the highest age of a step's groups, and how many groups have each age."""
    ages = group_ages(rollouts, group_size, number)
    counts = Counter(ages)
    return {
        "async/age_mean": sum(ages) / len(ages),
        "async/age_max": float(max(ages)),
        **{f"async/groups_of_age/{age}": float(counts[age]) for age in sorted(counts)},
    }
