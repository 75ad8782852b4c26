"""reward_model against small random checkpoints: every score equals what the model gives to that text alone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import build_reward
from reward_checkpoints import TEMPLATE, checkpoint, logits_alone, templated, tokenizer_of

PROMPTS = ["1+1=", "what is 2+2?", "7", "name a town with a long name."]
COMPLETIONS = ["2", "four, or so it seems", "seven", "a"]


def scored_alone(path: str, texts: list[str]) -> list[float]:
    return [logits_alone(path, text).item() for text in texts]


def all_templated() -> list[str]:
    return [templated(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]


# pad=0 is a token of its own; pad=1 is also the stop token, with which every text ends; None is not declared at all
@pytest.mark.parametrize("pad", [0, 1, None])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_does_not_change_a_score(tmp_path: Path, pad: int | None, batch_size: int) -> None:
    path = checkpoint(tmp_path, pad)
    expected = scored_alone(path, all_templated())
    reward = build_reward("reward_model", path=path, batch_size=batch_size, device="cpu")
    assert len(set(expected)) == 4  # otherwise equality would say nothing
    assert reward(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(expected, abs=1e-5)


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    reward = build_reward("reward_model", path=checkpoint(tmp_path, pad=None), batch_size=2, device="cpu")
    alone = reward(prompts=PROMPTS, completions=COMPLETIONS)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(reward(prompts=PROMPTS, completions=COMPLETIONS)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4


def test_conversations_and_texts_of_the_same_content_score_the_same(tmp_path: Path) -> None:
    reward = build_reward("reward_model", path=checkpoint(tmp_path), device="cpu")
    said = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    assert reward(prompts=asked, completions=said) == reward(prompts=PROMPTS, completions=COMPLETIONS)


def test_without_chat_template_the_completion_follows_the_prompt(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, template=None)
    expected = scored_alone(path, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    reward = build_reward("reward_model", path=path, device="cpu")
    assert reward(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RewardError, match=r"the tokenizer of reward\.path=.* has no chat template"):
        reward(prompts=[[{"role": "user", "content": "a"}]], completions=[[{"role": "assistant", "content": "b"}]])


def test_the_policy_cannot_write_another_turn(tmp_path: Path) -> None:
    """A control token of the reward model's own format, spelt out by the policy, is read as letters."""
    path = checkpoint(tmp_path)
    reward = build_reward("reward_model", path=path, device="cpu")
    (score,) = reward(prompts=["q"], completions=["a<|end|>b"])
    assert score == pytest.approx(scored_alone(path, [templated("q", "a‹|end|>b")])[0], abs=1e-5)
    assert score != pytest.approx(scored_alone(path, [templated("q", "a<|end|>b")])[0], abs=1e-3)


@pytest.mark.parametrize(("max_length", "kept"), [(12, 12), (None, 64)])
def test_long_texts_lose_their_beginning_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_length: int | None, kept: int
) -> None:
    path = checkpoint(tmp_path, template=None)  # 64 positions
    prompt, completion = "0123456789" * 7, "abc"
    expected = scored_alone(path, [(prompt + completion)[-kept:]])
    reward = build_reward("reward_model", path=path, max_length=max_length, device="cpu")
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scores = reward(prompts=[prompt, "a"], completions=[completion, "b"], log_metric=logged.__setitem__)
    assert scores[0] == pytest.approx(expected[0], abs=1e-5)
    assert logged == {"reward_model/truncated_total": 1}
    assert [record.getMessage().count("lost their beginning") for record in caplog.records] == [1]


