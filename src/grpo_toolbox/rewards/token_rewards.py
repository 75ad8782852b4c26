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
    components: Sequence[tuple[str, float, Outcome]], lengths: Sequence[int], place: Callable[[int], str]
) -> Tensor | None:
    """(B, T) the weighted sum of what components (name, weight, outcome) pay at each token, NaN off the completions.

    A row without score pays nothing. None where no component pays per token; RewardError for what is not a finite
    number per token.
    """
    import torch

    paying = [one for one in components if COLUMN in one[2].extras]
    if not paying:
        return None
    total = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    for name, weight, outcome in paying:
        for row, (numbers, score) in enumerate(zip(outcome.extras[COLUMN], outcome.scores, strict=True)):
            if numbers is not None and score is not None:
                what = f"reward {name!r} returned {COLUMN} for {place(row)}"
                total[row, : lengths[row]] += weight * torch.tensor(_numbers(numbers, lengths[row], what)).double()
    off = torch.arange(total.shape[1]) >= torch.tensor(lengths).unsqueeze(1)
    return total.masked_fill(off, math.nan).float()


def _numbers(numbers: Any, length: int, what: str) -> list[float]:
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if not isinstance(numbers, list | tuple) or len(numbers) != length:
        size = len(numbers) if isinstance(numbers, list | tuple) else type(numbers).__name__
        raise RewardError(f"{what} of another size ({size}): it must be one number for each of its {length} tokens.")
    for one in numbers:
        if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) <= 1e38:
            raise RewardError(f"{what} with {one!r} in it: it must be one finite number per token.")
    return [float(one) for one in numbers]
