"""reward_model against a small random checkpoint: every score equals what the model gives to that text alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import build_reward

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .?+="
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<e>{% endfor %}"
PROMPTS = ["1+1=", "what is 2+2?", "7", "name a town with a long name."]
COMPLETIONS = ["2", "four, or so it seems", "seven", "a"]


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<p>", "<e>", "<u>", "[user]", "[assistant]", *ALPHABET])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<u>"))
    core.pre_tokenizer = Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<p>", eos_token="<e>", unk_token="<u>")
    made.add_special_tokens({"additional_special_tokens": ["[user]", "[assistant]"]})
    made.chat_template = template
    return made


def checkpoint(folder: Path, pad: int | None = 0, labels: int = 1, template: str | None = TEMPLATE) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=labels,
        pad_token_id=pad,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer_of(template).save_pretrained(folder)
    return str(folder)


def scored_alone(path: str, texts: list[str]) -> list[float]:
    """The reference: one unpadded forward per text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in texts]
        return [model(row).logits.item() for row in ids]


def templated(prompt: str, completion: str) -> str:
    return f"[user]{prompt}<e>[assistant]{completion}<e>"


# pad=0 is a token of its own; pad=1 is also the stop token, with which every text ends; None is not declared at all
@pytest.mark.parametrize("pad", [0, 1, None])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_does_not_change_a_score(tmp_path: Path, pad: int | None, batch_size: int) -> None:
    path = checkpoint(tmp_path, pad)
    expected = scored_alone(path, [templated(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)])
    reward = build_reward("reward_model", path=path, batch_size=batch_size, device="cpu")
    assert len(set(expected)) == 4  # otherwise equality would say nothing
    assert reward(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(expected, abs=1e-5)


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
    with pytest.raises(RewardError, match="tokenizer has no chat template"):
        reward(prompts=[[{"role": "user", "content": "a"}]], completions=[[{"role": "assistant", "content": "b"}]])


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
    assert logged == {"reward_model/truncated_rate": 0.5}
    assert [record.getMessage().count("lost their beginning") for record in caplog.records] == [1]


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer_of(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no trained score head \(score\.weight is missing\)"):
        build_reward("reward_model", path=str(tmp_path))


def test_a_classifier_with_two_labels_and_an_absent_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.path=.* is not a sequence classifier with one label"):
        build_reward("reward_model", path=checkpoint(tmp_path / "two", labels=2))
    with pytest.raises(ConfigError, match=r"reward\.path=.* is not a sequence classifier with one label"):
        build_reward("reward_model", path=str(tmp_path / "absent"))
