"""RMS norms whose result is computed again in backward instead of being kept.

y = x·s·w with s = 1/√(mean x² + ε). What a norm reads is a residual state, which is kept anyway; what it returns is
kept by nobody, as the layers behind it (`models/linear.py`) can ask for it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from grpo_toolbox.models.shelf import Shelf

_WORTH_FUSING = 256
"""Norms over fewer numbers are left to the model: calling through Python costs more than is gained."""


class _Normed(NamedTuple):
    """Where y came from."""

    x: Tensor
    scale: Tensor  # (…, 1)
    weight: Tensor


def kept(y: Tensor, shelf: Shelf) -> tuple[Tensor, ...]:
    """Return what to keep in place of `y`: where a norm of ours took it from, or else `y` on the shelf."""
    source: _Normed | None = getattr(y, "normed_from", None)
    return (shelf.put(y),) if source is None else source


def again(parts: Sequence[Tensor]) -> Tensor:
    """Return the `y` that `kept` was asked about."""
    if len(parts) == 1:
        return parts[0]
    x, scale, weight = parts
    return (x * scale).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """∂x = s·(g − x̂·mean(g∘x̂)) with g = ∂y∘w and x̂ = x·s; ∂w = Σ ∂y∘x̂ over all states."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, again: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.linalg.vecdot(x, x).unsqueeze(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(again, scale, weight)
        ctx.mark_non_differentiable(scale)
        return (x * scale).mul_(weight), scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, scale, weight = ctx.saved_tensors
        normal = x * scale
        grad_weight = (grad * normal).flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        inner = grad * weight
        mean = torch.linalg.vecdot(inner, normal).unsqueeze(-1).div_(x.shape[-1])
        return inner.addcmul_(normal, mean, value=-1).mul_(scale), grad_weight, None, None


class _NormForward:
    """What an RMS norm does in place of its own `forward` while gradients are wanted."""

    def __init__(self, module: Any, shelf: Shelf) -> None:
        self._module, self._eps, self._shelf = module, _epsilon(module), shelf

    def __call__(self, x: Tensor) -> Any:
        module = self._module
        plain = x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
        if not (plain and torch.is_grad_enabled()):
            kind: Any = type(module)
            return kind.forward(module, x)
        source = self._shelf.put(x).detach()
        y, scale = _RMSNorm.apply(x, module.weight, self._eps, source)
        y.normed_from = _Normed(source, scale, module.weight)
        return y


def norm_forward(module: nn.Module, shelf: Shelf) -> _NormForward | None:
    """Return what to run in place of `module`, where that is a wide RMS norm in float32 on a processor."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or not isinstance(_epsilon(module), float):
        return None
    wide = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= _WORTH_FUSING
    return _NormForward(module, shelf) if wide and _computes_an_rms_norm(module) else None


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


_TRIED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def _computes_an_rms_norm(module: Any) -> bool:
    """By trial, on a weight of its own: there are norms that subtract a mean, add one to the weight, or have a bias."""
    if module not in _TRIED:
        width = module.weight.numel()
        x, weight = torch.linspace(-1, 3, 2 * width).reshape(1, 2, width), torch.linspace(0.5, 2, width)
        try:
            theirs = functional_call(module, {"weight": weight}, (x,))
        except (TypeError, ValueError, AttributeError, RuntimeError):  # it takes more than hidden states
            theirs = torch.full((), torch.nan)
        ours, _ = _RMSNorm.apply(x, weight, _epsilon(module), x)
        alone = len(list(module.parameters())) == 1
        _TRIED[module] = alone and ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    return _TRIED[module]
