"""Rewards that are earned at single tokens: what a function returns under `token_rewards`, as one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards.outcomes import Outcome

if TYPE_CHECKING:
    from torch import Tensor

COLUMN = "token_rewards"
"""The key of a dict that a function returns for a completion: one number per token, the stop token included."""


def token_rewards(
    components: Sequence[tuple[str, float, Outcome]], written: Sequence[Sequence[bool]], place: Callable[[int], str]
) -> Tensor | None:
    """(B, T) the weighted sum of what components (name, weight, outcome) pay at each token, NaN where none was written.

    `written` says of each token of each row whether the policy wrote it. What is paid at one that it did not write is
    paid at the last written one before it, which led to it, or at the first where there is none before. A row without
    score pays nothing. None where no component pays per token; RewardError for what is not a finite number per token.
    """
    import torch

    paying = [one for one in components if COLUMN in one[2].extras]
    if not paying:
        return None
    total = torch.zeros(len(written), max(map(len, written)), dtype=torch.float64)
    for name, weight, outcome in paying:
        for row, (numbers, score) in enumerate(zip(outcome.extras[COLUMN], outcome.scores, strict=True)):
            if numbers is not None and score is not None:
                what = f"reward {name!r} returned {COLUMN} for {place(row)}"
                own = _to_written(_numbers(numbers, len(written[row]), what), written[row])
                total[row, : len(own)] += weight * torch.tensor(own).double()
    on = torch.tensor([[*row, *([False] * (total.shape[1] - len(row)))] for row in written], dtype=torch.bool)
    return total.masked_fill(~on, math.nan).float()


def _to_written(numbers: list[float], written: Sequence[bool]) -> list[float]:
    moved = [0.0] * len(numbers)
    here = next((place for place, mark in enumerate(written) if mark), 0)
    for place, number in enumerate(numbers):
        here = place if written[place] else here
        moved[here] += number
    return moved


def _numbers(numbers: Any, length: int, what: str) -> list[float]:
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if not isinstance(numbers, list | tuple) or len(numbers) != length:
        size = len(numbers) if isinstance(numbers, list | tuple) else type(numbers).__name__
        raise RewardError(f"{what} of another size ({size}): it must be one number for each of its {length} tokens.")
    for one in numbers:
        if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) <= 1e38:
            raise RewardError(f"{what} with {one!r} in it: it must be one finite number per token.")
    return [float(one) for one in numbers]
