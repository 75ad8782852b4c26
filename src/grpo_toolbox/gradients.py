"""Gradients of weights that are added to `.grad` where they are computed, instead of travelling through autograd.

A product of its own for each weight and micro-batch, which autograd then adds, costs memory of the weight's size and
three passes over it; for an embedding that the output head shares it is a table of zeros besides.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNED = 16
"""Numbers to whose multiple a gradient's place in its block is rounded up: 64 bytes in float32, a line of the cache."""


def lay_out(parameters: Sequence[nn.Parameter]) -> None:
    """Give every parameter a gradient of zeros, those of one device and precision in one block.

    Made one by one in backward they would settle between activations that are about to be freed, and keep the holes
    from being used again.
    """
    blocks: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.is_contiguous():
            blocks[parameter.device, parameter.dtype].append(parameter)
        else:
            parameter.grad = torch.zeros_like(parameter)
    for (device, dtype), members in blocks.items():
        sizes = [-(-one.numel() // _ALIGNED) * _ALIGNED for one in members]
        block = torch.zeros(sum(sizes), device=device, dtype=dtype)
        for parameter, part in zip(members, block.split(sizes), strict=True):
            parameter.grad = part[: parameter.numel()].view_as(parameter)


class _Mode(threading.local):
    """Of this thread: another may be training a model of its own, or want its gradients handed out."""

    in_place = False


_MODE = _Mode()


@contextmanager
def in_place() -> Iterator[None]:
    """Let `loss.backward()` inside the block add gradients of leaf weights to `.grad` directly.

    For training loops: `torch.autograd.grad` would not be handed them.
    """
    former, _MODE.in_place = _MODE.in_place, True
    try:
        yield
    finally:
        _MODE.in_place = former


def goes_in_place(weight: Any) -> bool:
    """Whether the gradient of `weight` is to be added where it is computed: a leaf in float32 that nobody watches."""
    watched = getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None)
    exact = weight.dtype in (torch.float32, torch.float64)  # sums of many parts in half precision lose the small ones
    return _MODE.in_place and isinstance(weight, nn.Parameter) and weight.is_leaf and exact and not watched


def is_bare(module: nn.Module) -> bool:
    """Whether nobody listens at `module` or has changed its `forward`, so that it may be computed past its call."""
    listening = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return "forward" not in vars(module) and not any(listening)


def product(weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """Return left · right as the gradient of `weight`, or add it to `weight.grad` and return None."""
    if not goes_in_place(weight):
        return left @ right
    add_product(weight, left, right)
    return None


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right to `weight.grad`."""
    if weight.grad is None:
        weight.grad = left @ right
    else:
        weight.grad.addmm_(left, right)


def looked_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Return the rows `ids` of `table` as a leaf whose gradient is added to those rows of the table's.

    As in `nn.Embedding`, the row of the padding token gets none.
    """
    with torch.no_grad():
        rows = table(ids)
    weight, width = table.weight, table.weight.shape[1]

    def add(grad: Tensor) -> None:
        with torch.no_grad():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            rows_grad = grad.reshape(-1, width).to(weight.dtype)
            if table.padding_idx is not None:
                rows_grad = rows_grad.masked_fill(ids.reshape(-1, 1) == table.padding_idx, 0)
            weight.grad.index_add_(0, ids.flatten(), rows_grad)

    rows.requires_grad_()
    rows.register_hook(add)
    return rows
