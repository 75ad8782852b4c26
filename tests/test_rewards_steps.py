"""Process reward models: where steps end, what they score, at which of the policy's tokens that is paid, and credit."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaForTokenClassification, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_toolbox.advantages import (
    ADVANTAGES,
    estimate,
    gae,
    group_relative,
    pays_per_token,
    reinforce_pp,
    value_targets,
)
from grpo_toolbox.config.probe import check_credit
from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.experience import _groups_of, _joined
from grpo_toolbox.models.tiny import build_tokenizer, tiny_config
from grpo_toolbox.rewards import build_reward, combine, score_rollouts
from grpo_toolbox.rewards.steps import paid, step_ends, token_ends
from grpo_toolbox.types import Prompt, Rollout, Scores
from reward_checkpoints import checkpoint, logits_alone, templated, tokenizer_of
from toolbox_runs import SMALL, all_metrics, toolbox_train


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("one\n\ntwo\n\n", [5, 10]),
        ("one\n\ntwo", [5, 8]),
        ("one", [3]),
        ("\n\none\n\n \n\ntwo\n\n", [7, 15]),  # blank steps are none
        ("one\n\n  ", [5]),
        ("", [0]),
        (" \n\n ", [4]),  # nothing but blanks is one step
    ],
)
def test_where_steps_end(text: str, ends: list[int]) -> None:
    assert step_ends(text, "\n\n") == ends


# ---- the policy's tokens


def bytes_of(text: str) -> list[int]:
    return [*text.encode()]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token b is byte b; 256 ends a completion."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    core = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    made.add_special_tokens({"eos_token": "<e>", "pad_token": "<p>"})
    return made


@pytest.mark.parametrize(
    ("ids", "text", "ends"),
    [
        ([*b"abc", 256], "abc", [1, 2, 3, 3]),
        (bytes_of("aéb"), "aéb", [1, 1, 2, 3]),  # é is two bytes: the second completes it
        (bytes_of("é🙂"), "é🙂", [0, 1, 1, 1, 1, 2]),
        ([97, 257, 98, 256], "ab", [1, 1, 2, 2]),  # padding is no text
        (bytes_of("a🙂")[:3], "a\ufffd", [1, 1, 2]),  # cut within a character
        ([256], "", [0]),
    ],
)
def test_where_the_tokens_of_the_policy_end(ids: list[int], text: str, ends: list[int]) -> None:
    assert token_ends(byte_tokenizer(), ids, text) == ends


def test_text_that_is_not_well_formed_ends_somewhere() -> None:
    ids = [0x80] * 50
    text = byte_tokenizer().decode(ids)
    assert token_ends(byte_tokenizer(), ids, text)[-1] == len(text)


def test_another_vocabulary_is_found_out() -> None:
    with pytest.raises(ConfigError, match=r"reward\.policy_tokenizer=\$\{model\.path\}"):
        token_ends(byte_tokenizer(), [*b"xyz"], "abc")


def test_steps_are_paid_at_the_token_that_completes_them() -> None:
    # tokens of 2, 2 and 1 characters and the stop token; steps end after 1, 4 and 5 characters
    assert paid([(1, 0.5), (4, 1.0), (5, -2.0)], [2, 4, 5, 5]) == [0.5, 1.0, -2.0, 0.0]
    assert paid([(1, 0.5), (2, 1.0)], [2, 4]) == [1.5, 0.0]  # two steps within one token


# ---- scores of the model

TEXT = "1+1=2\n\nso 2, or two"
IDS = [*tokenizer_of(None)(TEXT)["input_ids"], 1]


@pytest.mark.parametrize("template", [None, "chat"])
@pytest.mark.parametrize("labels", [1, 2])
def test_every_step_is_scored_where_it_ends(tmp_path: Path, labels: int, template: str | None) -> None:
    options = {"template": None} if template is None else {}
    path = checkpoint(tmp_path, labels=labels, head="token", **options)
    whole = templated("q", TEXT + "\n\n") if template else "q" + TEXT + "\n\n"
    logits = logits_alone(path, whole, "token")
    values = logits[:, 0] if labels == 1 else logits.softmax(-1)[:, 1]
    begin = 4 if template else 1  # [user], q, <e>, [assistant]; every other token is a character
    expected = [values[begin + 6].item(), values[begin + len(TEXT) + 1].item()]  # both at the second \n

    extras: dict[str, list[Any]] = {}
    reward = build_reward("reward_model", path=path, level="step", device="cpu")
    inputs = {"prompts": ["q"], "completions": [TEXT], "completion_ids": [IDS]}
    (score,) = reward(**inputs, log_extra=extras.__setitem__)
    assert extras["step_scores"][0] == pytest.approx(expected, abs=1e-5)
    assert score == pytest.approx(sum(expected), abs=1e-5)
    (pay,) = extras["token_rewards"]
    assert len(pay) == len(IDS)
    assert {place: value for place, value in enumerate(pay) if value} == pytest.approx(
        {6: expected[0], len(TEXT) - 1: expected[1]},
        abs=1e-5,  # the policy wrote no second separator
    )


def test_every_token_is_scored(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, head="token", template=None)
    expected = logits_alone(path, "q" + TEXT, "token")[1:, 0].tolist()
    extras: dict[str, list[Any]] = {}
    reward = build_reward("reward_model", path=path, level="token", device="cpu")
    reward(prompts=["q"], completions=[TEXT], completion_ids=[IDS], log_extra=extras.__setitem__)
    assert extras["token_rewards"][0] == pytest.approx([*expected, 0.0], abs=1e-5)  # nothing for the stop token


@pytest.mark.parametrize(
    ("aggregate", "of"),
    [
        ("min", min),
        ("mean", lambda scores: sum(scores) / len(scores)),
        ("last", lambda scores: scores[-1]),
        ("sum", sum),
        ("product", math.prod),
    ],
)
def test_steps_as_one_number(tmp_path: Path, aggregate: str, of: Any) -> None:
    path = checkpoint(tmp_path, head="token", labels=2, template=None)
    values = logits_alone(path, "q" + TEXT + "\n\n", "token").softmax(-1)[:, 1]
    steps = [values[7].item(), values[-1].item()]
    reward = build_reward("reward_model", path=path, level="step", aggregate=aggregate, device="cpu")
    assert reward(prompts=["q"], completions=[TEXT]) == [pytest.approx(of(steps), abs=1e-5)]


def test_several_process_models(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / str(seed), head="token", template=None, seed=seed) for seed in range(2)]
    inputs = {"prompts": ["q"], "completions": [TEXT], "completion_ids": [IDS]}

    def pay(path: Any, **options: Any) -> list[float]:
        extras: dict[str, list[Any]] = {}
        build_reward("reward_model", path=path, level="step", device="cpu", **options)(
            **inputs, log_extra=extras.__setitem__
        )
        return list(extras["token_rewards"][0])

    one, other = pay(paths[0]), pay(paths[1])
    assert pay(paths) == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)], abs=1e-5)
    assert pay(paths, ensemble="min") == pytest.approx([min(pair) for pair in zip(one, other, strict=True)], abs=1e-5)


def test_a_completion_that_lost_a_part_has_no_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path, head="token", template=None)
    reward = build_reward("reward_model", path=path, level="step", aggregate="min", max_length=24, device="cpu")
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        scores = reward(
            prompts=["what is 1+1, then?", "q", "q"],
            completions=["2, or two", "2, or two, or rather\n\ntwo", "2"],
            log_metric=logged.__setitem__,
        )
    read = ("what is 1+1, then?" + "2, or two\n\n")[-24:]  # the first loses some of its prompt alone
    assert scores[0] == pytest.approx(logits_alone(path, read, "token")[-1, 0].item(), abs=1e-5)
    assert scores[1] is None
    assert scores[2] is not None
    assert logged["reward_model/truncated_total"] == 2
    assert len(caplog.records) == 1


def test_an_empty_completion_is_scored_too(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, head="token", template=None)
    reward = build_reward("reward_model", path=path, level="step", device="cpu")
    expected = logits_alone(path, "q\n\n", "token")[-1, 0].item()
    extras: dict[str, list[Any]] = {}
    reward(prompts=["q"], completions=[""], completion_ids=[[1]], log_extra=extras.__setitem__)
    assert extras["token_rewards"] == [[pytest.approx(expected, abs=1e-5)]]


def test_a_template_that_rewrites_completions_is_found_out(tmp_path: Path) -> None:
    upper = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | replace('1', '2') }}<e>{% endfor %}"
    path = checkpoint(tmp_path, head="token", template=upper)
    reward = build_reward("reward_model", path=path, level="step", aggregate="min", device="cpu")
    with pytest.raises(RewardError, match=r"chat template .* rewrites completions.*set reward\.level=completion"):
        reward(prompts=["q"], completions=["1+1"])


# ---- from a reward to advantages


def prompt(row: int) -> Prompt:
    return Prompt(row, f"q{row}", (1,))


def rollouts(*lengths: int) -> list[Rollout]:
    one = prompt(0)
    return [Rollout(one, tuple(range(n)), (0.0,) * n, "stop", "x" * n) for n in lengths]


def scores_of(*rows: Any, weights: tuple[float, float] = (1.0, 1.0), outcome: tuple[Any, ...] = ()) -> Scores:
    """One group: what a process reward returned per completion, and beside it an outcome."""

    def process(completions: list[str]) -> list[Any]:
        return list(rows)

    def whole(completions: list[str]) -> list[Any]:
        return list(outcome) or [0.0] * len(rows)

    lengths = [len(row["token_rewards"]) if isinstance(row, dict) else 3 for row in rows]
    return score_rollouts(combine([process, whole], [*weights]), rollouts(*lengths), len(rows))


ROWS: tuple[dict[str, Any], ...] = (
    {"score": 3.0, "token_rewards": [1.0, 0.0, 2.0]},
    {"score": 1.0, "token_rewards": [0.0, 1.0]},
)
NAN = math.nan


def test_token_rewards_become_a_column_of_the_scores() -> None:
    scores = scores_of(*ROWS, weights=(0.5, 1.0), outcome=(0.0, 4.0))
    assert scores.total.tolist() == [[1.5, 4.5]]  # half of the sums, and the outcome
    assert scores.token_rewards is not None
    torch.testing.assert_close(
        scores.token_rewards, torch.tensor([[[0.5, 0.0, 1.0], [0.0, 0.5, NAN]]]), equal_nan=True, rtol=0, atol=0
    )
    assert "token_rewards" not in scores.extras  # as large as the completions, and no reading


def test_without_token_rewards_there_is_no_column() -> None:
    assert scores_of(1.0, 2.0).token_rewards is None
    assert scores_of({"score": None, "token_rewards": [1.0, 1.0, 1.0]}, 2.0).token_rewards is not None
    unscored = scores_of({"score": None, "token_rewards": [1.0, 1.0, 1.0]}, 2.0)
    assert unscored.token_rewards is not None
    assert unscored.token_rewards[0, 0].tolist() == [0.0, 0.0, 0.0]  # what has no score pays nothing


@pytest.mark.parametrize(
    ("paid_out", "message"),
    [
        ([1.0], r"token_rewards for prompt 0, completion 0 of another size \(1\): .* each of its 3 tokens"),
        (1.0, r"of another size \(float\)"),
        ([1.0, NAN, 0.0], r"token_rewards for prompt 0, completion 0 with nan in it"),
        ([1.0, None, 0.0], r"with None in it"),
        ([1.0, 1e39, 0.0], r"with 1e\+39 in it"),
    ],
)
def test_what_is_no_number_per_token_is_refused(paid_out: Any, message: str) -> None:
    def process(completions: list[str]) -> list[Any]:
        return [{"score": 0.0, "token_rewards": paid_out}]

    with pytest.raises(RewardError, match=message):
        score_rollouts(combine([process]), rollouts(3), 1)


def test_reinforce_pp_credits_what_comes_at_a_token_and_after_it() -> None:
    # to come: 1+0+2, 0+2, 2; and 0+1+4, 1+4 with the outcome at the end
    to_go = torch.tensor([[[3.0, 2.0, 2.0], [5.0, 5.0, NAN]]])
    mean, variance = 3.4, (0.4**2 + 2 * 1.4**2 + 2 * 1.6**2) / 5
    expected = ((to_go - mean) / math.sqrt(variance)).nan_to_num(0.0)
    found = estimate(reinforce_pp, scores_of(*ROWS, outcome=(0.0, 4.0)))
    torch.testing.assert_close(found, expected)


def test_a_penalty_is_taken_off_at_the_same_tokens() -> None:
    penalty = torch.tensor([[[0.5, 0.5, 0.5], [1.0, 0.0, NAN]]])
    to_go = torch.tensor([[[1.5, 1.0, 1.5], [4.0, 5.0, NAN]]])
    centred = to_go - to_go.nanmean()
    expected = (centred / (centred.square().nanmean().sqrt())).nan_to_num(0.0)
    found = estimate(reinforce_pp, scores_of(*ROWS, outcome=(0.0, 4.0)), penalty)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [[3.0, 2.0, 2.0], [5.0, 5.0, 0.0]]),  # with V = 0: what is still to come
        (0.0, [[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]),  # what comes at the token itself
    ],
)
def test_gae_with_token_rewards(lam: float, expected: list[list[float]]) -> None:
    values = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, NAN]]])
    own = functools.partial(gae, lam=lam, whiten=False)
    scores = scores_of(*ROWS, outcome=(0.0, 4.0))
    assert estimate(own, scores, values=values).tolist() == [expected]
    targets = value_targets(own, scores, values)
    assert targets[0, 0].tolist() == expected[0]  # Â + V


PER_TOKEN = {"reinforce_pp", "gae"}


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - PER_TOKEN))
def test_estimators_of_whole_completions_refuse_token_rewards(name: str) -> None:
    assert not pays_per_token(ADVANTAGES[name])
    with pytest.raises(ConfigError, match=rf"advantage={name} has one number per completion: set advantage=reinf"):
        estimate(ADVANTAGES[name], scores_of(*ROWS))


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
def test_the_others_take_them(name: str) -> None:
    assert pays_per_token(ADVANTAGES[name])


def test_a_process_model_beside_such_an_estimator_is_refused_before_the_run(tmp_path: Path) -> None:
    paying = build_reward("reward_model", path=checkpoint(tmp_path, head="token"), level="step", device="cpu")
    with pytest.raises(ConfigError, match=r"reward\.aggregate=min for one number"):
        check_credit(group_relative, paying)
    check_credit(reinforce_pp, paying)
    check_credit(group_relative, build_reward("length_penalty"))


def of_lengths(*lengths: int) -> list[Rollout]:
    return [Rollout(Prompt(0, "", ()), (5,) * length, (-1.0,) * length, "stop", "") for length in lengths]


def test_parts_of_a_step_are_put_together_at_the_longer_length() -> None:
    long, short, none = scores_of(*ROWS), scores_of({"score": 1.0, "token_rewards": [1.0]}, 2.0), scores_of(1.0, 2.0)
    whole = _joined([none, short, long], of_lengths(1, 4, 1, 3, 3, 2))
    assert whole.token_rewards is not None
    expected = [
        [[0.0, NAN, NAN, NAN], [0.0, 0.0, 0.0, 0.0]],
        [[1.0, NAN, NAN, NAN], [0.0, 0.0, 0.0, NAN]],
        [[1.0, 0.0, 2.0, NAN], [0.0, 1.0, NAN, NAN]],
    ]
    torch.testing.assert_close(whole.token_rewards, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)
    kept = _groups_of(whole, [2]).token_rewards
    assert kept is not None
    torch.testing.assert_close(kept, torch.tensor(expected[2:]), equal_nan=True, rtol=0, atol=0)
    assert _joined([none, none], of_lengths(1, 4, 1, 4)).token_rewards is None


# ---- a run


@pytest.fixture
def tiny_process_model(tmp_path: Path) -> str:
    config = tiny_config()
    config.num_labels = 1
    torch.manual_seed(0)
    LlamaForTokenClassification(config).save_pretrained(tmp_path / "prm")
    build_tokenizer().save_pretrained(tmp_path / "prm")
    return str(tmp_path / "prm")


def test_a_run_with_a_process_model(tmp_path: Path, tiny_process_model: str) -> None:
    words = (
        *SMALL,
        "trainer.max_steps=2",
        "trainer.eval_every=0",
        f"run_dir={tmp_path / 'run'}",
        "reward=reward_model",
    )
    words = (*words, f"reward.path={tiny_process_model}", "reward.level=token", "reward.device=cpu")
    assert toolbox_train(*words, "advantage=reinforce_pp") == 0
    assert all(line["grad_norm"] > 0 for line in all_metrics(tmp_path / "run"))


def test_a_run_with_a_process_model_and_group_advantages_is_refused(
    tmp_path: Path, tiny_process_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SMALL, f"run_dir={tmp_path / 'run'}", "reward=reward_model", f"reward.path={tiny_process_model}")
    assert toolbox_train(*words, "reward.level=token", "reward.device=cpu") != 0
    assert "advantage=group_relative has one number per completion" in capsys.readouterr().err
