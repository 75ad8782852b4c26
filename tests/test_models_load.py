from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BloomConfig, GenerationConfig, GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from grpo_toolbox.batch import collate
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import (
    LoraOptions,
    count_parameters,
    load_config,
    load_model,
    load_tokenizer,
    max_positions,
    save_pretrained,
    stop_token_ids,
)
from grpo_toolbox.models.paths import cache_folder, resolve_model_path
from grpo_toolbox.models.tiny import build_tiny, build_tokenizer
from grpo_toolbox.types import Prompt, Rollout

IDS = torch.tensor([[6, 13, 7, 16]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bfloat16 checkpoint of the tiny policy."""
    place = tmp_path_factory.mktemp("checkpoint")
    model, tokenizer = build_tiny(seed=4)
    save_pretrained(model.to(torch.bfloat16), tokenizer, place)
    return place


def word_tokenizer(**special: str) -> FastTokenizer:
    vocabulary = {token: index for index, token in enumerate(["<end>", "a", "b"])}
    return FastTokenizer(tokenizer_object=Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="a")), **special)


# ---- paths


def test_a_path_is_resolved_without_torch():
    code = (
        "import sys; from grpo_toolbox.models.load import resolve_model_path, LoraOptions;"
        "resolve_model_path('builtin:tiny'); LoraOptions(8);"
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_hub_names_pass_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert resolve_model_path("gpt2") == "gpt2"


def test_a_folder_becomes_absolute(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert resolve_model_path(folder.name) == str(folder)
    assert resolve_model_path(f"./{folder.name}/") == str(folder)


def test_unknown_builtin_names_the_nearest():
    with pytest.raises(ConfigError, match=r"builtin:smollm2, builtin:tiny\. Did you mean builtin:tiny\?"):
        resolve_model_path("builtin:tinny")


def test_smollm2_not_fetched_says_which_command_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_TOOLBOX_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="run `make smollm` or `toolbox models get smollm2` once"):
        resolve_model_path("builtin:smollm2")


def test_smollm2_fetched_is_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_TOOLBOX_CACHE", str(tmp_path))
    place = tmp_path / "models" / "smollm2-135m-instruct"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    assert resolve_model_path("builtin:smollm2") == str(place)


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_TOOLBOX_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "grpo-toolbox"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "grpo-toolbox"
    monkeypatch.setenv("GRPO_TOOLBOX_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no model: neither config\.json nor adapter_config\.json"):
        resolve_model_path(str(tmp_path))


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "runs/a/checkpoints", "~no_such_user/x", ""])
def test_what_can_be_no_hub_name_is_refused(path: str):
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        resolve_model_path(path)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        resolve_model_path(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
def test_unreachable_hub_says_how_to_pass_a_folder(load, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing .* pass a folder .*: model\.path=/path/to/folder"):
        load("nobody/nothing")


def test_a_folder_without_weights_is_refused(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*model\.safetensors"):
        load_model(str(tmp_path))


# ---- tokenizers


def test_a_missing_pad_token_is_the_end_token(tmp_path):
    word_tokenizer(eos_token="<end>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


def test_a_pad_token_stays_what_it_is(folder):
    assert load_tokenizer(str(folder)).pad_token_id == 0 != load_tokenizer(str(folder)).eos_token_id


def test_a_tokenizer_with_no_end_is_refused(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="neither a pad token nor an end token"):
        load_tokenizer(str(tmp_path))


# ---- weights


def test_builtin_tiny_is_one_fixed_model():
    expected = build_tiny()[0].state_dict()
    for seed in (0, 7):
        weights = load_model("builtin:tiny", seed=seed).state_dict()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_on_the_cpu_auto_is_float32_whatever_the_checkpoint_is(folder):
    for lora in (None, LoraOptions(2)):
        assert {p.dtype for p in load_model(str(folder), lora=lora).parameters()} == {torch.float32}
    assert {p.dtype for p in load_model(str(folder), dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_model("builtin:tiny", dtype="float16").parameters()} == {torch.float16}


def test_on_an_accelerator_auto_keeps_the_type_of_a_frozen_base_only(folder):
    # The meta device stands for an accelerator: no test of this suite needs one.
    assert {p.dtype for p in load_model(str(folder), device="meta").parameters()} == {torch.float32}
    for name, p in load_model(str(folder), device="meta", lora=LoraOptions(2)).named_parameters():
        assert p.device.type == "meta"
        assert p.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)


def test_unknown_dtype_names_the_options():
    with pytest.raises(ConfigError, match=r"model\.dtype='bf16' is not an option: auto, bfloat16, float16, float32"):
        load_model("builtin:tiny", dtype="bf16")


def test_loading_leaves_the_random_state_alone(folder):
    before = torch.get_rng_state()
    load_model(str(folder), lora=LoraOptions(2))
    load_model("builtin:tiny", lora=LoraOptions(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_models_are_loaded_for_evaluation(folder):
    for model in (load_model(str(folder)), load_model("builtin:tiny", lora=LoraOptions(2, dropout=0.5))):
        assert not any(part.training for part in model.modules())


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_implementation_is_passed_on(folder, name: str):
    for path in (str(folder), "builtin:tiny"):
        assert load_model(path, attn_implementation=name).config._attn_implementation == name


@pytest.mark.parametrize("lora", [None, LoraOptions(2)])
def test_gradient_checkpointing_changes_no_gradient(lora):
    gradients = []
    for checkpointing in (False, True):
        model = load_model("builtin:tiny", lora=lora, gradient_checkpointing=checkpointing).train()
        assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules()) is checkpointing
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert gradients[0]
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


@pytest.mark.parametrize("lora", [None, LoraOptions(2)])
def test_gradient_checkpointing_changes_no_gradient_of_the_packed_forward(lora):
    """Its backward pass computes the layers again when the packed attention's block is over."""
    prompt = Prompt(id=0, text="", ids=(3, 4, 5))
    rows = [Rollout(prompt, ids, (0.0,) * len(ids), "stop", "") for ids in ((6, 7, 8), (9, 1))]
    batch = collate(rows, torch.ones(1, 2))
    gradients = []
    for checkpointing in (False, True):
        model = load_model("builtin:tiny", lora=lora, gradient_checkpointing=checkpointing).train()
        completion_logps(model, batch, temperature=1.0, packed=True)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad and p.grad is not None])
    assert gradients[0]
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


