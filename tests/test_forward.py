"""The packed forward by hand, and on every kind of decoder: equal to the plain one, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.cli.main import main
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models import forward
from grpo_toolbox.models.attention import PackedLayout, packed_layout
from grpo_toolbox.models.forward import _predictors, completion_logps, spread
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from grpo_toolbox.models.packing import packing_refusal
from grpo_toolbox.models.tiny import build_tokenizer
from grpo_toolbox.types import Prompt, Rollout, Sampling
from small_models import (
    STOP,
    VOCABULARY,
    build,
    chain,
    forced_log_probs,
    forced_logps,
    make_prompts,
    shared,
    text_ids,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["dense rows", "views"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are short here: both forms of the packed layout are to say the same of them."""
    if request.param == "views":
        monkeypatch.setattr(forward, "_SHORT_GROUP", 0)


LONGEST = 120
"""Prompt and completion of the long rows below: beyond the windows of 16, within those of 256."""


def batch_of(*groups: tuple[tuple[int, ...], list[tuple[int, ...]]]) -> Batch:
    prompts = [Prompt(number, "", ids) for number, (ids, _) in enumerate(groups)]
    rows = [(prompt, ids) for prompt, (_, rows) in zip(prompts, groups, strict=True) for ids in rows]
    rollouts = [Rollout(prompt, ids, (-1.0,) * len(ids), "stop", "") for prompt, ids in rows]
    return collate(rollouts, torch.ones(len(groups), len(groups[0][1])))


# ---- two groups by hand ----------------------------------------------------------------------------------------------
#
# prompts a a a and b, completions c c, d, e e e (of a, a, b; without their last token, which predicts nothing):
#     place   0 1 2 | 3 | 4 5 | 6 | 7 8 9
#     token   a a a | b | c c | d | e e e

LENGTHS = ([3, 1], [2, 1, 3], [0, 0, 1])
OWNERS = ["a", "a", "a", "b", "c", "c", "d", "e", "e", "e"]
PROMPT_OF = {"c": "a", "d": "a", "e": "b"}


def who_sees_whom(layout: PackedLayout, count: int) -> Tensor:
    """(N, N) shares of attention: equal scores everywhere, and values that are one-hot in the place."""
    values = torch.eye(count)[None, None]
    blank = torch.zeros(1, 1, count, count)
    return layout.attend(0, blank, blank, values, scaling=1.0)[0, :, 0]


def test_a_token_sees_its_prompt_and_its_own_past():
    shares = who_sees_whom(packed_layout(*LENGTHS, CPU), 10)
    expected = torch.zeros(10, 10)
    for row, owner in enumerate(OWNERS):
        for column in range(row + 1):
            expected[row, column] = OWNERS[column] in (owner, PROMPT_OF.get(owner))
    assert ((shares > 0) == expected.bool()).all()
    torch.testing.assert_close(shares, expected / expected.sum(1, keepdim=True))
    assert expected[6].tolist() == [1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert expected[8].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1, 0]


def test_completions_of_one_token_have_nothing_to_forward():
    """Their only token is predicted by the prompt: the sequence is the prompts alone."""
    shares = who_sees_whom(packed_layout([2, 1], [0, 0], [0, 1], CPU), 3)
    torch.testing.assert_close(shares, torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0, 0, 1.0]]))


def test_heads_of_values_may_differ_in_size_from_those_of_keys():
    layout = packed_layout(*LENGTHS, CPU)
    query, key = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    assert layout.attend(0, query, key, torch.randn(1, 2, 10, 5), 1.0).shape == (1, 10, 4, 5)


GROUPS = batch_of(((20, 21, 22), [(30, 31, 32), (40, 41)]), ((50,), [(60, 61, 62, 63), (64,)]))
"""Packed: 20 21 22 50 | 30 31 | 40 | 60 61 62 | (nothing of 64)."""


