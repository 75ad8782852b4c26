"""The objective: `loss = aggregate(surrogate(ratio, advantage) + beta · KL)`, a product of small choices.

A surrogate is a pure function `(logps, old_logps, advantages, **options) -> (per-token loss, where it is clipped)` on
`(B, T)` tensors; its options are its keyword arguments. Names of methods (DAPO, Dr. GRPO, …) are presets in
`conf/objective`, never code. `objective.name=my_module:my_fn` plugs in a surrogate of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.ops import AGGREGATIONS, KL, Denominators, kl_is_bounded, log_ratio, masked

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def clipped(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, *, clip_eps: float = 0.2, clip_eps_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return −min(ρA, clip(ρ, 1−ε, 1+ε_high)·A) with ρ = π/π_old (PPO; Schulman et al., 2017).

    `clip_eps_high=None` means `clip_eps`; DAPO (Yu et al., 2025) raises it to 0.28. Clipped is a token whose gradient
    is exactly 0: ρ > 1+ε_high with A > 0, or ρ < 1−ε with A < 0.
    """
    high = 1 + (clip_eps if clip_eps_high is None else clip_eps_high)
    low = 1 - clip_eps
    ratio = log_ratio(logps, old_logps).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return loss, ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))


def reinforce(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return −A · log π: the plain policy gradient (REINFORCE; Williams, 1992), without ratio and without clipping."""
    return -advantages * logps, torch.zeros_like(logps, dtype=torch.bool)


OBJECTIVES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"clipped": clipped, "reinforce": reinforce}


@dataclass(frozen=True)
class Objective:
    """One choice on each axis; `loss` turns log-probs into the scalar to differentiate."""

    surrogate: Surrogate
    loss_agg: str = "seq_mean_token_mean"
    beta: float = 0.0
    """Weight of the KL to the reference; at 0 no reference is loaded."""
    kl: str = "k3"
    length: float | None = None
    """L of `loss_agg=constant`; None means `rollout.max_new_tokens`."""

    def __post_init__(self) -> None:
        if self.loss_agg not in AGGREGATIONS:
            raise unknown_option("objective.loss_agg", self.loss_agg, AGGREGATIONS)
        if self.kl not in KL:
            raise unknown_option("objective.kl", self.kl, KL)
        if not 0 <= self.beta < float("inf"):
            raise ConfigError(f"objective.beta={self.beta} must be a finite number >= 0; 0 switches the KL off.")
        if self.length is not None and not 0 < self.length < float("inf"):
            raise ConfigError(
                f"objective.length={self.length} must be a finite number > 0; null takes rollout.max_new_tokens."
            )

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        """Whether rows of exactly zero advantage can be left out of the forward pass without changing the gradient."""
        return self.beta == 0


def build_objective(surrogate: Callable[..., tuple[Tensor, Tensor]], **options: object) -> Objective:
    """Split `options` between the Objective's own fields and the surrogate's keyword arguments; check their ranges."""
    own = {key: options.pop(key) for key in ("loss_agg", "beta", "kl", "length") if key in options}
    for key in ("clip_eps", "clip_eps_high"):
        value = options.get(key)
        if isinstance(value, (int, float)) and not value >= 0:
            raise ConfigError(
                f"objective.{key}={value} must be >= 0: the ratio is kept in [1 − clip_eps, 1 + clip_eps_high]."
            )
    return Objective(surrogate=partial(surrogate, **options), **own)  # type: ignore[arg-type]


def loss_and_terms(
    objective: Objective,
    *,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Denominators,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of these rows (a scalar) and detached per-token terms `(B, T)` for the log.

    Losses of micro-batches add up to the loss of the whole step, because `denominators` belong to the step.
    `old_logps=None` means on-policy: π_old = π, the ratio is 1 and only its gradient counts. `advantages` (B, 1|T).
    """
    logps = masked(logps, mask)  # before any arithmetic: 0 · NaN in a backward pass would be NaN again
    old = logps.detach() if old_logps is None else masked(old_logps, mask)
    per_token, is_clipped = objective.surrogate(logps, old, advantages)
    terms = {"clip_fraction": is_clipped, "ratio": log_ratio(logps, old).exp()}
    if objective.beta > 0:
        if ref_logps is None:
            raise ConfigError(f"objective.beta={objective.beta} needs the reference's log-probs, and there are none.")
        ref_logps = masked(ref_logps, mask)
        kl = KL[objective.kl](logps, ref_logps)
        per_token = per_token + objective.beta * kl
        terms |= {"kl": kl, "kl_bounded_fraction": kl_is_bounded(logps, ref_logps)}
    loss = AGGREGATIONS[objective.loss_agg](per_token, mask, denominators)
    return loss, {name: value.detach() for name, value in terms.items()}
