"""What needs a GPU or another package says so before anything is loaded; models that a program hands over are taken."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import composed, toolbox
from grpo_toolbox.config.inputs import Given
from grpo_toolbox.config.policy import described, load_policy, make_optimizer
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.load import adopt_model, load_model
from grpo_toolbox.models.loaders import four_bits
from grpo_toolbox.models.lora import LoraOptions, has_adapter
from grpo_toolbox.models.tiny import build_tiny

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_four_bits_without_a_gpu_are_refused_before_the_model_loads() -> None:
    result = toolbox("train", "model.load_in_4bit=true", "model.lora.r=4")
    assert result.code == 1
    assert "model.load_in_4bit=true needs a GPU" in result.err


def test_four_bits_without_an_adapter_are_refused() -> None:
    result = toolbox("train", "model.load_in_4bit=true")
    assert result.code == 1
    assert "model.lora.r=16" in result.err


def test_four_bits_are_those_of_qlora() -> None:
    config = four_bits("auto")
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert four_bits("float16").bnb_4bit_compute_dtype == torch.float16


def test_unsloth_is_asked_for_by_name_where_it_is_missing() -> None:
    result = toolbox("train", "model.loader=unsloth", "trainer.max_steps=1")
    assert result.code == 1
    assert "needs Unsloth, which is not installed" in result.err


def test_unsloth_loads_the_model_and_makes_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package cannot be installed without a GPU: this holds its place, and shows what it is asked for."""
    asked: dict[str, Any] = {}

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(**options: Any) -> tuple[Any, Any]:
            asked["load"] = options
            return build_tiny()

        @staticmethod
        def get_peft_model(model: Any, **options: Any) -> Any:
            asked["adapter"] = options
            return model

    unsloth = SimpleNamespace(FastLanguageModel=FastLanguageModel, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "unsloth", unsloth)  # type: ignore[arg-type]
    words = ("model.loader=unsloth", "model.lora.r=8", "model.lora.target_modules=[q_proj]", "trainer.seed=5")
    config, _ = composed(*words, "data.max_prompt_tokens=50", "rollout.max_new_tokens=14")
    load_policy(config, Given(), CPU)
    assert asked["load"] == {"model_name": "builtin:tiny", "max_seq_length": 64, "load_in_4bit": False}
    assert {key: asked["adapter"][key] for key in ("r", "lora_alpha", "random_state", "target_modules")} == {
        "r": 8,
        "lora_alpha": 16,
        "random_state": 5,
        "target_modules": ["q_proj"],
    }


def test_8_bit_adamw_is_plain_adamw_without_a_gpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = composed("trainer.optimizer=adamw_8bit")
    with caplog.at_level(logging.WARNING):
        optimizer = make_optimizer(build_tiny()[0], config.trainer, CPU)
    assert type(optimizer) is torch.optim.AdamW
    assert "adamw_8bit needs a GPU" in caplog.text


def test_a_model_without_anything_to_train_is_refused() -> None:
    config, _ = composed()
    with pytest.raises(ConfigError, match="unfreeze it"):
        make_optimizer(build_tiny()[0].requires_grad_(False), config.trainer, CPU)


# ---- objects of a program's


def test_a_given_model_is_trained_itself_and_loses_its_dropout() -> None:
    model, tokenizer = build_tiny()
    model.extra = torch.nn.Dropout(0.5)
    config, _ = composed("model.path=no-such-model")
    shown, used = described(config.model, Given(model=model, tokenizer=tokenizer))
    assert shown is model.config
    assert used is tokenizer
    assert load_policy(config, Given(model=model), CPU) is model
    assert model.extra.p == 0
    assert not model.training


def test_a_given_adapter_is_the_one_that_the_options_make() -> None:
    """The same rank, scale and seed draw the same adapter, whether by PEFT's config or by model.lora."""
    from peft import LoraConfig

    peft_config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)
    given = adopt_model(build_tiny()[0], seed=3, lora=peft_config)
    named = load_model("builtin:tiny", seed=3, lora=LoraOptions(4, 8.0, dropout=0.1))
    ours, theirs = (dict(model.named_parameters()) for model in (given, named))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    dropouts = {module.p for name, module in given.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert 0.1 in dropouts


def test_the_dropout_of_an_adapter_that_comes_with_the_model_stays() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build_tiny()[0], LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.25))
    kept = adopt_model(adapted)
    assert has_adapter(kept)
    assert {m.p for name, m in kept.named_modules() if name.endswith("lora_dropout.default")} == {0.25}


def test_a_second_adapter_is_refused() -> None:
    adapted = load_model("builtin:tiny", lora=LoraOptions(2))
    with pytest.raises(ConfigError, match="has an adapter already"):
        adopt_model(adapted, lora=LoraOptions(2))