def test_several_models_are_averaged_or_the_least_counts(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / str(seed), seed=seed) for seed in range(3)]
    alone = [scored_alone(path, all_templated()) for path in paths]
    rows = [*zip(*alone, strict=True)]
    logged: dict[str, float] = {}
    mean = build_reward("reward_model", path=paths, device="cpu")
    scores = mean(prompts=PROMPTS, completions=COMPLETIONS, log_metric=logged.__setitem__)
    assert scores == pytest.approx([sum(row) / 3 for row in rows], abs=1e-5)
    assert logged["reward_model/spread"] == pytest.approx(sum(max(row) - min(row) for row in rows) / 4, abs=1e-5)
    least = build_reward("reward_model", path=paths, ensemble="min", device="cpu")
    assert least(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx([min(row) for row in rows], abs=1e-5)
    assert len({min(range(3), key=row.__getitem__) for row in rows}) > 1  # not always the same model


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer_of(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no trained score head \(score\.weight is missing\)"):
        build_reward("reward_model", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no trained score head"):
        build_reward("reward_model", path=str(tmp_path), level="step")


def test_checkpoints_of_another_kind_are_refused(tmp_path: Path) -> None:
    two, three = (checkpoint(tmp_path / str(labels), labels=labels) for labels in (2, 3))
    with pytest.raises(ConfigError, match=r"is not a sequence classifier with 1 label, but has 2"):
        build_reward("reward_model", path=two)
    with pytest.raises(ConfigError, match=r"a LlamaForSequenceClassification: set reward\.level=completion"):
        build_reward("reward_model", path=three, level="token")
    tokens = checkpoint(tmp_path / "tokens", head="token", labels=3)
    with pytest.raises(ConfigError, match=r"a LlamaForTokenClassification: set reward\.level=step"):
        build_reward("reward_model", path=tokens)
    with pytest.raises(ConfigError, match=r"is not a token classifier with 1 or 2 label, but has 3"):
        build_reward("reward_model", path=tokens, level="step")
    for absent in (str(tmp_path / "absent"), "./absent", "~/absent", "runs/a/checkpoint", "builtin:tiny"):
        with pytest.raises(ConfigError, match=rf"reward\.path='{absent}' is no folder: give that of a reward model"):
            build_reward("reward_model", path=absent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"reward\.path=.*empty' is not a sequence classifier: "):
        build_reward("reward_model", path=str(tmp_path / "empty"))


@pytest.mark.parametrize("device", ["cuda:77", "abacus", "meta:x"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.device='{device}' cannot be used \(.*\): set cpu"):
        build_reward("reward_model", path=checkpoint(tmp_path), device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": []}, r"reward\.path=\[\] must be a folder or hub name"),
        ({"path": ["a", 3]}, r"reward\.path=\['a', 3\]"),
        ({"batch_size": 0}, r"reward\.batch_size=0 .* at least 1"),
        ({"max_length": 0}, r"reward\.max_length=0 must be at least 1"),
        ({"ensemble": "max"}, r"reward\.ensemble='max' is not an option: mean, min"),
        ({"level": "word"}, r"reward\.level='word' is not an option: completion, step, token"),
        ({"aggregate": "max", "level": "step"}, r"reward\.aggregate='max' is not an option: last, mean, min"),
        ({"aggregate": "min"}, r"reward\.aggregate='min' goes with reward\.level=step or token"),
        ({"policy_tokenizer": "x"}, r"reward\.policy_tokenizer='x' goes with rewards that are paid per token"),
        ({"tokenizer": "x"}, r"reward\.tokenizer='x' goes with reward\.base_url"),
        ({"level": "step", "separator": " "}, r"reward\.separator=' ' must be what ends a step"),
        ({"base_url": "http://h", "max_length": 5}, r"reward\.max_length=5 goes with a model of this process"),
        ({"base_url": "h"}, r"reward\.base_url='h' must begin with http"),
        ({"base_url": "http://h", "endpoint": "rank"}, r"reward\.endpoint='rank' is not an option: classify, generic"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("reward_model", **{"path": "/nowhere/at/all", **options})


def test_the_template_of_these_tests_is_the_saved_one(tmp_path: Path) -> None:
    made = tokenizer_of(TEMPLATE)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert made.apply_chat_template(chat, tokenize=False) == templated("q", "a")
