"""duplicate_penalty: copies within a group cost, whatever the order and the other groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import build_reward, score_rollouts
from grpo_toolbox.types import Prompt, Rollout


def score(texts: list[str], prompts: list[Any] | None = None, **options: Any) -> list[float | None]:
    return build_reward("duplicate_penalty", **options)(completions=texts, prompts=prompts or ["p"] * len(texts))


def test_a_copy_costs_the_share_of_the_others_that_it_equals() -> None:
    # of three others, a equals two, b none
    assert score(["a", "a", "a", "b"]) == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 0.0])
    assert score(["a"] * 4) == [-1.0] * 4
    assert score(["a", "b", "c", "d"], max_penalty=-0.5) == [0.0] * 4
    assert score(["a", "a"], max_penalty=-0.5) == [-0.5, -0.5]


def test_alone_in_its_group_a_completion_copies_nothing() -> None:
    assert score(["a"]) == [0.0]
    assert score(["a", "a"], prompts=["p", "q"]) == [0.0, 0.0]  # the same answer to another prompt


def test_groups_are_told_apart_by_prompts_of_either_form() -> None:
    one, other = ([{"role": "user", "content": text}] for text in "pq")
    assert score(["a", "a", "b", "a"], prompts=[one, one, other, other]) == [-1.0, -1.0, 0.0, 0.0]


def test_blanks_case_and_stop_tokens_make_no_other_text() -> None:
    assert score(["It is 5.", " it  is\n5.", "It is 5.<|im_end|>", "It is 5!"]) == pytest.approx([-2 / 3] * 3 + [0.0])
    assert score(["It is 5.", "it is 5."], ignore_case=False) == [0.0, 0.0]
    assert score(["", "<|im_end|>"]) == [-1.0, -1.0]


def test_duplicate_rate_is_the_share_of_completions_with_a_copy() -> None:
    logged: dict[str, float] = {}
    reward = build_reward("duplicate_penalty")
    reward(completions=["a", "a", "b", "c"], prompts=["p"] * 4, log_metric=logged.__setitem__)
    assert logged == {"duplicate_rate": 0.5}


def test_in_a_run_it_sees_whole_groups() -> None:
    prompts = [Prompt(id=number, ids=(1,), text=text, columns={}) for number, text in enumerate("pq")]
    said = ["a", "a", "b", "a"]
    rollouts = [
        Rollout(prompt=prompts[row // 2], ids=(5,), logps=(-0.1,), finish_reason="stop", text=text)
        for row, text in enumerate(said)
    ]
    scores = score_rollouts(build_reward("duplicate_penalty"), rollouts, group_size=2)
    assert scores.total.tolist() == [[-1.0, -1.0], [0.0, 0.0]]


@settings(deadline=None)
@given(texts=st.lists(st.sampled_from("abc"), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_the_order_of_a_group_does_not_matter(texts: list[str], seed: int) -> None:
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    scores = score(texts)
    assert score([texts[row] for row in order]) == [scores[row] for row in order]
    others = ["p"] * len(texts) + ["q"] * len(texts)
    assert score(texts * 2, prompts=others) == scores * 2


@pytest.mark.parametrize("value", [0.5, True, "x", float("-inf")])
def test_a_penalty_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"reward\.max_penalty"):
        build_reward("duplicate_penalty", max_penalty=value)
