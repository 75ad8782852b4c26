"""The arithmetic everything else is made of: log-probs, ratios, KL estimators, masked sums, aggregation.

Shapes: B rows, T completion tokens, V vocabulary, H hidden size. Masks are boolean `(B, T)` and come from lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.gradients import add_product, goes_in_place
from grpo_toolbox.onednn import multiply, suits

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before `exp`: e^20 ≈ 5e8 is far outside any trust region and still finite in float32."""
MAX_KL_LOG_RATIO = 10.0
"""Where k3 goes on as its tangent: beyond it exp() only adds variance, and at 89 it overflows float32."""
CHUNK, CHUNK_LOGITS = 128, 2**18
"""Positions whose logits are made at a time, and how many logits at least."""
KEPT_PROBABILITIES = 256 * 2**20
"""Bytes of a head's probabilities that may wait for backward instead of being computed again."""
MIN_LOGP = -100.0
"""Floor on reference log-probs: a token that is impossible under the reference costs about 100 nats, not infinity."""


# ---- log-probs of tokens ---------------------------------------------------------------------------------------------


def logps_and_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log π(label) and the entropy of softmax(logits / temperature), in float32 or better.

    `logits` (…, V), −inf where a token is impossible, `labels` (…), result (…), (…) in nats. Position j of `logits`
    must predict `labels[j]`.
    """
    _check_temperature(temperature)
    scaled = at_least_float32(logits) / temperature
    log_probs = scaled.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1)  # p·log p ends at 0
    return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


class _HeadLogps(torch.autograd.Function):
    """Log-probs and entropies of labelled positions without ever holding logits of all of them.

    With z = h·Wᵀ/τ and p = softmax(z): ∂log p_y/∂z = onehot(y) − p, ∂H/∂z = −p ∘ (log p + H). The probabilities of a
    chunk are computed again in backward, so memory does not grow with positions × vocabulary; those of the first
    positions are kept, as many as fit into KEPT_PROBABILITIES, and those of a frozen head in float32 are not needed:
    ∂log p_y/∂h = (W_y − Σ_v p_v·W_v)/τ, whose sum forward can take.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logps, entropy, normalisers = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        expected = torch.empty_like(hidden) if wants_hidden and not wants_weight and hidden.dtype == dtype else None
        room = KEPT_PROBABILITIES if wants_weight else -1
        kept: list[Tensor] = []
        shifted = probs = None
        for part in _chunks(len(hidden), chunk):
            shifted = _logits(hidden[part], weight, temperature, shifted)  # (c, V)
            peak = shifted.amax(dim=-1, keepdim=True)
            shifted -= peak
            probs = torch.exp(shifted, out=_like(shifted, probs))
            total = probs.sum(dim=-1, keepdim=True)
            log_total = total.log()
            logps[part] = (shifted.gather(1, labels[part, None]) - log_total).squeeze(1)
            entropy[part] = (log_total - torch.linalg.vecdot(probs, shifted).unsqueeze(1) / total).squeeze(1)
            normalisers[part] = (peak + log_total).squeeze(1)
            if expected is not None:
                expected[part] = _product(probs.div_(total), weight.T)
            room -= probs.nbytes
            if room >= 0:  # once one does not fit, no smaller last one is kept either: backward counts from the first
                kept.append(probs.div_(total))
                probs = None
        ctx.save_for_backward(hidden, weight, labels, entropy, normalisers, expected, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.in_place = wants_weight and goes_in_place(weight)  # an accelerator's backward pass has a thread of its own
        return logps, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logps: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, entropy, normalisers, expected, *kept = ctx.saved_tensors
        with_entropy = bool((grad_entropy != 0).any())
        if expected is not None and not with_entropy:
            return (weight[labels] - expected) * (grad_logps / ctx.temperature)[:, None], None, None, None, None
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        logits = grad = None
        for index, part in enumerate(_chunks(len(hidden), ctx.chunk)):
            if index < len(kept):
                probs = kept[index]
            else:
                logits = _logits(hidden[part], weight, ctx.temperature, logits)
                probs = logits.sub_(normalisers[part, None]).exp_()
            grad = torch.mul(probs, -grad_logps[part, None], out=_like(probs, grad))  # (c, V)
            grad.scatter_add_(1, labels[part, None], grad_logps[part, None])
            if with_entropy:
                log_probs = probs.log().clamp_(min=torch.finfo(probs.dtype).min)  # p·log p is 0 where p is
                grad -= probs * (log_probs + entropy[part, None]) * grad_entropy[part, None]
            down = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = _product(down, weight.T)
            if ctx.in_place:
                add_product(weight, down.T, hidden[part])
            elif ctx.needs_input_grad[1]:
                grad_weight = _added_product(grad_weight, down.T, hidden[part])
        if ctx.needs_input_grad[1] and not ctx.in_place:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _like(values: Tensor, buffer: Tensor | None) -> Tensor:
    """Return as much of a buffer as `values` fill, or a new one: fresh memory of this size costs a pass over it."""
    if buffer is None or len(buffer) < len(values):
        return torch.empty_like(values)
    return buffer[: len(values)]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x·Wᵀ."""
    return multiply(x, weight) if x.dtype == torch.float32 and suits(weight) else x @ weight.T


def _logits(hidden: Tensor, weight: Tensor, temperature: float, buffer: Tensor | None) -> Tensor:
    """Return hidden·Wᵀ/τ (c, V), rounded to the precision of `hidden`, in float32 or better, in `buffer` if it fits."""
    if hidden.dtype == torch.float32 and suits(weight):
        logits = multiply(hidden, weight)
    elif hidden.dtype in (torch.float32, torch.float64):
        if buffer is None or len(buffer) < len(hidden):
            buffer = hidden.new_empty(len(hidden), len(weight))
        logits = torch.mm(hidden, weight.T, out=buffer[: len(hidden)])
    else:
        logits = (hidden @ weight.T).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _added_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left · right in float32 or better, in place of `total` where there is one."""
    if total is None:
        return at_least_float32(left @ right)
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


def head_logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log π(label) and entropy (N,) of the language-model head `hidden · weightᵀ`, `chunk` positions at a time.

    Without `chunk` that is 128, or more where the vocabulary is so small that they are few numbers.

    `hidden` (N, H), `weight` (V, H), `labels` (N,). Equal to `logps_and_entropy(hidden @ weight.T, …)`, gradients too.
    Logits are rounded to the precision of `hidden`, or of autocast, unless they are multiplied out `in_float32`.
    """
    _check_temperature(temperature)
    device = hidden.device.type
    if in_float32:
        hidden, weight = at_least_float32(hidden), at_least_float32(weight)
    elif torch.is_autocast_enabled(device):  # backward runs outside autocast: its logits must be those of forward
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        chunk = chunk or max(CHUNK, CHUNK_LOGITS // len(weight))
        return _HeadLogps.apply(hidden, weight, labels, temperature, chunk)


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be finite and above 0: greedy draws have no log-probs")


def at_least_float32(values: Tensor) -> Tensor:
    """Return the values in float32, or in float64 where they are: half precision ends at 65 504, or keeps 3 digits."""
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
    prompt_length: Tensor | None = None
    """(B, 1) of the rows at hand: the mean length of all completions of their prompt; what `prompt_mean` needs."""


def seq_mean_token_mean(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """(1/N) Σᵢ (1/|oᵢ|) Σₜ ℓᵢₜ: each sequence weighs the same (GRPO; Shao et al., 2024)."""
    lengths = mask.sum(dim=1).clamp(min=1)
    return (masked(per_token, mask).sum(dim=1) / lengths).sum() / denominators.sequences


def token_mean(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Σᵢₜ ℓᵢₜ / Σᵢ|oᵢ|: each token weighs the same (DAPO; Yu et al., 2025)."""
    return masked(per_token, mask).sum() / max(denominators.tokens, 1)


def prompt_mean(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """(1/P) Σₚ (Σ_{i∈p,t} ℓᵢₜ / Σ_{i∈p}|oᵢ|): each prompt weighs the same (ScaleRL; Khatri et al., 2025).

    As all prompts have equally many completions it is (1/N) Σᵢ Σₜ ℓᵢₜ / (mean length of the prompt's completions).
    """
    lengths = denominators.prompt_length
    if lengths is None:
        raise ValueError("loss_agg=prompt_mean needs Denominators.prompt_length of these rows")
    lengths = lengths.masked_fill(lengths == 0, 1.0)  # of a prompt without a token that is trained
    return (masked(per_token, mask) / lengths).sum() / denominators.sequences


def seq_mean_token_sum(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """(1/N) Σᵢ Σₜ ℓᵢₜ: the policy gradient of whole sequences (REINFORCE; Williams, 1992)."""
    return masked(per_token, mask).sum() / denominators.sequences


def constant(per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Σᵢₜ ℓᵢₜ / (N·L) with a constant L: no length bias (Dr. GRPO; Liu et al., 2025)."""
    return masked(per_token, mask).sum() / (denominators.sequences * denominators.length)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Denominators], Tensor]] = {
    "seq_mean_token_mean": seq_mean_token_mean,
    "token_mean": token_mean,
    "prompt_mean": prompt_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "constant": constant,
}
