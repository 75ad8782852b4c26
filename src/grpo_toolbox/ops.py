"""The arithmetic everything else is made of: log-probs, ratios, KL estimators, masked sums, aggregation.

Shapes: B rows, T completion tokens, V vocabulary, H hidden size. Masks are boolean `(B, T)` and come from lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`: e^20 ≈ 5e8 is far outside any trust region and still finite in float32."""
MAX_KL_LOG_RATIO = 10.0
"""Where k3 goes on as its tangent: beyond it exp() only adds variance, and at 89 it overflows float32."""
MIN_LOGP = -100.0
"""Floor on reference log-probs: a token that is impossible under the reference costs about 100 nats, not infinity."""


# ---- log-probs of tokens ---------------------------------------------------------------------------------------------


def logps_and_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log π(label) and the entropy of softmax(logits / temperature), in float32 or better.

    `logits` (…, V), `labels` (…), result (…), (…) in nats. Position j of `logits` must predict `labels[j]`.
    """
    scaled = _at_least_float32(logits) / temperature
    log_probs = scaled.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


class _HeadLogps(torch.autograd.Function):
    """Log-probs and entropies of labelled positions without ever holding logits of all of them.

    With z = h·Wᵀ/τ and p = softmax(z): ∂log p_y/∂z = onehot(y) − p, ∂H/∂z = −p ∘ (log p + H). The logits of a chunk
    are computed again in backward, so memory does not grow with positions × vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logps, entropies, normalisers = [], [], []
        for rows, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            scaled = _at_least_float32(rows @ weight.T) / temperature  # (c, V)
            normaliser = scaled.logsumexp(dim=-1, keepdim=True)
            logps.append((scaled.gather(1, targets.unsqueeze(1)) - normaliser).squeeze(1))
            log_probs = scaled.sub_(normaliser)
            entropies.append(-(log_probs.exp().mul_(log_probs)).sum(dim=-1))
            normalisers.append(normaliser)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, labels, entropy, torch.cat(normalisers))
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, labels, entropy, normalisers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = _at_least_float32(torch.zeros_like(weight)) if ctx.needs_input_grad[1] else None
        with_entropy = bool((grad_entropy != 0).any())
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scaled = _at_least_float32(hidden[part] @ weight.T) / ctx.temperature
            log_probs = scaled.sub_(normalisers[part])
            probs = log_probs.exp()
            grad = probs * -grad_logps[part, None]
            grad.scatter_add_(1, labels[part, None], grad_logps[part, None])
            if with_entropy:
                grad -= probs * (log_probs + entropy[part, None]) * grad_entropy[part, None]
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def head_logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int = 512,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log π(label) and entropy (N,) of the language-model head `hidden · weightᵀ`, `chunk` positions at a time.

    `hidden` (N, H), `weight` (V, H), `labels` (N,). Equal to `logps_and_entropy(hidden @ weight.T, …)`, gradients too.
    Logits are rounded to the precision of `hidden`, or of autocast, unless they are multiplied out `in_float32`.
    """
    device = hidden.device.type
    if in_float32:
        hidden, weight = _at_least_float32(hidden), _at_least_float32(weight)
    elif torch.is_autocast_enabled(device):  # backward runs outside autocast: its logits must be those of forward
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        return _HeadLogps.apply(hidden, weight, labels, temperature, chunk)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


# ---- ratios and KL ---------------------------------------------------------------------------------------------------


def log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return log(π/π_old), bounded by ±MAX_LOG_RATIO so that its exponential stays finite."""
    return (logps - old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """k1 = log π − log π_ref (Schulman, 2020): unbiased, of either sign. Gradient: ∇log π, whatever the reference."""
    return logps - ref_logps.clamp(min=MIN_LOGP)


def kl_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """k2 = ½ (log π − log π_ref)² (Schulman, 2020). Gradient: that of the KL on-policy: k1·∇log π."""
    return 0.5 * (logps - ref_logps.clamp(min=MIN_LOGP)).square()


def kl_k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """k3 = eʳ − r − 1 with r = log π_ref − log π (Schulman, 2020): unbiased, never negative. Gradient: (1 − eʳ)·∇log π.

    Past r = MAX_KL_LOG_RATIO it goes on as its tangent, so that value and gradient stay finite and keep their sign.
    """
    r = ref_logps.clamp(min=MIN_LOGP) - logps
    inside = r.clamp(max=MAX_KL_LOG_RATIO)
    slope = inside.exp() - 1
    return inside.exp() - inside - 1 + slope.detach() * (r - inside)


def kl_is_bounded(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return where (B, T) a bound of `kl_k3` is active, to be counted."""
    return (ref_logps - logps > MAX_KL_LOG_RATIO) | (ref_logps < MIN_LOGP)


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


# ---- masked sums and aggregation -------------------------------------------------------------------------------------


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with exact zeros outside `mask`; a NaN planted there does not get through."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (B, 1) over each row's masked entries; 0 for a row without any."""
    return masked(values, mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Denominators:
    """What losses are divided by: counted once per optimizer step over all micro-batches (and processes)."""

    sequences: float
    """All completions of the step, those that carry no gradient included."""
    tokens: float
    """All completion tokens of the step."""
    length: float
    """The constant of Dr. GRPO, normally the largest completion length allowed."""


def seq_mean_token_mean(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """(1/N) Σᵢ (1/|oᵢ|) Σₜ ℓᵢₜ: each sequence weighs the same (GRPO; Shao et al., 2024)."""
    lengths = mask.sum(dim=1).clamp(min=1)
    return (masked(per_token, mask).sum(dim=1) / lengths).sum() / denominators.sequences


def token_mean(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Σᵢₜ ℓᵢₜ / Σᵢ|oᵢ|: each token weighs the same (DAPO; Yu et al., 2025)."""
    return masked(per_token, mask).sum() / max(denominators.tokens, 1)


def seq_mean_token_sum(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """(1/N) Σᵢ Σₜ ℓᵢₜ: the policy gradient of whole sequences (REINFORCE; Williams, 1992)."""
    return masked(per_token, mask).sum() / denominators.sequences


def constant(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Σᵢₜ ℓᵢₜ / (N·L) with a constant L: no length bias (Dr. GRPO; Liu et al., 2025)."""
    return masked(per_token, mask).sum() / (denominators.sequences * denominators.length)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "constant": constant,
}