def test_each_completion_token_is_predicted_by_the_one_before_it():
    """30 and 40 by place 2 (22), 31 by 4 (30), 32 by 5; 41 by 6 (40); 60 and 64 by 3 (50); 61, 62, 63 by 7, 8, 9."""
    assert _predictors(GROUPS, [3, 1], [2, 1, 3, 0]).tolist() == [2, 4, 5, 2, 6, 3, 7, 8, 9, 3]


def test_values_of_all_tokens_are_spread_row_after_row():
    assert spread(torch.arange(1.0, 11), GROUPS).tolist() == [
        [1, 2, 3, 0],
        [4, 5, 0, 0],
        [6, 7, 8, 9],
        [10, 0, 0, 0],
    ]


def test_positions_of_completions_go_on_from_their_prompt():
    seen: dict[str, Tensor] = {}
    model = build("llama")
    model.model.register_forward_pre_hook(lambda _, __, options: seen.update(options), with_kwargs=True)
    completion_logps(model, GROUPS, temperature=1.0, packed=True)
    assert seen["input_ids"].tolist() == [[20, 21, 22, 50, 30, 31, 40, 60, 61, 62]]
    assert seen["position_ids"].tolist() == [[0, 1, 2, 0, 3, 4, 3, 1, 2, 3]]


@pytest.mark.parametrize("packed", [True, False])
def test_logits_of_place_t_score_the_token_of_place_t_plus_1(packed):
    """Case e06.1: ids 1 2 | 0 1 with logits (3, 0, 0) after 2 and (0, 3, 0) after 0: log(e³/(e³ + 2)) = −0.0949 twice.

    The head of `chain` makes them: its stream has length √4 = 2, and a fourth token is out of reach.
    """
    model = chain({}, vocabulary=4)
    with torch.no_grad():
        model.lm_head.weight[0, 2] = model.lm_head.weight[1, 0] = 1.5
        model.lm_head.weight[3] = -40.0
        logps, entropy = completion_logps(model, batch_of(((1, 2), [(0, 1)])), temperature=1.0, packed=packed)
    torch.testing.assert_close(logps, torch.full((1, 2), -0.0949), atol=1e-4, rtol=0)
    likely, rare = 0.9094, 0.0453  # e³/(e³ + 2) and 1/(e³ + 2): entropy 0.0949·0.9094 + 2·3.0949·0.0453
    torch.testing.assert_close(entropy, torch.full((1, 2), 0.0949 * likely + 2 * 3.0949 * rare), atol=1e-3, rtol=0)


# ---- every kind of decoder -------------------------------------------------------------------------------------------

PACKED = (
    "llama",
    "llama, one head each",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral, window 256",
    "phi3",
    "gemma",
    "gemma3, window 256",
    "gpt2",
    "olmo2",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "diffllama",
)
REFUSED = {
    "mistral, window 16": "changes past 16 tokens, and prompt and completion may reach 120",
    "gemma3, window 16": "changes past 16 tokens",
    "gemma2, window 256": "caps its logits",
    "gpt_oss": "attention with s_aux",
    "phi": "an output head that is more than one matrix",
    "granite": "log-probs differ by",
    "cohere": "log-probs differ by",
    "doge": "attention with a mask that the model makes",
    "bloom": "its attention cannot be replaced",
    "mamba": "its attention cannot be replaced",
    "lfm2": "layers of kind conv",
}
LONG = batch_of(
    (text_ids(90), [text_ids(30, 1), text_ids(2, 2), text_ids(9, 3)]),
    (text_ids(3, 4), [text_ids(30, 5), (STOP,), text_ids(17, 6)]),
)


def assert_plain(logps: Tensor, entropy: Tensor, model: torch.nn.Module, batch: Batch, temperature: float) -> None:
    for row, ids in enumerate(batch.completions):
        log_probs = forced_log_probs(model, batch.prompts[batch.group[row]], ids, temperature)
        expected = log_probs.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logps[row, : len(ids)], expected, atol=1e-4, rtol=0)
        expected = -(log_probs.exp() * log_probs).sum(1)
        torch.testing.assert_close(entropy[row, : len(ids)], expected, atol=1e-4, rtol=0)
        assert not logps[row, len(ids) :].any()