# ---- facts about models


def test_positions_come_from_the_configuration():
    assert max_positions(load_config("builtin:tiny")) == 128
    assert max_positions(GPT2Config(n_positions=77)) == 77
    assert max_positions(BloomConfig()) is None  # ALiBi: no table of positions to run out of


def test_stop_tokens_are_the_union():
    tokenizer = build_tokenizer()  # its end token is 1
    assert stop_token_ids(GenerationConfig(eos_token_id=[9, 4]), tokenizer) == (1, 4, 9)
    assert stop_token_ids(GenerationConfig(eos_token_id=[4, 1]), tokenizer) == (1, 4)
    assert stop_token_ids(GenerationConfig(eos_token_id=0), tokenizer) == (0, 1)
    assert stop_token_ids(GenerationConfig(), tokenizer) == (1,)
    assert stop_token_ids(GenerationConfig(), word_tokenizer()) == ()


def test_stop_tokens_of_a_model_are_its_generation_configs():
    model, tokenizer = build_tiny()
    model.generation_config.eos_token_id = [1, 16]
    assert stop_token_ids(model, tokenizer) == (1, 16)


def test_a_tied_head_counts_once():
    shape = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 0}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    tied = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
    untied = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=False))
    # 10·4 embedding, 4 norm; the untied head is 40 more
    assert count_parameters(tied) == (44, 44)
    assert count_parameters(untied) == (84, 84)
    untied.get_input_embeddings().requires_grad_(False)
    assert count_parameters(untied) == (84, 44)


def test_a_checkpoint_s_own_dropout_is_off_in_training(tmp_path: Path) -> None:
    # GPT-2's configuration says 0.1 everywhere; trained with it, the policy would not be the one that was sampled
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path)).train()
    ids = torch.arange(12).unsqueeze(0)
    first, second = model(input_ids=ids).logits, model(input_ids=ids).logits
    assert torch.equal(first, second)
    assert torch.equal(first, model.eval()(input_ids=ids).logits)
