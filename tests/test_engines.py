"""The contract of engines: one body of tests, run over every engine that lives in this process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_toolbox.data import decode_completion, encode_prompts
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from grpo_toolbox.types import Prompt, Rollout, Sampling
from small_models import (
    STOP,
    build,
    chain,
    forced_log_probs,
    forced_logps,
    make_prompts,
    shared,
)

ENGINES: dict[str, Callable[..., Engine]] = {"local": LocalEngine, "hf": HfEngine}
TOLERANCE = 1e-4
SOME_STOPS = tuple(range(1, 20))
"""Many stop tokens, so that completions of a random model end early and at different places."""


def show(ids: Sequence[int], finish_reason: str) -> str:
    return f"{finish_reason}: " + " ".join(map(str, ids))


@pytest.fixture(params=ENGINES)
def make(request) -> Callable[..., Engine]:
    def build_engine(model: Any, stop_ids: Sequence[int] = (STOP,), decode: Any = show) -> Engine:
        return ENGINES[request.param](model, decode=decode, stop_ids=stop_ids)

    return build_engine


def drawn(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [one.ids for one in rollouts]


def assert_teacher_forced(model: Any, rollouts: Sequence[Rollout], temperature: float = 1.0) -> None:
    for one in rollouts:
        expected = forced_logps(model, one.prompt.ids, one.ids, temperature)
        torch.testing.assert_close(torch.tensor(one.logps), expected, atol=TOLERANCE, rtol=0)


# ---- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12),
        Sampling(12, temperature=0.7),
        Sampling(12, temperature=1.5, seed=4),
        Sampling(12, temperature=0.7, top_p=0.9),
        Sampling(12, temperature=1.3, top_k=5),
        Sampling(12, temperature=1.2, min_p=0.1),
        Sampling(12, temperature=0.8, top_k=20, top_p=0.8, min_p=0.02, min_new_tokens=4),
    ],
    ids=["plain", "cool", "hot", "top_p", "top_k", "min_p", "all"],
)
def test_log_probs_are_those_of_a_plain_forward(make, sampling):
    """softmax(logits / T) over the whole vocabulary, whatever the draw was restricted to (case e05.2: ratio 1)."""
    model = shared("llama")
    rollouts = make(model, SOME_STOPS).generate(make_prompts(60, 1, 5), 4, sampling)
    assert len({len(one.ids) for one in rollouts}) > 1
    assert_teacher_forced(model, rollouts, sampling.temperature)


def test_draws_stay_inside_top_k_top_p_and_min_p(make):
    model = shared("llama")

    def places(sampling: Sampling) -> list[tuple[torch.Tensor, int]]:
        rollouts = make(model).generate(make_prompts(3, 9), 8, sampling)
        steps = [(forced_log_probs(model, one.prompt.ids, one.ids, 1.5).exp(), one.ids) for one in rollouts]
        return [(probs[place], token) for probs, ids in steps for place, token in enumerate(ids)]

    hot = Sampling(8, temperature=1.5)
    assert max(int((probs > probs[token]).sum()) for probs, token in places(replace(hot, top_k=3))) == 2
    before = [float(probs[probs > probs[token]].sum()) for probs, token in places(replace(hot, top_p=0.5))]
    assert 0.3 < max(before) < 0.5
    share = [float(probs[token] / probs.max()) for probs, token in places(replace(hot, min_p=0.3))]
    assert 0.3 <= min(share) < 0.5


def test_temperature_zero_is_greedy_decoding(make):
    """Case e05.3. Its log-probs are reported at temperature 1, so nothing is divided by zero."""
    model = shared("llama")
    prompts = make_prompts(60, 1, 5)
    rollouts = make(model).generate(prompts, 2, Sampling(20, temperature=0))
    for row, one in enumerate(rollouts):
        ids = torch.tensor([prompts[row // 2].ids])
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=STOP
        )
        assert one.ids == tuple(plain[0, ids.shape[1] :].tolist())
    assert_teacher_forced(model, rollouts)


# ---- where completions end -------------------------------------------------------------------------------------------


def test_a_completion_keeps_its_stop_token(make):
    """7 8 2 with 2 the end: three ids, three log-probs, each of a certain token (≥ 80 nats above the rest)."""
    engine = make(chain({6: 7, 7: 8, 8: 2}), stop_ids=(2,))
    (one,) = engine.generate([Prompt(0, "", (5, 6))], 1, Sampling(10))
    assert (one.ids, one.finish_reason, one.text) == ((7, 8, 2), "stop", "stop: 7 8 2")
    assert one.logps == pytest.approx([0, 0, 0], abs=1e-6)


def test_a_stop_token_exactly_at_the_limit_is_a_stop(make):
    """Case e04.3."""
    engine = make(chain({6: 7, 7: 8, 8: 2}), stop_ids=(2,))
    (one,) = engine.generate([Prompt(0, "", (6,))], 1, Sampling(3))
    assert (one.ids, one.finish_reason) == ((7, 8, 2), "stop")


def test_the_limit_without_a_stop_token_is_length(make):
    """Case f02.3."""
    engine = make(chain({6: 7, 7: 8, 8: 9, 9: 2}), stop_ids=(2,))
    (one,) = engine.generate([Prompt(0, "", (6,))], 1, Sampling(3))
    assert (one.ids, one.finish_reason, len(one.logps)) == ((7, 8, 9), "length", 3)


def test_any_of_several_stop_tokens_ends_a_completion(make):
    rollouts = make(shared("llama"), SOME_STOPS).generate(make_prompts(4, 9), 16, Sampling(12, temperature=2.0))
    ends = {one.ids[-1] for one in rollouts if one.finish_reason == "stop"}
    assert len(ends) > 2
    for one in rollouts:
        assert (one.ids[-1] in SOME_STOPS) == (one.finish_reason == "stop")
        assert not set(one.ids[:-1]) & set(SOME_STOPS)
        assert one.finish_reason == "stop" or len(one.ids) == 12


def test_without_stop_tokens_every_completion_is_of_full_length(make):
    rollouts = make(shared("llama"), stop_ids=()).generate(make_prompts(4), 3, Sampling(9))
    assert [(len(one.ids), one.finish_reason) for one in rollouts] == [(9, "length")] * 3


def test_no_stop_token_before_min_new_tokens(make):
    sampling = Sampling(8, min_new_tokens=4, temperature=2.0)
    rollouts = make(shared("llama"), SOME_STOPS).generate(make_prompts(4, 9), 16, sampling)
    lengths = [len(one.ids) for one in rollouts]
    assert min(lengths) == 5  # four other tokens, and the first place where a stop token may stand
    assert not any(set(one.ids[:4]) & set(SOME_STOPS) for one in rollouts)


def test_as_many_tokens_at_least_as_at_most(make):
    sampling = Sampling(4, min_new_tokens=4, temperature=2.0)
    rollouts = make(shared("llama"), SOME_STOPS).generate(make_prompts(4), 16, sampling)
    assert {(len(one.ids), one.finish_reason) for one in rollouts} == {(4, "length")}


def test_one_new_token(make):
    model = shared("llama")
    rollouts = make(model, SOME_STOPS).generate(make_prompts(4, 1), 16, Sampling(1))
    assert {len(one.ids) for one in rollouts} == {1}
    assert {one.finish_reason for one in rollouts} == {"stop", "length"}
    assert_teacher_forced(model, rollouts)


# ---- groups, order, seeds --------------------------------------------------------------------------------------------


def test_a_hundred_prompts_come_back_in_order(make):
    model = shared("llama")
    prompts = make_prompts(*(1 + place % 13 for place in range(100)))
    rollouts = make(model, SOME_STOPS).generate(prompts, 2, Sampling(5))
    assert [one.prompt.id for one in rollouts] == [place for place in range(100) for _ in range(2)]
    assert all(one.prompt is prompts[row // 2] for row, one in enumerate(rollouts))
    assert_teacher_forced(model, rollouts[::7])


def test_completions_of_a_group_differ(make):
    rollouts = make(shared("llama"), stop_ids=()).generate(make_prompts(4), 12, Sampling(12, temperature=1.5))
    assert len(set(drawn(rollouts))) == 12


def test_a_seed_repeats_and_another_one_differs(make):
    engine = make(shared("llama"))
    first, again, other = (
        engine.generate(make_prompts(4, 9), 3, Sampling(12, temperature=1.5, seed=seed)) for seed in (5, 5, 6)
    )
    assert first == again
    assert not set(drawn(first)) & set(drawn(other))


# ---- the model is left as it was -------------------------------------------------------------------------------------


def test_dropout_is_off_while_sampling_and_modes_come_back(make):
    model = build("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5).train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    rollouts = make(model).generate(make_prompts(9), 4, Sampling(8))
    assert [module.training for module in model.modules()] == before
    assert_teacher_forced(model.eval(), rollouts)


def test_modes_and_attention_come_back_after_an_error(make):
    model = build("llama").train()
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    former = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError):
        make(model).generate(make_prompts(3), 1, Sampling(2))
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == former


def test_global_random_states_are_not_touched(make):
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    make(shared("llama")).generate(make_prompts(4), 3, Sampling(6))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state
    assert random.getstate() == python_state


def test_parameters_and_gradients_are_not_touched(make):
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    make(model).generate(make_prompts(4), 3, Sampling(6))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name][0])
        assert value.requires_grad == before[name][1]
        assert (value.grad == 0.5).all() if value.requires_grad else value.grad is None
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()  # and the model still trains


def test_generation_defaults_of_a_checkpoint_change_nothing(make):
    """Qwen2.5's say repetition_penalty=1.1, top_k=20: log-probs of the policy would not be those of the samples."""
    model = build("llama")
    plain = make(model).generate(make_prompts(4), 8, Sampling(12, temperature=1.5))
    model.generation_config.update(repetition_penalty=5.0, top_k=1, min_p=0.9, suppress_tokens=[3, 4, 5])
    defaults = copy.deepcopy(model.generation_config)
    assert make(model).generate(make_prompts(4), 8, Sampling(12, temperature=1.5)) == plain
    assert model.generation_config == defaults


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_changed_in_place_are_used_at_once(make):
    model = build("llama")
    engine = make(model)
    before = engine.generate(make_prompts(9), 4, Sampling(8))
    with torch.no_grad():
        model.lm_head.weight.add_(0.3 * torch.randn(model.lm_head.weight.shape, generator=torch.manual_seed(1)))
    after = engine.generate(make_prompts(9), 4, Sampling(8))
    assert drawn(after) != drawn(before)
    assert_teacher_forced(model, after)