@pytest.mark.parametrize("name", PACKED)
def test_packed_and_padded_are_the_plain_forward(name):
    model = shared(name)
    assert packing_refusal(model, VOCABULARY, LONGEST, CPU) is None
    with torch.no_grad():
        for packed in (True, False):
            assert_plain(*completion_logps(model, LONG, temperature=0.8, packed=packed), model, LONG, 0.8)


@pytest.mark.parametrize("name", PACKED)
def test_the_local_engine_serves_what_takes_the_packed_layout(name):
    model = shared(name)
    engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(STOP,))
    for one in engine.generate(make_prompts(90, 3), 3, Sampling(30, temperature=0.8)):
        expected = forced_logps(model, one.prompt.ids, one.ids, 0.8)
        assert one.logps == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_padded_and_sampled_by_plain_generate(name):
    model = shared(name)
    assert REFUSED[name] in str(packing_refusal(model, VOCABULARY, LONGEST, CPU))
    with torch.no_grad():
        assert_plain(*completion_logps(model, LONG, temperature=0.8, packed=False), model, LONG, 0.8)
    engine = HfEngine(model, decode=lambda ids, _: "", stop_ids=(STOP,))
    for one in engine.generate(make_prompts(90, 3), 3, Sampling(30, temperature=0.8)):
        expected = forced_logps(model, one.prompt.ids, one.ids, 0.8)
        assert one.logps == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen2_moe", "deepseek_v3"])
