"""Log-probs, entropies and advantages in float64 that TRL's objective and ours are both given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.objectives import build_objective, loss_and_terms
from grpo_toolbox.ops import Denominators
from grpo_toolbox.surrogates import OBJECTIVES
from trl_side import MAX_TOKENS, loss_on_log_probs

# Two groups of four rows; ratios on both sides of every bound that the tests set (.8, 1.1, 1.28, 1.6)
ROWS, WIDTH = 8, 6
LENGTHS = torch.tensor([6, 3, 1, 4, 2, 6, 5, 3])
MASK = torch.arange(WIDTH) < LENGTHS.unsqueeze(1)
_SEEDED = torch.Generator().manual_seed(0)


def _noise(scale: float, shift: float = 0.0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=_SEEDED, dtype=torch.float64) * scale + shift


NOW = _noise(0.5, -2.0)
OLD = NOW + _noise(0.35)
REFERENCE = NOW + _noise(0.5)
SAMPLER = NOW + _noise(0.3)
ENTROPY = _noise(0.3, 1.5)
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5, 2.0, -0.1, 0.0, -1.1], dtype=torch.float64)
HALVES = (range(0, 4), range(4, 8))
WHOLE = (range(0, 8),)

Result = tuple[Tensor, Tensor, Tensor]
"""Loss, and its gradients (B, T) in log-probs and entropies."""


def theirs(trainer: Any, parts: Sequence[Sequence[int]], **columns: Tensor) -> Result:
    """Add up the trainer's losses over the micro-batches `parts`; columns under TRL's names."""
    logps, entropy = NOW.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    loss = loss_on_log_probs(trainer, logps, entropy, MASK, {"advantages": ADVANTAGES, **columns}, parts)
    return _with_gradients(loss, logps, entropy)


def ours(options: dict[str, Any], rows: Sequence[int] = range(ROWS), mask: Tensor = MASK, **columns: Tensor) -> Result:
    """Build the objective (`name` is its surrogate's) and apply it to `rows`, which are the whole step."""
    chosen, options = list(rows), dict(options)
    objective = build_objective(OBJECTIVES[options.pop("name", "clipped")], **options)
    logps, entropy = NOW.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    loss, _ = loss_and_terms(
        objective,
        logps=logps[chosen],
        entropy=entropy[chosen],
        advantages=ADVANTAGES[chosen].unsqueeze(1),
        mask=mask[chosen],
        denominators=Denominators(len(chosen), float(mask[chosen].sum()), objective.length or MAX_TOKENS),
        **{name: column[chosen] for name, column in columns.items()},
    )
    return _with_gradients(loss, logps, entropy)


def _with_gradients(loss: Tensor, logps: Tensor, entropy: Tensor) -> Result:
    in_logps, in_entropy = torch.autograd.grad(loss, (logps, entropy), materialize_grads=True)
    return loss.detach(), in_logps, in_entropy


def assert_equal(mine: Result, other: Result) -> None:
    """Loss and gradients agree to nine digits, and there is a gradient to agree on."""
    assert other[1].abs().sum() > 0
    torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-9)
