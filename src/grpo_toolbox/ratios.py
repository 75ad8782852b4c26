"""Ratios beside the surrogate: their level, and the correction for a sampler that is not quite the policy.

Everything here takes and returns `(B, T)` tensors; rows of sequence-level values are `(B, 1)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.ops import log_ratio, masked, masked_row_mean

# ---- level: what the surrogate takes a ratio of ----------------------------------------------------------------------


def token_level(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log ρₜ = log π(yₜ) − log π_old(yₜ): one ratio per token (PPO, GRPO)."""
    return log_ratio(logps, old_logps)


def sequence_level(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log s = (1/|o|) Σₜ log ρₜ: the geometric mean, one ratio per sequence (GSPO; Zheng et al., 2025)."""
    return masked_row_mean(log_ratio(logps, old_logps), mask).expand_as(logps)


def sequence_token_level(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log sₜ = sg(log s) + log π − sg(log π): GSPO's value, each token's own gradient (GSPO-token)."""
    return sequence_level(logps, old_logps, mask).detach() + logps - logps.detach()


def product_level(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """log Π ρ = Σₜ log ρₜ: the ratio of whole sequences (RLOO's trainers); it leaves any band quickly with length."""
    return log_ratio(masked(logps, mask).sum(1, keepdim=True), masked(old_logps, mask).sum(1, keepdim=True)).expand_as(
        logps
    )


RATIO_LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
    "product": product_level,
}


# ---- correction: trainer against sampler -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """How a token's loss is weighted with w = π_trainer/π_sampler at the weights that sampled it.

    `truncate` caps w at `high` (Yao et al., 2025); `mask` drops what lies outside [low, high] and keeps w inside (MIS;
    IcePop, Ring-1T, 2025, is the token-level mask). Levels: `token`, `sequence` (product), `geometric` (mean).
    """

    level: str
    drops: bool
    low: float
    """0 is no bound."""
    high: float
    """inf is no bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ConfigError(
                f"objective.correction_min={self.low} must be at least 0 and below correction_max={self.high}."
            )

    def __call__(self, trainer_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> Tensor:
        """Return the weights (B, T); constants, never differentiated."""
        w = CORRECTION_LEVELS[self.level](trainer_logps.detach(), sampler_logps, mask).exp()
        return torch.where((w >= self.low) & (w <= self.high), w, 0.0) if self.drops else w.clamp(self.low, self.high)


CORRECTION_LEVELS = {"token": token_level, "sequence": product_level, "geometric": sequence_level}

CORRECTIONS: dict[str, Correction] = {
    "token_truncate": Correction("token", drops=False, low=0.0, high=2.0),
    "token_mask": Correction("token", drops=True, low=0.5, high=2.0),
    "sequence_truncate": Correction("sequence", drops=False, low=0.0, high=3.0),
    "sequence_mask": Correction("sequence", drops=True, low=0.0, high=3.0),
    "geometric_truncate": Correction("geometric", drops=False, low=0.0, high=2.0),
    "geometric_mask": Correction("geometric", drops=True, low=0.5, high=2.0),
    "icepop": Correction("token", drops=True, low=0.5, high=5.0),
}
"""By name, with the bounds that hold where `correction_min` or `correction_max` is not set."""


def off_policy_rows(logps: Tensor, sampler_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return (B, T) 1 on rows to keep: A ≥ 0, or mean log(π_sampler/π) ≤ threshold (DeepSeek-V3.2, 2025).

    Bad completions that the policy has already moved away from teach it nothing more and destabilise it.
    """
    drift = masked_row_mean(sampler_logps - logps.detach(), mask)  # (B, 1)
    return ((advantages >= 0) | (drift <= threshold)).expand_as(logps).to(logps.dtype)
