"""Rollouts from float8 copies of the linear layers: rounded as the format says, and known to be another policy's."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import linear

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models.float8 import float8_linear, refusal, rounded
from grpo_toolbox.types import Prompt, Sampling
from small_models import STOP, build, forced_log_probs, make_prompts
from toolbox_runs import SMALL, built_run, toolbox_train

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def test_rounding_by_hand():
    """e4m3 has three bits behind the leading one and 448 as its largest: 448 → scale 1; 3.3 → 3.25; 0.01 → 5·2⁻⁹.

    The second row's largest is 4.48, so its scale is 0.01: 1.0 is 100 there, between 96 and 104, and goes to 96, the
    even one.
    """
    numbers, scale = rounded(torch.tensor([[448.0, 3.3, 0.01], [4.48, 1.0, 0.0]]))
    torch.testing.assert_close(scale, torch.tensor([[1.0], [0.01]]))
    assert numbers.float().tolist() == [[448.0, 3.25, 5 * 2**-9], [448.0, 96.0, 0.0]]


def test_a_row_of_zeros_stays_one():
    numbers, scale = rounded(torch.zeros(1, 16))
    assert float((numbers.float() * scale).abs().max()) == 0


def gap(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((ours - exact).norm() / exact.norm()).detach())


def test_products_differ_by_the_rounding_of_two_numbers():
    """Each is off by at most 2⁻⁴ of itself, evenly spread by 2⁻⁴/√3 ≈ 3.6 %; two independent ones by some 5 %."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("llama", **SIZES)
        x = torch.randn(2, 7, 256)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad(), float8_linear(model):
        ours = layer(x)
    assert ours.shape == (2, 7, 256)
    assert 0.01 < gap(ours, linear(x, layer.weight)) < 0.06
    assert "forward" not in vars(layer)


def test_the_output_head_and_small_layers_are_left_alone():
    model = build("llama", vocab_size=304, **SIZES)
    with float8_linear(model):
        changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert "lm_head" not in changed
    assert {name.rpartition(".")[2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_an_adapter_is_merged_into_the_copies():
    model = get_peft_model(build("llama", **SIZES), LoraConfig(r=4, target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(2))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact, base = layer(x), layer.base_layer(x)
        with float8_linear(model.get_base_model()):
            ours = layer(x)
    assert gap(ours, exact) < 0.06 < gap(base, exact)


def test_log_probs_are_those_of_the_rounded_model_and_not_the_trainer_s():
    model = build("llama", **SIZES).eval()
    engine = LocalEngine(model, decode=lambda ids, reason: "", stop_ids=[STOP], float8=True)
    prompts: list[Prompt] = make_prompts(5, 3)
    rollouts = engine.generate(prompts, 2, Sampling(max_new_tokens=6, seed=4))
    assert not engine.traits.exact
    inside, outside = [], []
    for one in rollouts:
        with torch.no_grad(), float8_linear(model):
            said = forced_log_probs(model, one.prompt.ids, one.ids)
        plain = forced_log_probs(model, one.prompt.ids, one.ids)
        for place, (token, logp) in enumerate(zip(one.ids, one.logps, strict=True)):
            inside.append(abs(float(said[place, token]) - logp))
            outside.append(abs(float(plain[place, token]) - logp))
    assert max(inside) < 0.02  # the same rounding, of inputs that differ in their last digits
    assert max(outside) > 5 * max(inside)


@pytest.mark.parametrize(("quantize", "reused"), [("none", True), ("float8", False)])
def test_old_log_probs_are_not_taken_from_a_rounded_policy(tmp_path, quantize, reused):
    run = built_run("experiment=grpo_tiny", *SMALL, f"run_dir={tmp_path}/run", f"rollout.quantize={quantize}")
    assert run.generation.reuse_logps is reused


def test_other_engines_refuse_it(tmp_path, capsys):
    words = ("experiment=grpo_tiny", *SMALL, f"run_dir={tmp_path}/run", "rollout.quantize=float8")
    assert toolbox_train(*words, "rollout.engine=hf") == 1
    assert "rollout.quantize=float8: only rollout.engine=local has it" in capsys.readouterr().err


def test_devices_without_float8_products_are_named():
    assert refusal(torch.device("cpu")) is None
    assert refusal(torch.device("mps")) == "mps has none"
