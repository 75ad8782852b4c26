from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.load import (
    LoraOptions,
    count_parameters,
    has_adapter,
    load_config,
    load_model,
    load_tokenizer,
    make_reference,
    merged_state_dict,
    save_pretrained,
)
from grpo_toolbox.models.tiny import build_tokenizer, tiny_config

IDS = torch.tensor([[6, 13, 7, 16, 10, 1]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def step(model: torch.nn.Module) -> None:
    """One optimizer step large enough to see."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def trained(lora: LoraOptions | None) -> torch.nn.Module:
    model = load_model("builtin:tiny", lora=lora)
    for _ in range(2):  # the first step moves only B, which starts at 0; the second moves A, too
        step(model)
    return model


def test_a_fresh_adapter_changes_no_logit():
    plain = load_model("builtin:tiny")
    assert torch.equal(logits(load_model("builtin:tiny", lora=LoraOptions(4))), logits(plain))


def test_only_the_adapter_is_trained():
    model = load_model("builtin:tiny", lora=LoraOptions(2))
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    # r·(in + out) of q, k, v, o, gate, up, down: 2·(128 + 96 + 96 + 128 + 192 + 192 + 192), twice; no head
    assert count_parameters(model) == (76_736 + 4096, 4096)


def test_rank_0_trains_all_weights():
    for lora in (None, LoraOptions(0)):
        model = load_model("builtin:tiny", lora=lora)
        assert not has_adapter(model)
        assert count_parameters(model) == (76_736, 76_736)


def test_alpha_defaults_to_twice_the_rank():
    assert load_model("builtin:tiny", lora=LoraOptions(4)).peft_config["default"].lora_alpha == 8
    assert load_model("builtin:tiny", lora=LoraOptions(4, alpha=3)).peft_config["default"].lora_alpha == 3


def test_the_seed_draws_the_adapter():
    drawn = [
        torch.cat(
            [
                p.flatten()
                for n, p in load_model("builtin:tiny", seed=seed, lora=LoraOptions(2)).named_parameters()
                if "lora_A" in n
            ]
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_adapter_of_a_half_precision_base_is_float32():
    model = load_model("builtin:tiny", dtype="bfloat16", lora=LoraOptions(2))
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
    assert logits(model).isfinite().all()


def test_only_the_named_layers_are_adapted():
    model = load_model("builtin:tiny", lora=LoraOptions(2, target_modules=["q_proj", "v_proj"]))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_unknown_layers_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules=.*all-linear, down_proj.*q_proj"):
        load_model("builtin:tiny", lora=LoraOptions(2, target_modules=["query"]))


def test_an_adapter_on_a_tied_head_is_refused(tmp_path):
    from transformers import LlamaForCausalLM

    config = tiny_config()
    config.tie_word_embeddings = True
    save_pretrained(LlamaForCausalLM(config), build_tokenizer(), tmp_path)
    with pytest.raises(ConfigError, match="one tensor in this model"):
        load_model(str(tmp_path), lora=LoraOptions(2, target_modules=["q_proj", "lm_head"]))
    load_model(str(tmp_path), lora=LoraOptions(2))


@pytest.mark.parametrize("options", [{"r": -1}, {"r": 4, "dropout": 1.0}, {"r": 4, "dropout": -0.1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"model\.lora\."):
        LoraOptions(**options)


# ---- the reference


@pytest.mark.parametrize("lora", [None, LoraOptions(4)])
def test_the_reference_stays_while_the_policy_learns(lora):
    policy = load_model("builtin:tiny", lora=lora)
    start, reference = logits(policy), make_reference(policy)
    step(policy)
    with reference.model() as net:
        assert torch.equal(logits(net), start)
    assert (logits(policy) - start).abs().max() > 0.01


@pytest.mark.parametrize("lora", [None, LoraOptions(4, dropout=0.5)])
def test_the_reference_runs_in_eval_mode_without_gradients_and_restores_the_policy(lora):
    policy = load_model("builtin:tiny", lora=lora).train()
    wanted = {name: p.requires_grad for name, p in policy.named_parameters()}
    with make_reference(policy).model() as net:
        assert not net.training
        assert not net(input_ids=IDS).logits.requires_grad
    assert policy.training
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == wanted


@pytest.mark.parametrize("lora", [None, LoraOptions(4)])
def test_the_reference_may_run_between_the_policys_forward_and_backward(lora):
    gradients = []
    for between in (False, True):
        policy = load_model("builtin:tiny", lora=lora)
        loss = policy(input_ids=IDS, labels=IDS).loss
        if between:
            with make_reference(policy).model() as net:
                net(input_ids=IDS)
        loss.backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_a_lora_reference_is_restored_after_an_error():
    policy = trained(LoraOptions(4))
    before = logits(policy)
    with pytest.raises(ZeroDivisionError), make_reference(policy).model():
        raise ZeroDivisionError
    assert torch.equal(logits(policy), before)


# ---- checkpoints


def test_merged_weights_give_the_adapters_logits(tmp_path):
    policy = trained(LoraOptions(4))
    save_pretrained(policy, build_tokenizer(), tmp_path, merged=True)
    loaded = load_model(str(tmp_path))
    assert not has_adapter(loaded)
    assert (logits(loaded) - logits(policy)).abs().max() < 1e-6 * logits(policy).abs().max()
    assert (logits(load_model("builtin:tiny")) - logits(policy)).abs().max() > 0.01


@pytest.mark.parametrize("merged", [False, True])
def test_saving_leaves_the_live_weights_bit_identical(tmp_path, merged: bool):
    policy = trained(LoraOptions(4))
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    save_pretrained(policy, build_tokenizer(), tmp_path, merged=merged)
    after = policy.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.named_parameters())


def test_merged_weights_have_the_plain_models_names():
    plain = load_model("builtin:tiny")
    assert merged_state_dict(trained(LoraOptions(4))).keys() == plain.state_dict().keys()
    assert merged_state_dict(plain).keys() == plain.state_dict().keys()


def test_one_merged_weight_by_hand():
    model = load_model("builtin:tiny", lora=LoraOptions(1, alpha=3, target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(0.5)  # (1, 64)
        layer.lora_B["default"].weight.fill_(0.2)  # (64, 1)
    # every entry of alpha / r · B·A is 3 · 0.2 · 0.5 = 0.3
    merged = merged_state_dict(model)["model.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(merged, layer.base_layer.weight + 0.3)


def test_an_adapter_folder_holds_the_adapter_alone_and_loads_as_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    policy = trained(LoraOptions(4))
    save_pretrained(policy, build_tokenizer(), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == count_parameters(policy)[1]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:tiny"
    assert load_config(str(tmp_path)).vocab_size == len(load_tokenizer(str(tmp_path))) == 21
    loaded = load_model(str(tmp_path))
    assert not has_adapter(loaded)
    assert (logits(loaded) - logits(policy)).abs().max() < 1e-6 * logits(policy).abs().max()
    assert all(parameter.requires_grad for parameter in loaded.parameters())  # to be trained as any other


def test_an_adapter_names_a_local_base_by_its_absolute_folder(tmp_path, monkeypatch):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_pretrained(load_model("builtin:tiny"), build_tokenizer(), base)
    monkeypatch.chdir(tmp_path)
    save_pretrained(load_model("base", lora=LoraOptions(2)), build_tokenizer(), adapter)
    monkeypatch.chdir("/")
    assert torch.equal(logits(load_model(str(adapter))), logits(load_model(str(base))))


def test_training_can_go_on_from_an_adapter_folder(tmp_path):
    policy = trained(LoraOptions(4))
    save_pretrained(policy, build_tokenizer(), tmp_path)
    again = load_model(str(tmp_path), lora=LoraOptions(2))
    assert has_adapter(again)
    assert (logits(again) - logits(policy)).abs().max() < 1e-6 * logits(policy).abs().max()
