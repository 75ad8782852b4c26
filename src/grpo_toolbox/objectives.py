"""The objective: a product of small choices, put together once and applied to every micro-batch.

    loss = aggregate(surrogate(ratio, advantage) · correction + beta · KL, mask, denominators) − entropy_coef · entropy

surrogate (`surrogates.py`) × ratio level and correction (`ratios.py`) × KL and aggregation (`ops.py`). Names of methods
(DAPO, GSPO, ScaleRL, …) are presets in `conf/objective` and `conf/experiment`, never code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.ops import (
    AGGREGATIONS,
    KL,
    Denominators,
    at_least_float32,
    kl_is_bounded,
    log_ratio,
    masked,
    token_mean,
)
from grpo_toolbox.ratios import CORRECTIONS, RATIO_LEVELS, Correction, off_policy_rows
from grpo_toolbox.selection import covariances, drawn_between, entropy_threshold, highest
from grpo_toolbox.surrogates import OBJECTIVES, clipped, reinforce

__all__ = ["OBJECTIVES", "Objective", "build_objective", "clipped", "loss_and_terms", "reinforce"]

Surrogate = Callable[..., tuple[Any, ...]]
"""Returns the loss per token and where it is clipped (B, T), and maybe further terms for the log, by name."""


@dataclass(frozen=True)
class Objective:
    """One choice on each axis; `loss_and_terms` turns log-probs into the scalar to differentiate."""

    surrogate: Surrogate
    ratio_level: str = "token"
    """token, sequence (geometric mean; GSPO), sequence_token (GSPO-token) or product (of the sequence; RLOO)."""
    loss_agg: str = "seq_mean_token_mean"
    """seq_mean_token_mean (GRPO), token_mean (DAPO), prompt_mean (ScaleRL), seq_mean_token_sum, constant (Dr. GRPO)."""
    length: float | None = None
    """L of `loss_agg=constant`; None means `rollout.max_new_tokens`."""
    beta: float = 0.0
    """Weight of the KL to the reference; at 0 no reference is loaded."""
    kl: str = "k3"
    """k1, k2 or k3."""
    kl_in: str = "loss"
    """loss: a differentiable term; reward: taken off the reward, without gradient (RLOO, REINFORCE++)."""
    kl_unbiased: bool = False
    """Multiply the KL by each token's ratio, not held constant: the gradient is KL(π‖π_ref)'s (DeepSeek-V3.2, 2025)."""
    correction: str = "none"
    """Weight for a sampler that is not quite the policy: none, a name of `ratios.CORRECTIONS`, or auto: none, truncated
    tokens or masked sequences, by what is measured."""
    correction_min: float | None = None
    correction_max: float | None = None
    """Bounds of the weight; None takes that of the correction's paper, 0 and inf are none."""
    off_policy_threshold: float | None = None
    """Drop rows with A < 0 whose mean log(π_sampler/π) is above this (DeepSeek-V3.2, 2025); None keeps all."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_target: float | None = None
    """Adapt the weight to keep entropy near this many nats (Skywork-OR1); None keeps the weight."""
    kl_target: float | None = None
    """Adapt beta to keep the KL near this many nats per token (Ziegler et al., 2019); None keeps beta."""
    kl_horizon: float = 10_000.0
    """Completions over which beta adapts."""
    top_entropy_quantile: float = 1.0
    """Train only this share of tokens, those of highest entropy (Wang et al., 2025); 1 trains all."""
    clip_cov: float = 0.0
    """Leave out this share of tokens, drawn from those whose covariance is high (Clip-Cov; Cui et al., 2025)."""
    clip_cov_min: float = 1.0
    clip_cov_max: float = 5.0
    """Which covariances are high: (log π − mean)·(A − mean) of a token."""
    kl_cov: float = 0.0
    """Anchor this share of tokens, those of highest covariance, to π_old (KL-Cov; Cui et al., 2025)."""
    kl_cov_coef: float = 1.0
    """Weight of |log π − log π_old| on the anchored tokens."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss; their reward still counts in the group (DAPO)."""

    def __post_init__(self) -> None:
        self._check_choices()
        if self.kl_in == "reward" and self.kl_unbiased:
            raise ConfigError(
                "objective.kl_unbiased=true needs objective.kl_in=loss: in the reward the KL has no gradient."
            )
        if self.kl == "k2" and self.kl_unbiased:
            raise ConfigError("objective.kl_unbiased=true needs objective.kl=k1 or k3: k2 is no unbiased estimate.")
        for key in ("beta", "entropy_coef", "kl_cov_coef"):
            value = getattr(self, key)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"objective.{key}={value} must be a finite number >= 0; 0 switches it off.")
        if self.length is not None and not 0 < self.length < float("inf"):
            raise ConfigError(
                f"objective.length={self.length} must be a finite number > 0; null takes rollout.max_new_tokens."
            )
        if self.off_policy_threshold is not None and not 0 <= self.off_policy_threshold < float("inf"):
            raise ConfigError(
                f"objective.off_policy_threshold={self.off_policy_threshold} must be a finite number >= 0; null keeps "
                "all rows."
            )
        for key in ("entropy_target", "kl_target", "kl_horizon"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"objective.{key}={value} must be a finite number > 0; null switches it off.")
        if self.kl_target is not None and self.beta == 0:
            raise ConfigError("objective.kl_target needs objective.beta > 0 to start from.")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ConfigError(f"objective.top_entropy_quantile={self.top_entropy_quantile} must be in (0, 1].")
        for key in ("clip_cov", "kl_cov"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"objective.{key}={getattr(self, key)} must be in [0, 1]; 0 switches it off.")
        if not self.clip_cov_min < self.clip_cov_max:
            raise ConfigError(
                f"objective.clip_cov_min={self.clip_cov_min} must be below clip_cov_max={self.clip_cov_max}."
            )
        if self.correction == "auto" and not (self.correction_min is None and self.correction_max is None):
            raise ConfigError(
                "objective.correction_min and correction_max belong to a named correction: leave them out with "
                "objective.correction=auto, or name one."
            )
        self.make_correction()  # its bounds are checked where it is made

    def _check_choices(self) -> None:
        choices: dict[str, Any] = {
            "ratio_level": RATIO_LEVELS,
            "loss_agg": AGGREGATIONS,
            "kl": KL,
            "kl_in": ("loss", "reward"),
            "correction": ("none", "auto", *CORRECTIONS),
        }
        for key, options in choices.items():
            if getattr(self, key) not in options:
                raise unknown_option(f"objective.{key}", getattr(self, key), options)

    @property
    def corrects(self) -> bool:
        """Whether the sampler's log-probs weigh tokens."""
        return self.correction != "none"

    def make_correction(self) -> Correction | None:
        """Return the sampler correction, with its paper's bounds where none are set; None while auto has not chosen."""
        if self.correction in ("none", "auto"):
            return None
        made = CORRECTIONS[self.correction]
        low = made.low if self.correction_min is None else self.correction_min
        high = made.high if self.correction_max is None else self.correction_max
        return Correction(made.level, made.drops, low, high)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's log-probs enter the loss or the reward."""
        return self.beta > 0

    @property
    def kl_in_loss(self) -> bool:
        """Whether a KL term is differentiated."""
        return self.beta > 0 and self.kl_in == "loss"

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        """Whether rows of exactly zero advantage can be left out of the forward pass without changing the gradient.

        Not where they have a KL or a bonus of their own, nor where they decide what other rows train.
        """
        return (
            not self.kl_in_loss and self.entropy_coef == 0 and not self.chooses_tokens and self.entropy_target is None
        )

    @property
    def chooses_tokens(self) -> bool:
        """Whether the tokens of a step are looked at together before its first pass: `choose_tokens`."""
        return self.top_entropy_quantile < 1 or self.clip_cov > 0 or self.kl_cov > 0


