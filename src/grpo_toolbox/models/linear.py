"""Large linear layers through oneDNN: the same products in float32, rounded in another order.

Forward and the gradient of the input gain about a tenth; with blocked copies of the weights, made once for many tokens
of sampling, few rows gain a quarter to a half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, silu

from grpo_toolbox.gradients import is_bare, product
from grpo_toolbox.models.norms import again, kept, norm_forward
from grpo_toolbox.models.shelf import Shelf
from grpo_toolbox.onednn import blocked, multiply, suits


@contextmanager
def fast_linear(model: nn.Module, shelf: Shelf | None = None) -> Iterator[None]:
    """Run the large linear layers of `model` through oneDNN inside the block, gradients included.

    What can be had again cheaply is not kept for backward: what norms return, and two of the four wide activations of
    gated MLPs whose three layers are plain; where the `shelf` says so the other two neither, at the price of two
    products. The rest stands on the shelf.
    """
    shelf = shelf or Shelf()
    fast, norm = partial(_fast, shelf=shelf), partial(norm_forward, shelf=shelf)
    with replaced_forwards(model, fast, partial(_gated, shelf=shelf), norm):
        yield


@contextmanager
def packed_linear(model: nn.Module, rows: int) -> Iterator[None]:
    """Run the large linear layers of `model`, whose weights stay as they are, on blocked copies of the weights.

    For inference on about `rows` rows at a time; adapters of plain LoRA are merged into the copies. These take the
    memory of the weights once more and cost about as much as half a dozen tokens of sampling; they go with the block.
    """

    def pack(module: nn.Module, weight: Tensor, bias: Tensor | None) -> _PackedForward | None:
        return _PackedForward(module, weight, bias, rows) if suits(weight) else None

    with replaced_forwards(model, merged_layers(pack)):
        yield


@contextmanager
def cast_linear(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Run the float32 linear layers of `model` under autocast on copies in `dtype`, made once and not for each token.

    The weights stay as they are; the copies take half of their memory once more, and go with the block.
    """

    def cast(module: nn.Module) -> Forward | None:
        plain = type(module) is nn.Linear and module.weight.dtype == torch.float32
        return _CastForward(module, dtype) if plain else None  # type: ignore[arg-type]

    with replaced_forwards(model, cast):
        yield


def merged_layers(
    make: Callable[[nn.Module, Tensor, Tensor | None], Forward | None],
) -> Callable[[nn.Module], Forward | None]:
    """Return what `replaced_forwards` asks: `make(module, weight, bias)` for linear layers, plain LoRA merged in."""
    merged: set[int] = set()

    def forward(module: nn.Module) -> Forward | None:
        weight, bias = (None, None) if id(module) in merged else _whole(module)
        made = None if weight is None else make(module, weight, bias)
        if made is not None:
            merged.add(id(getattr(module, "base_layer", None)))
        return made

    return forward


Forward = Callable[[Tensor], Any]


def _fast(module: nn.Module, *, shelf: Shelf) -> Forward | None:
    return _FastForward(module, shelf) if type(module) is nn.Linear and suits(module.weight) else None


def _gated(module: nn.Module, *, shelf: Shelf) -> Forward | None:
    return _GatedForward(module, shelf) if _is_gated_mlp(module) else None