def test_sync_counts_the_weights_versions_that_rollouts_carry(make):
    engine = make(shared("llama"))
    versions = [engine.generate(make_prompts(2), 1, Sampling(1))[0].weights_version]
    for _ in range(2):
        version = engine.sync()
        versions.append(engine.generate(make_prompts(2), 1, Sampling(1))[0].weights_version)
        assert versions[-1] == version
    assert versions == [0, 1, 2]
    assert engine.sync(7) == engine.generate(make_prompts(2), 1, Sampling(1))[0].weights_version == 7
    engine.close()


@pytest.mark.parametrize("training", [True, False])
def test_a_lora_policy_is_sampled_with_its_adapter_and_without_its_dropout(make, training):
    model = add_adapter(build("llama"), LoraOptions(r=4, dropout=0.5))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=torch.manual_seed(2)))
    rollouts = make(model.train(training)).generate(make_prompts(9, 2), 4, Sampling(8, temperature=0.8))
    assert {module.training for module in model.modules()} == {training}
    model.eval()
    assert_teacher_forced(model, rollouts, 0.8)
    with model.disable_adapter():
        base = forced_logps(model, rollouts[0].prompt.ids, rollouts[0].ids, 0.8)
    assert (torch.tensor(rollouts[0].logps) - base).abs().max() > 0.1


# ---- text ------------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(["<end>", *alphabet])}, merges=[])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>", pad_token="<end>")


@pytest.mark.parametrize("text", ["Wie groß ist π?", "二 + 三 = ", "🤖🤖", "नमस्ते\u200d\n\t"])
def test_text_of_any_script_goes_in_and_comes_out(make, text):
    tokenizer = byte_tokenizer()
    prompts = encode_prompts([{"prompt": text}], tokenizer)
    assert tokenizer.decode(prompts[0].ids) == text
    letters = tuple(tokenizer("ü", add_special_tokens=False)["input_ids"])  # two bytes, two tokens
    following = {prompts[0].ids[-1]: letters[0], letters[0]: letters[1], letters[1]: 0}
    engine = make(
        chain(following, vocabulary=260),
        stop_ids=(0,),
        decode=lambda ids, finish_reason: decode_completion(ids, tokenizer, finish_reason),
    )
    (one,) = engine.generate(prompts, 1, Sampling(5))
    assert (one.ids, one.text, one.prompt.text) == ((*letters, 0), "ü", text)