_ABOVE = {"delta": 1, "ratio_cap": 0, "max_divergence": 0, "tau_pos": 0, "tau_neg": 0, "lambda_pos": 0, "lambda_neg": 0}
"""Options of surrogates that must be larger than this: at it good answers lose their gradient, or 0 is divided by."""
_FINITE = ("tau_pos", "tau_neg", "lambda_pos", "lambda_neg", "k_pos", "k_neg")
"""Options of surrogates that infinity makes a NaN of."""


def build_objective(surrogate: Surrogate, **options: Any) -> Objective:
    """Split `options` between the Objective's own fields and the surrogate's keyword arguments; check their ranges."""
    names = [field.name for field in fields(Objective) if field.name != "surrogate"]
    own = {key: options.pop(key) for key in names if key in options}
    for key, value in options.items():
        if isinstance(value, int | float):
            _check_option(key, value, ours=surrogate in OBJECTIVES.values())
    return Objective(surrogate=partial(surrogate, **options), **own)


def _check_option(key: str, value: float, *, ours: bool) -> None:
    if key.startswith("clip_eps") and not value >= 0:
        raise ConfigError(
            f"objective.{key}={value} must be >= 0: the ratio is kept in [1 − clip_eps, 1 + clip_eps_high]."
        )
    if ours and key in _FINITE and not 0 <= value < float("inf"):
        raise ConfigError(f"objective.{key}={value} must be a finite number of at least 0.")
    if ours and key in _ABOVE and not value > _ABOVE[key]:
        raise ConfigError(f"objective.{key}={value} must be above {_ABOVE[key]:g}.")


