"""Log-probs, entropies and advantages in float64 that TRL's objective and ours are both given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.meter import Meter
from grpo_toolbox.objectives import Objective, build_objective, loss_and_terms
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
    logps, entropy = NOW.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    loss, _ = _applied(_built(options), list(rows), logps, entropy, mask, columns)
    return _with_gradients(loss, logps, entropy)


def our_metrics(
    options: dict[str, Any], parts: Sequence[Sequence[int]], every_row: bool = False, **columns: Tensor
) -> dict[str, float]:
    """Return what our update logs of one pass over all rows in micro-batches, with or without those of no advantage."""
    objective = _built(options)
    meter = Meter(of_completions=objective.ratio_level != "token")
    meter.begin_pass()
    for part in parts:
        rows = [row for row in part if every_row or ADVANTAGES[row] != 0]
        loss, terms = _applied(objective, rows, NOW, ENTROPY, MASK, columns)
        meter.add(loss, terms, ADVANTAGES[rows].unsqueeze(1), MASK[rows])
    return meter.metrics(float(MASK.sum()), ROWS)


def _built(options: dict[str, Any]) -> Objective:
    options = dict(options)
    return build_objective(OBJECTIVES[options.pop("name", "clipped")], **options)


def _applied(
    objective: Objective, rows: list[int], logps: Tensor, entropy: Tensor, mask: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_and_terms(
        objective,
        logps=logps[rows],
        entropy=entropy[rows],
        advantages=ADVANTAGES[rows].unsqueeze(1),
        mask=mask[rows],
        denominators=Denominators(len(rows), float(mask[rows].sum()), objective.length or MAX_TOKENS),
        **{name: column[rows] for name, column in columns.items()},
    )


def _with_gradients(loss: Tensor, logps: Tensor, entropy: Tensor) -> Result:
    in_logps, in_entropy = torch.autograd.grad(loss, (logps, entropy), materialize_grads=True)
    return loss.detach(), in_logps, in_entropy


def assert_equal(mine: Result, other: Result) -> None:
    """Loss and gradients agree to nine digits, and there is a gradient to agree on."""
    assert other[1].abs().sum() > 0
    torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-9)
