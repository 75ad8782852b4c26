"""What looks like a plain decoder at first and is none: found out by its gradients, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import prune

from grpo_toolbox.gradients import in_place
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.linear import fast_linear
from grpo_toolbox.models.packing import gradient_gap, packing_gap, packing_refusal
from small_models import VOCABULARY, build, shared
from test_forward import LONG

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 320}


class Mixing(nn.Module):
    """Adds to every token a multiple of the mean over the sequence up to it: learnt, and zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        counts = torch.arange(1, hidden.shape[1] + 1).unsqueeze(1)
        return hidden + self.share * hidden.cumsum(dim=1) / counts


def mixing() -> Any:
    model = build("llama")
    model.model.norm = nn.Sequential(model.model.norm, Mixing())
    return model


def test_what_does_nothing_yet_shows_in_its_gradient():
    model = mixing()
    assert packing_gap(model, VOCABULARY, CPU) < 1e-5
    gap, name = gradient_gap(model, VOCABULARY, CPU)
    assert gap > 0.05
    assert name == "model.norm.1.share"
    assert str(packing_refusal(model, VOCABULARY, 60, CPU)).startswith("the gradient of model.norm.1.share differs by ")


def test_the_trial_leaves_gradients_as_they_were():
    model = build("llama")
    first, *others = model.parameters()
    first.grad = torch.ones_like(first)
    assert packing_refusal(model, VOCABULARY, 60, CPU) is None
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(one.grad is None for one in others)


def test_a_frozen_model_has_no_gradient_to_differ():
    assert gradient_gap(build("llama").requires_grad_(False).eval(), VOCABULARY, CPU) == (0.0, "")


def test_a_head_with_a_scale_of_its_own_is_refused():
    """Its log-probs are those of its matrix while the scale is 1."""
    assert "more than one matrix" in str(packing_refusal(shared("dory"), VOCABULARY, 60, CPU))


class Scaled(nn.Linear):
    """A head whose scale is 1 at first."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) * self.scale


def test_and_so_is_one_that_a_user_has_made():
    model = build("llama")
    model.lm_head = Scaled(32, VOCABULARY)
    assert "more than one matrix" in str(packing_refusal(model, VOCABULARY, 60, CPU))


# ---- what is computed past a module's own call -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["mlp.gate_proj", "mlp", "input_layernorm", "self_attn.q_proj"])
def test_hooks_on_wide_layers_are_heard(place: str):
    """A hook that doubles what a layer returns doubles it in the packed pass, too."""
    model = build("llama", **WIDE)
    layer = model.model.layers[0].get_submodule(place)
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    assert packing_refusal(model, VOCABULARY, 60, CPU) is None
    assert_plain(model)


def test_hooks_on_the_embedding_are_heard():
    model = build("llama", **WIDE)
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: 2 * output)
    assert_plain(model)


def test_an_mlp_whose_layers_have_been_pruned_stays_pruned():
    """torch's pruning makes a layer's weight anew in a hook before each call."""
    model = build("llama", **WIDE)
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)
    assert_plain(model)


def assert_plain(model: Any) -> None:
    """Log-probs and gradients of two passes with a step between them, as the padded forward has them."""
    for _ in range(2):
        found = []
        for packed in (True, False):
            model.zero_grad(set_to_none=True)
            with in_place():
                logps, _ = completion_logps(model, LONG, temperature=4.0, packed=packed)
                logps.sum().backward()
            found.append((logps.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]))
        (ours, gradients), (plain, expected) = found
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-3)
        for one, other in zip(gradients, expected, strict=True):
            assert (one - other).norm() <= 2e-3 * other.norm()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(one.grad if one.grad is not None else 0.0, alpha=-1e-4)


@pytest.mark.parametrize("zeroed", ["down_proj", "gate_proj"])
def test_an_mlp_of_zeros_is_not_taken_for_another(zeroed: str):
    """With silu or gelu it returns zeros at first; what it learns differs."""
    model = build("llama", **WIDE, hidden_act="gelu")
    with torch.no_grad():
        getattr(model.model.layers[0].mlp, zeroed).weight.zero_()
    with fast_linear(model):
        assert "forward" not in vars(model.model.layers[0].mlp)