def loss_and_terms(
    objective: Objective,
    *,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Denominators,
    entropy: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampler_logps: Tensor | None = None,
    trained: Tensor | None = None,
    anchored: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of these rows (a scalar) and detached terms for the log, per token (B, T) or per row (B,).

    Losses of micro-batches add up to the loss of the whole step, because `denominators` belong to the step.
    `old_logps=None` means on-policy: π_old = π, the ratio is 1 and only its gradient counts. `advantages` (B, 1|T).
    `trained` and `anchored` (B, T) mark the tokens that `choose_tokens` chose; KL and denominators still count all.
    """
    logps = masked(at_least_float32(logps), mask)  # before any arithmetic: 0 · NaN in a backward pass is NaN again
    old = logps.detach() if old_logps is None else masked(at_least_float32(old_logps), mask)
    advantages = masked(at_least_float32(advantages).expand_as(logps), mask)
    level = RATIO_LEVELS[objective.ratio_level](logps, old, mask)
    per_token, is_clipped, *more = call_surrogate(objective, logps, old, level, advantages, mask)
    terms: dict[str, Tensor] = {"clip_fraction": is_clipped, "ratio": level.exp()}
    terms |= more[0] if more else {}
    for name, weights in _weights(objective, logps, old, sampler_logps, advantages, mask, trained).items():
        per_token = per_token * weights
        terms[name] = weights
    if objective.kl_in_loss:
        kl, terms["kl_bounded_fraction"] = _kl(objective, logps, ref_logps, mask)
        terms["kl"] = kl = kl * log_ratio(logps, old).exp() if objective.kl_unbiased else kl
        per_token = per_token + objective.beta * kl
    if anchored is not None:
        terms["kl_cov"] = gap = torch.where(anchored, log_ratio(logps, old).abs(), 0.0)
        per_token = per_token + objective.kl_cov_coef * gap
    loss = AGGREGATIONS[objective.loss_agg](per_token, mask, denominators)
    if objective.entropy_coef:
        if entropy is None:
            raise ConfigError(f"objective.entropy_coef={objective.entropy_coef} needs the policy's entropy.")
        kept = mask if trained is None else mask & trained
        bonus = terms["entropy_bonus"] = objective.entropy_coef * masked(entropy, kept)
        loss = loss - token_mean(bonus, mask, denominators)
    return loss, {name: value.detach() for name, value in terms.items()}


def call_surrogate(
    objective: Objective, logps: Tensor, old: Tensor, level: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Any, ...]:
    """Call the surrogate with π_old chosen such that log π − log π_old is the log-ratio of the level."""
    takes_mask = "mask" in inspect.signature(objective.surrogate).parameters
    at_level = old if objective.ratio_level == "token" else logps - level
    return objective.surrogate(logps, at_level, advantages, **({"mask": mask} if takes_mask else {}))


def _weights(
    objective: Objective,
    logps: Tensor,
    old: Tensor,
    sampler_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    trained: Tensor | None,
) -> dict[str, Tensor]:
    """Return what the surrogate is multiplied with, all constants: rows kept, tokens kept, sampler correction."""
    weights: dict[str, Tensor] = {}
    correction = objective.make_correction()
    if correction or objective.off_policy_threshold is not None:
        if sampler_logps is None:
            raise ConfigError("objective.correction and off_policy_threshold need the sampler's log-probs.")
        sampler = masked(at_least_float32(sampler_logps), mask)
        if objective.off_policy_threshold is not None:
            kept = off_policy_rows(logps, sampler, advantages, mask, objective.off_policy_threshold)
            weights["off_policy_kept"] = kept
        if correction:
            weights["correction"] = correction(old, sampler, mask)
    if trained is not None:
        weights["tokens_kept"] = trained.to(logps.dtype)
    return weights


def choose_tokens(
    objective: Objective, seed: int, *, logps: Tensor, entropies: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return which of a step's N tokens the surrogate trains, and which are anchored to π_old.

    Everything flat (N,), in the order of the step's rows. `seed` is the step's own, for what is drawn.
    """
    trained = torch.ones_like(logps, dtype=torch.bool)
    if objective.top_entropy_quantile < 1 and len(entropies):
        trained &= entropies >= entropy_threshold(entropies, objective.top_entropy_quantile)
    values = covariances(logps, advantages)
    if objective.clip_cov:
        low, high = objective.clip_cov_min, objective.clip_cov_max
        trained &= ~drawn_between(values, low, high, objective.clip_cov, seed)
    return trained, highest(values, objective.kl_cov) if objective.kl_cov else None


def _kl(objective: Objective, logps: Tensor, ref_logps: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    if ref_logps is None:
        raise ConfigError(f"objective.beta={objective.beta} needs the reference's log-probs, and there are none.")
    ref_logps = masked(at_least_float32(ref_logps), mask)
    return KL[objective.kl](logps, ref_logps), kl_is_bounded(logps, ref_logps)


def kl_penalty(objective: Objective, logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """Return beta · KL per token (B, T), without gradient: what `kl_in=reward` takes off the reward."""
    kl, _ = _kl(objective, masked(at_least_float32(logps), mask), ref_logps, mask)
    return masked(objective.beta * kl, mask).detach()


def mismatch(trainer_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return sums (scalars) that measure how far the sampler is from the trainer on the masked tokens.

    With d = log π_trainer − log π_sampler and w = eᵈ: Σ|d|, Σ(w − 1 − d) (the KL, k3 form), Σw, Σw², and extremes.
    """
    difference = (trainer_logps - sampler_logps)[mask].double()
    ratio = log_ratio(difference, torch.zeros_like(difference)).exp()
    return {
        "gap": difference.abs().sum(),
        "kl": (ratio - 1 - difference).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "gap_max": difference.abs().amax(),
        "ratio_min": ratio.amin(),
        "ratio_max": ratio.amax(),
    }
