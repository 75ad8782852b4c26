"""RMS norms of ours: the plain one's values and gradients, and nothing kept that the layer before keeps anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from grpo_toolbox.batch import Batch
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.linear import fast_linear
from grpo_toolbox.models.norms import _RMSNorm, norm_forward
from grpo_toolbox.models.shelf import Shelf
from grpo_toolbox.onednn import works
from small_models import build

WIDTH = 300


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def llama_norm(width: int = WIDTH) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return norm


def test_by_hand():
    """x = (3, 4, 0, 0), w = 2, no ε: mean x² = 25/4, s = 0.4, y = (2.4, 3.2, 0, 0).

    For L = y₁: g = (2, 0, 0, 0), x̂ = (1.2, 1.6, 0, 0), mean g∘x̂ = 0.6; ∂x = 0.4·((2, 0, 0, 0) − 0.6·x̂)
    = (0.512, −0.384, 0, 0); ∂w = (1.2, 0, 0, 0).
    """
    x, weight = torch.tensor([[3.0, 4.0, 0.0, 0.0]]).requires_grad_(), torch.full((4,), 2.0).requires_grad_()
    y, _ = _RMSNorm.apply(x, weight, 0.0, x.detach())
    torch.testing.assert_close(y, torch.tensor([[2.4, 3.2, 0.0, 0.0]]))
    of_x, of_weight = torch.autograd.grad(y[0, 0], (x, weight))
    torch.testing.assert_close(of_x, torch.tensor([[0.512, -0.384, 0.0, 0.0]]))
    torch.testing.assert_close(of_weight, torch.tensor([1.2, 0.0, 0.0, 0.0]))


def test_finite_differences_agree():
    x, weight = states(3, 5).double().requires_grad_(), states(5).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, 1e-3, x.detach())[0], (x, weight))


def gradients(norm: nn.Module, layer: nn.Module, x: Tensor, block: Any) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    with block:
        output = layer(norm(leaf))
    return output, *torch.autograd.grad(output.square().sum(), (leaf, *norm.parameters(), *layer.parameters()))


@pytest.mark.skipif(not works(), reason="torch was built without oneDNN's operators")
@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 3, WIDTH)])
def test_norm_and_layer_behind_it_have_the_gradients_of_the_plain_ones(shape):
    norm, layer, x = llama_norm(), nn.Linear(WIDTH, 260), states(*shape)
    plain = gradients(norm, layer, x, torch.enable_grad())
    ours = gradients(norm, layer, x, fast_linear(nn.Sequential(norm, layer)))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-5)


def gemma_norm() -> GemmaRMSNorm:
    """It multiplies by 1 + w."""
    return GemmaRMSNorm(WIDTH, eps=1e-5)


class Centred(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Subtract the mean first."""
        kind: Any = LlamaRMSNorm
        return kind.forward(self, x - x.mean(dim=-1, keepdim=True))


@pytest.mark.parametrize("other", [gemma_norm(), nn.LayerNorm(WIDTH), Centred(WIDTH), llama_norm(8)])
def test_other_norms_and_narrow_ones_are_left_alone(other):
    assert norm_forward(other, Shelf()) is None


@pytest.mark.parametrize("norm", [llama_norm(), nn.RMSNorm(WIDTH, eps=1e-5)])
def test_two_kinds_are_known(norm):
    assert norm_forward(norm, Shelf()) is not None


@contextmanager
def counted(kept: dict[int, int]) -> Iterator[None]:
    """Bytes that are kept for backward, by where they begin."""

    def keep(saved: Tensor) -> Tensor:
        kept[saved.data_ptr()] = saved.nbytes
        alive.append(saved)
        return saved

    alive: list[Tensor] = []
    with saved_tensors_hooks(keep, lambda saved: saved):
        yield


class Counted(Shelf):
    """Writes down what is put on it."""

    def __init__(self, kept: dict[int, int], recompute_mlp: bool) -> None:
        super().__init__(recompute_mlp=recompute_mlp)
        self._kept = kept

    def put(self, x: Tensor) -> Tensor:
        """Count it where it stands."""
        copy = super().put(x)
        self._kept[copy.data_ptr()] = copy.nbytes
        return copy


@pytest.mark.skipif(not works(), reason="torch was built without oneDNN's operators")
@pytest.mark.parametrize(("recompute", "wide"), [(True, 0), (False, 2)])
def test_what_a_decoder_layer_keeps_per_token(recompute, wide):
    """Two residual states, what attention returned, query, key and value; with `recompute` nothing that is wide.

    Llama of width 512 and intermediate 300, four query and two key-value heads of 64: 2·512 + 2·256 + 2·128 numbers,
    and 2·300 where the MLP's are kept. Counted as the difference of three layers and one. Eight completions share their
    prompt: its keys and values are not kept eight times.
    """

    def kept_by(layers: int) -> int:
        sizes = {"hidden_size": 512, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = build("llama", num_hidden_layers=layers, head_dim=64, **sizes).train()
        tokens = [3 + place % 20 for place in range(2000)]
        rows = tuple(tuple(tokens[9 * row : 9 * row + 33]) for row in range(8))
        mask, zeros = torch.ones(8, 33, dtype=torch.bool), torch.zeros(8, 33)
        batch = Batch((tuple(tokens[:400]),), (0,) * 8, rows, mask, zeros[:, :1], zeros)
        held = {parameter.data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}
        with counted(kept):
            completion_logps(model, batch, temperature=1.0, packed=True, shelf=Counted(kept, recompute))
        return sum(size for place, size in kept.items() if place not in held)

    positions = 400 + 8 * 32
    per_token = 2 * 512 + 2 * 256 + 2 * 128 + wide * 300
    scales = 2  # one number of each norm
    assert (kept_by(3) - kept_by(1)) / 2 == 4 * positions * (per_token + scales)
