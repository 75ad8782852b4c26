"""Surrogates: what stands for −A·log π in the loss, as pure functions on `(B, T)` tensors.

    (logps, old_logps, advantages, *, mask?, options…) -> (per-token loss, where it is clipped[, terms for the log])

`old_logps` already carries the ratio level (`objectives.call_surrogate`), so each function reads as if ratios were per
token. A function that needs to know which tokens are real names `mask`. Options are keyword arguments. Clipped means:
the gradient of that token is exactly 0, or its weight was capped. Terms are per token (B, T) or row (B,), by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_toolbox.errors import unknown_option
from grpo_toolbox.ops import log_ratio, masked, masked_row_mean

Divergence = Literal["tv", "kl"]

_LOG_FLOOR = math.log(1e-8)


def clipped(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return −min(min(ρ, δ)·A, clip(ρ, 1−ε, 1+ε_high)·A) with ρ = π/π_old (PPO; Schulman et al., 2017).

    `clip_eps_high=None` means `clip_eps`; DAPO (Yu et al., 2025) raises it to 0.28. `delta` bounds the loss for A < 0,
    where PPO has no bound: two-sided clipping (INTELLECT-2, 2025) and, for δ > 1+ε_high, the same function as dual-clip
    PPO with c = δ (Ye et al., 2020). Clipped is a token whose gradient is exactly 0.
    """
    high = 1 + (clip_eps if clip_eps_high is None else clip_eps_high)
    low = 1 - clip_eps
    ratio = log_ratio(logps, old_logps).exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    cap = math.inf if delta is None else delta
    clipped_up = (advantages > 0) & (ratio > min(cap, high))
    clipped_down = (advantages < 0) & ((ratio < low) | (ratio > max(cap, high)))
    return loss, clipped_up | clipped_down


def reinforce(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return −A · log π: the plain policy gradient (REINFORCE; Williams, 1992), without ratio and without clipping."""
    return -advantages * logps, torch.zeros_like(logps, dtype=torch.bool)


def cispo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_eps: float | None = None,
    clip_eps_high: float = 4.0,
    ratio_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return −sg(clip(ρ, 1−ε, 1+ε_high))·A·log π (CISPO; MiniMax-M1, 2025): the weight is capped, no token is dropped.

    The cap is 1 + `clip_eps_high`, or `ratio_cap` where the absolute value is meant (ScaleRL's and TRL's 5.0): two
    names, because a cap of 0.2 on ρ would scale every gradient down to a fifth. `clip_eps=None`: no lower bound.
    """
    cap = 1 + clip_eps_high if ratio_cap is None else ratio_cap
    ratio = log_ratio(logps, old_logps).exp().detach()
    weight = ratio.clamp(min=0.0 if clip_eps is None else 1 - clip_eps, max=cap)
    return -weight * advantages * logps, weight != ratio


def sapo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, Tensor]:
    """Return −(4/τ)·σ(τ(ρ−1))·A: a soft gate in place of the clip (SAPO; Gao et al., 2025).

    τ is `tau_pos` where A > 0 and `tau_neg` elsewhere. At ρ = 1 the gradient is that of ρA.
    """
    ratio = log_ratio(logps, old_logps).exp()
    tau = _by_sign(advantages > 0, tau_pos, tau_neg, logps)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(logps, dtype=torch.bool)


def gmpo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    clip_eps: float = 0.4,
    clip_eps_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return −A·exp(meanₜ of the clipped log ρₜ), the same for each token of a row (GMPO; Zhao et al., 2025).

    log ρ is clipped from above by ε_high where A > 0 and from below by −ε where A < 0. With
    `loss_agg=seq_mean_token_mean` the row's loss is the paper's.
    """
    log_rho = log_ratio(logps, old_logps)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    one_sided = torch.where(advantages > 0, log_rho.clamp(max=high), log_rho.clamp(min=-clip_eps))
    weight = masked_row_mean(one_sided, mask).exp()  # (B, 1)
    is_clipped = ((log_rho > high) & (advantages > 0)) | ((log_rho < -clip_eps) & (advantages < 0))
    return (-weight * advantages).expand_as(logps), is_clipped


def vespo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return −φ(w)·A·log π with φ(w) = wᵏ·exp(λ(1−w)) held constant and w the row's product of ratios (VESPO, 2026).

    (k, λ) are the `pos` pair where A ≥ 0, else the `neg` pair; φ(1) = 1. log w is kept in [log 1e-8, 20].
    """
    log_w = masked(log_ratio(logps, old_logps), mask).sum(dim=1, keepdim=True).clamp(_LOG_FLOOR, 20.0).detach()
    k = _by_sign(advantages >= 0, k_pos, k_neg, logps)
    lam = _by_sign(advantages >= 0, lambda_pos, lambda_neg, logps).clamp(min=1e-4)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    unclipped = torch.zeros_like(logps, dtype=torch.bool)
    return -phi * advantages * logps, unclipped, {"vespo/phi_mean": phi[:, 0]}


def dppo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence = "tv",
    max_divergence: float = 0.15,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return −sg(min(ρ, cap))·A·log π, and 0 where A pushes a token on that is too far already (DPPO; Qi et al., 2026).

    Too far is D > `max_divergence` with ρ > 1 and A > 0, or ρ < 1 and A < 0. D compares the token and all others as two
    outcomes: |π − π_old| (`tv`), or π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)) (`kl`). A ratio alone
    holds rare tokens back and lets likely ones go: .001 → .01 is ρ = 10 and D = .009, .99 → .8 is ρ = .81 and D = .19.
    """
    if divergence not in _DIVERGENCES:
        raise unknown_option("objective.divergence", divergence, _DIVERGENCES)
    now, old = logps.detach(), old_logps.detach().clamp(max=0.0)  # a row's ratio may ask for more than certainty
    outward = torch.where(advantages > 0, now > old, (advantages < 0) & (now < old))
    dropped = outward & (_DIVERGENCES[divergence](now, old) > max_divergence)
    ratio = log_ratio(logps, old_logps).exp().detach()
    loss = -ratio.clamp(max=ratio_cap) * advantages * logps
    return torch.where(dropped, 0.0, loss), dropped | (ratio > ratio_cap)


def _binary_tv(logps: Tensor, old_logps: Tensor) -> Tensor:
    return (logps.exp() - old_logps.exp()).abs()


def _binary_kl(logps: Tensor, old_logps: Tensor) -> Tensor:
    others, old_others = (-torch.expm1(one).clamp(max=-1e-8) for one in (logps, old_logps))
    return old_logps.exp() * (old_logps - logps) + old_others * (old_others / others).log()


_DIVERGENCES = {"tv": _binary_tv, "kl": _binary_kl}


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


OBJECTIVES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "clipped": clipped,
    "reinforce": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo": dppo,
}
