"""Selection: which tokens of a step are trained, and which are anchored to the policy that the update started from.

The choice is made over all tokens of the step at once, before its first pass: everything here takes flat tensors `(N,)`
over the step's tokens in the order of its rows, so that no choice depends on the split into micro-batches. Values that
differ by less than rounding are ties, and ties fall on the same side: the completions of a group share the entropy of
their first tokens, which a packed and a padded forward pass round differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROUNDING = 1e-5
"""Nats by which forward passes of the same tokens in another layout may differ; in float32 it is about 1e-6."""


def entropy_threshold(entropies: Tensor, share: float) -> Tensor:
    """Return the entropy from which on a token is among the `share` of highest entropy (Wang et al., 2025).

    `entropies` (N,) of all tokens of the step, N >= 1. The same tokens as at or above TRL's interpolated quantile; ties
    with the last of them are in.
    """
    place = math.ceil((1 - share) * (len(entropies) - 1) - 1e-9)  # 1e-9: (1 − .7)·10 is 3.0000000000000004
    return entropies.sort().values[place] - _ROUNDING


def covariances(logps: Tensor, advantages: Tensor) -> Tensor:
    """Return (log π − mean)·(A − mean) per token (N,), means over the step (Cui et al., 2025).

    Their mean is, to first order, how fast a step of policy gradient lowers the entropy.
    """
    return _centred(logps) * _centred(advantages)


def drawn_between(values: Tensor, low: float, high: float, share: float, seed: int) -> Tensor:
    """Return (N,) True on ⌊share·N⌋ tokens, at least one, drawn among those with low ≤ value ≤ high.

    Clip-Cov's choice (Cui et al., 2025). Each place in the step has a random number of its own, drawn from `seed`, and
    the smallest win: one token more or less inside the bounds changes one token of the choice.
    """
    random = torch.rand(len(values), generator=torch.Generator().manual_seed(seed % 2**63)).to(values.device)
    inside = (values >= low) & (values <= high)
    order = torch.where(inside, random, math.inf).argsort()
    chosen = torch.zeros_like(inside)
    chosen[order[: _count(values, share)]] = True
    return chosen & inside


def highest(values: Tensor, share: float) -> Tensor:
    """Return (N,) True on the ⌊share·N⌋ tokens of highest value, at least one, with their ties; none at or below 0.

    KL-Cov's choice (Cui et al., 2025).
    """
    if not len(values):
        return torch.zeros_like(values, dtype=torch.bool)
    lowest = values.topk(_count(values, share)).values[-1]
    rounding = _ROUNDING * values.abs().max().clamp(min=1.0)
    return (values >= lowest - rounding) & (values > rounding)


def _centred(values: Tensor) -> Tensor:
    exact = values.double()
    return exact - exact.mean()


def _count(values: Tensor, share: float) -> int:
    return max(1, math.floor(share * len(values) + 1e-9))
