"""oneDNN's products are torch's, gradients too; modules are themselves again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_toolbox.models.linear import fast_linear, packed_linear
from grpo_toolbox.models.shelf import Shelf
from grpo_toolbox.onednn import blocked, multiply, suits, works
from small_models import build

pytestmark = pytest.mark.skipif(not works(), reason="torch was built without oneDNN's operators")


def layer(inputs: int = 300, outputs: int = 260, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(inputs + outputs)
        return nn.Linear(inputs, outputs, bias=bias)


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("packed_for", [1, 64])
def test_a_blocked_weight_serves_any_number_of_rows(rows, packed_for):
    """K = 300: sums of 300 products of size 1/17 in two orders differ by some 1e-6."""
    module, x = layer(), states(rows, 300)
    exact = x.double() @ module.weight.double().T
    for weight in (module.weight, blocked(module.weight, packed_for)):
        torch.testing.assert_close(multiply(x, weight).double(), exact, atol=3e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 300), (1, 7, 300), (2, 3, 300)])
def test_gradients_are_those_of_the_plain_layer(bias, shape):
    module, x = layer(bias=bias), states(*shape)

    def gradients(block: Any) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        with block:
            output = module(leaf)
        return output, *torch.autograd.grad(output.square().sum(), (leaf, *module.parameters()))

    with torch.random.fork_rng():
        plain = gradients(torch.enable_grad())
    for ours, theirs in zip(gradients(fast_linear(module)), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_gradients_of_inputs_that_are_views():
    """A transposed input and a gradient that is expanded, as attention and sums hand them over."""
    module = layer()
    x = states(300, 9).T.requires_grad_()
    with fast_linear(module):
        (ours,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(ours, module.weight.sum(0).expand(9, -1), atol=1e-5, rtol=0)


def test_a_frozen_layer_passes_the_gradient_on_and_gets_none():
    module, x = layer().requires_grad_(False), states(4, 300).requires_grad_()
    with fast_linear(module):
        module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize("block", [fast_linear, lambda model: packed_linear(model, 8)])
def test_only_large_plain_float32_layers_are_changed_and_only_inside(block):
    class Special(nn.Linear):
        """Somebody's own layer."""

    large, small, half, special, hooked = layer(), layer(10, 10), layer().bfloat16(), Special(300, 260), layer()
    hooked.forward = lambda x: linear(x, hooked.weight) * 2  # type: ignore[method-assign]
    own = vars(hooked)["forward"]
    model = nn.ModuleList([large, small, half, special, hooked])
    with block(model):
        assert ["forward" in vars(module) for module in model] == [True, False, False, False, True]
        assert vars(hooked)["forward"] is own
    assert ["forward" in vars(module) for module in model] == [False, False, False, False, True]
    with pytest.raises(KeyError), block(model):
        raise KeyError
    assert "forward" not in vars(large)


def test_autocast_and_other_precisions_take_the_plain_way():
    module, x = layer(), states(4, 300)
    with fast_linear(module), torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert not suits(layer().double().weight)
    assert not suits(layer(10, 10).weight)


def test_a_packed_layer_keeps_the_weights_it_was_packed_with():
    """Hence: only while nothing changes them."""
    module, x = layer(bias=False), states(4, 300)
    before = module(x).detach()
    with torch.no_grad(), packed_linear(module, 4):
        module.weight.add_(1)
        torch.testing.assert_close(module(x), before, atol=1e-5, rtol=0)


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """The MLP of Llama and most others."""

    act = staticmethod(silu)

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = layer(260, 300, bias)
        self.up_proj = layer(260, 300, bias)
        self.up_proj.weight.data = self.up_proj.weight.data.roll(7, dims=1)  # not the gate's
        self.down_proj = layer(300, 260, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gelu(Gated):
    """The same names, another function (Gemma's)."""

    act = staticmethod(gelu)


class Routed(Gated):
    """The same names, another signature."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x) * weights


@pytest.mark.parametrize(("recompute", "wide_kept"), [(True, 0), (False, 2)])
def test_a_gated_mlp_keeps_few_wide_activations_and_gives_the_same_gradients(recompute, wide_kept):
    """Kept per token: 260 of x, 300 each of G·x and U·x or neither; the plain one silu(G·x) and the product, too."""
    mlp, x = Gated(), states(1, 50, 260)

    def gradients(block: Any) -> tuple[tuple[Tensor, ...], int]:
        kept: dict[int, int] = {}

        def keep(saved: Tensor) -> Tensor:
            if saved.shape[-2:-1] == (50,):
                kept[saved.data_ptr()] = saved.shape[-1]
            return saved

        leaf = x.clone().requires_grad_()
        with block, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            output = mlp(leaf)
        return (output, *torch.autograd.grad(output.square().sum(), (leaf, *mlp.parameters()))), sum(kept.values())

    plain, wide = gradients(torch.enable_grad())
    ours, narrow = gradients(fast_linear(mlp, Shelf(recompute_mlp=recompute)))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    assert (wide, narrow) == (260 + 4 * 300, 260 + wide_kept * 300)


@pytest.mark.parametrize("mlp", [Gelu(), Gated(bias=True), Routed()], ids=["gelu", "bias", "signature"])
def test_what_only_looks_like_a_gated_mlp_runs_as_it_is(mlp):
    x = states(1, 5, 260)
    more = (torch.full((260,), 0.5),) if isinstance(mlp, Routed) else ()
    plain = mlp(x, *more)
    with fast_linear(mlp):
        assert "forward" not in vars(mlp)
        torch.testing.assert_close(mlp(x, *more), plain, atol=1e-5, rtol=0)


def test_a_frozen_gated_mlp_passes_the_gradient_on():
    mlp, x = Gated().requires_grad_(False), states(1, 5, 260).requires_grad_()
    (plain,) = torch.autograd.grad(mlp(x).sum(), x)
    with fast_linear(mlp):
        (ours,) = torch.autograd.grad(mlp(x).sum(), x)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)


def test_llama_s_mlp_is_one():
    config = AutoConfig.for_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=10)
    model = AutoModelForCausalLM.from_config(config)
    with fast_linear(model):
        assert "forward" in vars(model.model.layers[0].mlp)


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(**options: Any) -> Any:
    """A model whose q_proj and down_proj carry an adapter that does something."""
    sizes = {"hidden_size": 256, "intermediate_size": 300}
    model = get_peft_model(build("llama", **sizes), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["plain", "DoRA", "bias"])
@torch.no_grad()
def test_an_adapter_is_merged_into_the_copy_where_that_is_what_it_computes(options):
    model, ids = adapted(**options), torch.tensor([[5, 6, 7, 8]])
    plain = model(input_ids=ids).logits
    with packed_linear(model, 4):
        packed = model(input_ids=ids).logits
        layer = model.get_base_model().model.layers[0].self_attn.q_proj
        assert ("forward" in vars(layer), "forward" in vars(layer.base_layer)) == (not options, bool(options))
    torch.testing.assert_close(packed, plain, atol=1e-3, rtol=1e-4)
    with model.disable_adapter(), packed_linear(model, 4):
        without = model(input_ids=ids).logits
    assert (without - plain).abs().max() > 0.1