@torch.no_grad()
def _whole(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias that `module` multiplies by: a plain layer's, or one's under plain LoRA, merged."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    kind, base = type(module), getattr(module, "base_layer", None)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or type(base) is not nn.Linear:
        return None, None
    adapters = [name for name in module.active_adapters if name in module.lora_A]
    biased = any(module.lora_B[name].bias is not None for name in adapters)
    if module.disable_adapters or module.merged or module.lora_variant or biased:
        return None, None
    return sum((module.get_delta_weight(name) for name in adapters), base.weight), base.bias


class _FastForward:
    """What a linear layer does in place of its own `forward`."""

    def __init__(self, module: nn.Linear, shelf: Shelf) -> None:
        self._module, self._shelf = module, shelf

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        if not _is_plain(x):
            return linear(x, weight, bias)
        if not torch.is_grad_enabled():
            return multiply(x, weight, bias)
        output: Tensor = _Linear.apply(x, weight, bias, self._shelf)
        return output


class _PackedForward:
    """The same with a blocked copy of the weight."""

    def __init__(self, module: nn.Module, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._module = module
        self._blocked, self._bias = blocked(weight, rows), bias

    def __call__(self, x: Tensor) -> Any:
        if not _is_plain(x):
            kind: Any = type(self._module)
            return kind.forward(self._module, x)
        return multiply(x, self._blocked, self._bias)


class _CastForward:
    """The same with a copy of weight and bias in half precision, which autocast then leaves as it is."""

    @torch.no_grad()
    def __init__(self, module: nn.Linear, dtype: torch.dtype) -> None:
        self._weight = module.weight.to(dtype)
        self._bias = None if module.bias is None else module.bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b; ∂x = ∂y·W by oneDNN, ∂W = ∂yᵀ·x by torch, which is the faster one there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shelf: Shelf) -> Tensor:
        # a frozen weight has no gradient, and nothing else needs the input
        ctx.save_for_backward(weight, *(kept(x, shelf) if ctx.needs_input_grad[1] else ()))
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *parts = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_x = multiply(grad, weight.T) if wants_x else None
        rows = grad.flatten(0, -2)
        grad_weight = product(weight, rows.T, again(parts).flatten(0, -2)) if wants_weight else None
        return grad_x, grad_weight, rows.sum(dim=0) if wants_bias else None, None


class _Gated(torch.autograd.Function):
    """y = D·(silu(G·x) ∘ U·x): keeps x, and G·x and U·x unless they are to be computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, shelf: Shelf) -> Tensor:
        gated, raised = multiply(x, gate), multiply(x, up)
        wide = (None, None) if shelf.recompute_mlp else (shelf.put(gated), shelf.put(raised))
        ctx.save_for_backward(gate, up, down, *wide, *kept(x, shelf))
        return multiply(silu(gated).mul_(raised), down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down, gated, raised, *parts = ctx.saved_tensors
        x = again(parts)
        if gated is None:
            gated, raised = multiply(x, gate), multiply(x, up)
        wants_x, *wanted, _ = ctx.needs_input_grad
        opened, inner = silu(gated), multiply(grad, down.T)
        of_up = inner * opened
        of_gate = torch.ops.aten.silu_backward(inner.mul_(raised), gated)
        hidden = opened.mul_(raised) if wanted[2] else opened
        pairs = ((gate, of_gate, x), (up, of_up, x), (down, grad, hidden))
        weights = [
            product(weight, left.flatten(0, -2).T, right.flatten(0, -2)) if wants else None
            for (weight, left, right), wants in zip(pairs, wanted, strict=True)
        ]
        return multiply(of_gate, gate.T).add_(multiply(of_up, up.T)) if wants_x else None, *weights, None


class _GatedForward:
    """What a gated MLP does in place of its own `forward` while gradients are wanted."""

    def __init__(self, module: Any, shelf: Shelf) -> None:
        self._module, self._shelf = module, shelf

    def __call__(self, x: Tensor) -> Any:
        module = self._module
        if not (_is_plain(x) and torch.is_grad_enabled()):
            kind: Any = type(module)
            return kind.forward(module, x)
        weights = (module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
        return _Gated.apply(x, *weights, self._shelf)


def _is_gated_mlp(module: Any) -> bool:
    """Whether `module` computes D·(silu(G·x) ∘ U·x) with three large layers without bias: by name, then by trial."""
    if "gate_proj" not in module._modules:
        return False
    layers = [module._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = [
        one for one in layers if type(one) is nn.Linear and one.bias is None and suits(one.weight) and is_bare(one)
    ]
    return len(plain) == 3 and _computes_a_gated_mlp(module)


_TRIED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""By module: of one class some may have another activation than others."""


@torch.no_grad()
def _computes_a_gated_mlp(module: nn.Module) -> bool:
    """By trial, on small weights in place of its own: those may be zero, where every function looks alike."""
    if module not in _TRIED:
        shapes = {"gate_proj.weight": (6, 4), "up_proj.weight": (6, 4), "down_proj.weight": (4, 6)}
        weights = {name: torch.linspace(-1, 2, 24).roll(len(name)).reshape(shape) for name, shape in shapes.items()}
        x = torch.linspace(-1, 1, 12).reshape(1, 3, 4)
        try:
            theirs = functional_call(module, weights, (x,))
        except (TypeError, ValueError, AttributeError, RuntimeError):  # it takes more than hidden states
            theirs = torch.full((), torch.nan)
        gate, up, down = weights.values()
        ours = linear(silu(linear(x, gate)) * linear(x, up), down)
        alone = {name for name, _ in module.named_parameters()} == set(shapes)
        _TRIED[module] = alone and ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)
    return _TRIED[module]


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


@contextmanager
def replaced_forwards(model: nn.Module, *makers: Callable[[nn.Module], Forward | None]) -> Iterator[None]:
    """Give modules the `forward` that one of `makers` has for them; those that have been given one keep it."""
    chosen: list[tuple[nn.Module, Forward]] = []
    for module in model.modules():
        made = () if "forward" in vars(module) else (make(module) for make in makers)
        forward = next((one for one in made if one is not None), None)
        if forward is not None:
            chosen.append((module, forward))
    with _given(chosen):
        yield


def same_forwards_again() -> AbstractContextManager[None]:
    """Return a context in which modules have the `forward` that they have been given in the block around this call."""
    return _given(_NOW.get())


_NOW: ContextVar[Sequence[tuple[nn.Module, Forward]]] = ContextVar("_NOW", default=())


@contextmanager
def _given(chosen: Sequence[tuple[nn.Module, Forward]]) -> Iterator[None]:
    former = _NOW.set(chosen)
    try:
        for module, forward in chosen:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, _ in chosen:
            vars(module).pop("forward", None)
        _NOW.reset(former)
