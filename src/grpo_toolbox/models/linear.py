"""Large linear layers through oneDNN: the same products in float32, rounded in another order.

Forward and the gradient of the input gain about a tenth; with blocked copies of the weights, made once for many tokens
of sampling, few rows gain a quarter to a half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_toolbox.onednn import blocked, multiply, suits


@contextmanager
def fast_linear(model: nn.Module) -> Iterator[None]:
    """Run the large linear layers of `model` through oneDNN inside the block, gradients included."""
    with _forwards(model, _FastForward):
        yield


@contextmanager
def packed_linear(model: nn.Module, rows: int) -> Iterator[None]:
    """Run the large linear layers of `model`, whose weights stay as they are, on blocked copies of the weights.

    For inference on about `rows` rows at a time. The copies take the memory of the weights once more and cost about as
    much as half a dozen tokens of sampling; they go with the block.
    """
    with _forwards(model, lambda module: _PackedForward(module, rows)):
        yield


class _FastForward:
    """What a linear layer does in place of its own `forward`."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        if not _is_plain(x):
            return linear(x, weight, bias)
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            output: Tensor = _Linear.apply(x, weight, bias)
            return output
        return multiply(x, weight, bias)


class _PackedForward:
    """The same with a blocked copy of the weight."""

    def __init__(self, module: nn.Linear, rows: int) -> None:
        self._module = module
        self._blocked = blocked(module.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        if not _is_plain(x):
            return linear(x, self._module.weight, self._module.bias)
        return multiply(x, self._blocked, self._module.bias)


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b; ∂x = ∂y·W by oneDNN, ∂W = ∂yᵀ·x by torch, which is the faster one there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = multiply(grad, weight.T) if wants_x else None
        rows = grad.flatten(0, -2)
        grad_weight = rows.T @ x.flatten(0, -2) if wants_weight else None
        return grad_x, grad_weight, rows.sum(dim=0) if wants_bias else None


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


@contextmanager
def _forwards(model: nn.Module, make: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Give the large plain linear layers another `forward`; those that have been given one already keep it."""
    changed = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in vars(module) and suits(module.weight)
    ]
    try:
        for module in changed:
            vars(module)["forward"] = make(module)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)