def test_gradients_of_packed_and_padded_are_equal(name):
    model, gradients = build(name), []
    weights = torch.randn(LONG.mask.shape, generator=torch.manual_seed(3))
    for packed in (True, False):
        model.zero_grad()
        logps, entropy = completion_logps(model, LONG, temperature=0.8, packed=packed)
        ((logps + 0.1 * entropy) * weights).sum().backward()
        gradients.append(torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert gradients[1].norm() > 1
    assert difference < 1e-4


# ---- where the layout ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral, window 256", "gemma3, window 256"])
def test_a_window_is_no_matter_while_every_row_fits_into_it(name):
    """A probe of 40 tokens sees no window of 256; the configuration does."""
    assert packing_refusal(shared(name), VOCABULARY, 256, CPU) is None
    assert "changes past 256 tokens" in str(packing_refusal(shared(name), VOCABULARY, 257, CPU))


def test_a_window_that_only_some_layers_have_counts_and_one_that_none_has_does_not():
    some = build("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert some.config.layer_types == ["full_attention", "sliding_attention"]
    assert "64 tokens" in str(packing_refusal(some, VOCABULARY, 65, CPU))
    none = build("qwen2", use_sliding_window=False, sliding_window=64)
    assert packing_refusal(none, VOCABULARY, 10_000, CPU) is None
    full = build("gemma3, window 16", layer_types=["full_attention", "full_attention"])
    assert packing_refusal(full, VOCABULARY, 10_000, CPU) is None


def test_longrope_is_refused_where_it_changes_its_frequencies():
    model = shared("phi3, longrope past 64")
    assert packing_refusal(model, VOCABULARY, 64, CPU) is None
    assert "changes past 64 tokens" in str(packing_refusal(model, VOCABULARY, 65, CPU))


def test_rows_beyond_the_window_are_an_error_and_not_another_function():
    model = shared("mistral, window 16")
    short = batch_of((text_ids(9), [text_ids(7, 1), text_ids(4, 2)]))
    with torch.no_grad():
        assert_plain(*completion_logps(model, short, temperature=1.0, packed=True), model, short, 1.0)
        with pytest.raises(NotImplementedError, match=r"rows of up to \d+ tokens and a window of 16"):
            completion_logps(model, LONG, temperature=1.0, packed=True)
    engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(STOP,))
    assert len(engine.generate(make_prompts(9), 2, Sampling(7))) == 2
    with pytest.raises(NotImplementedError, match="rows of up to 17 tokens and a window of 16"):
        engine.generate(make_prompts(9), 2, Sampling(8))


def test_attention_by_another_formula_is_an_error():
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention with softcap"):
        completion_logps(shared("gemma2, window 256"), GROUPS, temperature=1.0, packed=True)


def test_an_adapter_on_the_head_is_refused_while_it_is_still_zero():
    """The packed forward multiplies by the head's matrix alone: what the adapter learns would be left out."""
    model = add_adapter(build("llama"), LoraOptions(r=2, target_modules=["lm_head"]))
    assert "more than one matrix" in str(packing_refusal(model, VOCABULARY, LONGEST, CPU))
    inside = add_adapter(build("llama"), LoraOptions(r=2))
    assert packing_refusal(inside, VOCABULARY, LONGEST, CPU) is None


def test_half_precision_is_rounding_and_not_another_function():
    assert packing_refusal(build("llama").bfloat16(), VOCABULARY, LONGEST, CPU) is None
    assert "log-probs differ" in str(packing_refusal(build("granite").bfloat16(), VOCABULARY, LONGEST, CPU))


def test_broken_weights_are_refused():
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    assert packing_refusal(model, VOCABULARY, LONGEST, CPU) == "log-probs differ by nan"


# ---- what a run makes of it ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> str:
    """A checkpoint whose window of 4 tokens is shorter than the prompt and completion of an addition."""
    folder = tmp_path_factory.mktemp("windowed")
    tokenizer = build_tokenizer()
    build("mistral, window 16", vocab_size=len(tokenizer), sliding_window=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_run_pads_a_model_with_a_window_says_so_and_samples_what_it_trains(windowed, tmp_path, caplog):
    """Log-probs of engine and trainer agree at T = 0.7 and top-p = 0.9, too, and the cut is said (case e05.2)."""
    arguments = [f"run_dir={tmp_path}/run", f"model.path={windowed}", "trainer.max_steps=1", "trainer.eval_every=0"]
    assert main(["train", *arguments, "callbacks=none", "rollout.temperature=0.7", "rollout.top_p=0.9"]) == 0
    said = [record.getMessage() for record in caplog.records]
    assert sum("does not take the packed layout (its attention changes past 4 tokens" in line for line in said) == 1
    assert sum("rollout.top_p=0.9: tokens are drawn from a part of the vocabulary" in line for line in said) == 1
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["sampler/logp_gap_max"] < 1e-4


def test_a_run_that_cuts_nothing_and_packs_says_nothing(tmp_path, caplog):
    assert (
        main(["train", f"run_dir={tmp_path}/run", "trainer.max_steps=1", "trainer.eval_every=0", "callbacks=none"]) == 0
    )
    assert not caplog.records


def test_a_packing_is_made_once_for_two_passes_and_large_ones_are_not_held(monkeypatch):
    """Masks grow with the square of the lengths: of those no more than the one of the pass at hand may stand."""
    model, made = shared("llama"), []
    make = forward._layout
    monkeypatch.setattr(forward, "_layout", lambda *lengths: made.append(lengths) or make(*lengths))
    batch = batch_of(((1, 2), [(3, 4), (5,)]))
    first, _ = completion_logps(model, batch, temperature=1.0, packed=True)
    again, _ = completion_logps(model, batch, temperature=1.0, packed=True)
    assert len(made) == 1
    monkeypatch.setattr(forward, "_WORTH_KEEPING", 0)
    large = batch_of(((1, 2), [(3, 4), (5,)]))
    for number in (2, 3):
        logps, _ = completion_logps(model, large, temperature=1.0, packed=True)
        assert len(made) == number
        assert torch.equal(logps, first)
    assert torch.equal(again, first)
