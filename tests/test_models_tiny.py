from __future__ import annotations

import math

import pytest
import torch

from grpo_toolbox.models.load import count_parameters, load_config, load_model, load_tokenizer, save_pretrained
from grpo_toolbox.models.tiny import ALPHABET, build_tiny, build_tokenizer


def test_size_is_what_its_shape_says():
    # embedding and head 2·21·64; per layer q, o 2·64·64, k, v 2·64·32, mlp 3·64·128, two norms 2·64; last norm 64
    model, _ = build_tiny()
    assert count_parameters(model) == (2 * 21 * 64 + 2 * (2 * 4096 + 2 * 2048 + 3 * 8192 + 128) + 64,) * 2
    assert count_parameters(model)[0] == 76_736 <= 200_000


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(1)
    first, _ = build_tiny(seed=5)
    torch.manual_seed(2)
    again, _ = build_tiny(seed=5)
    other, _ = build_tiny(seed=6)
    weights = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    build_tiny()
    assert torch.equal(torch.get_rng_state(), before)


def test_first_policy_is_close_to_uniform():
    model, tokenizer = build_tiny()
    with torch.no_grad():
        logps = model(**tokenizer("3+4=", return_tensors="pt")).logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    assert entropy.min() > 0.95 * math.log(len(tokenizer))


def test_one_token_per_character_and_nothing_added():
    tokenizer = build_tokenizer()
    ids = tokenizer("3+4=7").input_ids
    # pad, eos and unknown come first, then 0123456789+-*=
    assert ids == [6, 13, 7, 16, 10]
    assert tokenizer.decode(ids) == "3+4=7"
    assert sorted(tokenizer(ALPHABET).input_ids) == list(range(3, 21))
    assert tokenizer.decode(tokenizer(ALPHABET).input_ids) == ALPHABET


def test_spaces_survive():
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer(" 3 +  4 = ").input_ids) == " 3 +  4 = "


def test_special_tokens_are_three_different_ones():
    tokenizer = build_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.bos_token is None


@pytest.mark.parametrize("character", ["?", "é", "\n", "A"])
def test_other_characters_are_the_unknown_token(character: str):
    assert build_tokenizer()(f"3{character}4").input_ids == [6, 2, 7]


def test_stop_and_padding_vanish_from_decoded_text():
    assert build_tokenizer().decode([10, 1, 0, 0], skip_special_tokens=True) == "7"


def test_configuration_is_the_models():
    model, tokenizer = build_tiny()
    assert load_config("builtin:tiny").to_dict() == model.config.to_dict()
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.num_attention_heads > model.config.num_key_value_heads  # grouped-query attention is exercised


def test_checkpoint_gives_identical_logits_and_tokens(tmp_path):
    model, tokenizer = build_tiny(seed=3)
    save_pretrained(model, tokenizer, tmp_path)
    loaded, reread = load_model(str(tmp_path)), load_tokenizer(str(tmp_path))
    assert reread("3 + 4=7?").input_ids == tokenizer("3 + 4=7?").input_ids
    assert (reread.pad_token_id, reread.eos_token_id) == (0, 1)
    ids = torch.tensor([[6, 13, 7, 16]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
