"""Whether a model takes the packed layout: found out before training, by its configuration and by trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch
from grpo_toolbox.gradients import in_place
from grpo_toolbox.models.forward import completion_logps, plain_model

FLOAT32_ROUNDING = 1e-3
"""Largest |Δ log-prob| between packed and plain forward in float32 that is rounding and not another function."""
HALF_ROUNDING = 0.3
"""The same for weights in half precision; another function differs by about 1 on a trained model."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_SAME_GRADIENT = 0.05
"""Largest difference of a parameter's gradient in float32, as a share of its norm, that is rounding."""
_SMALL = 1e-3
"""A parameter's gradient of less than this share of the whole is rounding itself."""


def packing_refusal(model: nn.Module, vocabulary: int, longest: int, device: torch.device) -> str | None:
    """Say why `model` cannot take the packed layout for rows of up to `longest` tokens; None where it can.

    What a probe of a few tokens cannot show (a window of thousands, a cap that small logits do not feel) is read from
    the configuration; everything else shows in the probe.
    """
    plain = plain_model(model)
    config = plain.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    limit = plain_attention_limit(model)
    if not getattr(plain, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    if limit is not None and longest > limit:
        return f"its attention changes past {limit} tokens, and prompt and completion may reach {longest}"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "it caps its logits"
    exact = all(parameter.dtype in (torch.float32, torch.float64) for parameter in plain.parameters())
    try:
        gap = packing_gap(model, vocabulary, device)
        if not gap < (FLOAT32_ROUNDING if exact else HALF_ROUNDING):
            return f"log-probs differ by {gap:.2g}"
        gap, name = gradient_gap(model, vocabulary, device) if exact else (0.0, "")
    except (NotImplementedError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        return f"its forward pass does not take it ({str(error).partition(chr(10))[0]})"
    return None if gap < _SAME_GRADIENT else f"the gradient of {name} differs by {gap:.0%}"


def plain_attention_limit(model: nn.Module) -> int | None:
    """Return the most tokens for which every layer's attention is the plain causal one; None without a limit.

    Sliding windows and chunks end it, and LongRoPE, which turns all keys anew once a row is longer than this.
    """
    config = plain_model(model).config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    limits = []
    if kinds is None or "sliding_attention" in kinds:
        limits.append(getattr(config, "sliding_window", None))
    if kinds is None or "chunked_attention" in kinds:
        limits.append(getattr(config, "attention_chunk_size", None))
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") == "longrope":
            limits.append(part.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


def packing_gap(model: nn.Module, vocabulary: int, device: torch.device) -> float:
    """Return the largest |Δ log-prob| between the packed and the plain forward on a probe of 40 tokens.

    Linear attention, scaled logits and positions that do not follow `position_ids` show here. Raises what the model
    raises where it does not take a layout.
    """
    probe = _probe(vocabulary, device)
    with torch.no_grad():
        plain, _ = completion_logps(model, probe, temperature=1.0, packed=False)
        packed, _ = completion_logps(model, probe, temperature=1.0, packed=True)
    return float((packed - plain).abs().max())


def gradient_gap(model: nn.Module, vocabulary: int, device: torch.device) -> tuple[float, str]:
    """Return the largest difference of a parameter's gradient, packed against plain, as a share of its norm; and whose.

    What is zero or one at first, and does nothing to log-probs, has a gradient: it would be left out. Gradients that
    the parameters have are put back.
    """
    probe = _probe(vocabulary, device)
    weights = torch.linspace(-1, 1.7, probe.mask.numel(), device=device).reshape(probe.mask.shape)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        return 0.0, ""
    with torch.enable_grad(), _own_gradients(trained.values()):
        _loss(model, probe, weights, packed=False).backward()
        norms = {name: float(_norm(value)) for name, value in trained.items()}
        with in_place():  # the difference of both, in the memory of one
            (-_loss(model, probe, weights, packed=True)).backward()
        gaps = {name: float(_norm(value)) for name, value in trained.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    return max((gaps[name] / max(norms[name], _SMALL * whole, 1e-30), name) for name in gaps)


def _loss(model: nn.Module, probe: Batch, weights: Tensor, *, packed: bool) -> Tensor:
    logps, entropy = completion_logps(model, probe, temperature=1.0, packed=packed)
    return ((logps + entropy) * weights * probe.mask).sum()


def _norm(parameter: Tensor) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad.float().norm()


@contextmanager
def _own_gradients(parameters: Any) -> Iterator[None]:
    """Let the block start without gradients, and put those that were there back."""
    former = [(one, one.grad) for one in parameters]
    try:
        for one, _ in former:
            one.grad = None
        yield
    finally:
        for one, grad in former:
            one.grad = grad


def _probe(vocabulary: int, device: torch.device) -> Batch:
    tokens = [(7 * place + 3) % vocabulary for place in range(40)]
    prompts = (tuple(tokens[:9]), tuple(tokens[9:12]))
    completions = (tuple(tokens[12:26]), tuple(tokens[26:31]), tuple(tokens[31:40]))
    mask = torch.arange(14, device=device) < torch.tensor([14, 5, 9], device=device).unsqueeze(1)
    zeros = torch.zeros(3, 14, device=device)
    return Batch(prompts, (0, 0, 1), completions, mask, zeros[:, :1], zeros)
