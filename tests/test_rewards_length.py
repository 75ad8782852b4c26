"""length_penalty, soft_overlong, token_cost, cosine_length: hand numbers, papers' formulas, TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError, DataError, RewardError
from grpo_toolbox.rewards import build_reward, score_rollouts
from grpo_toolbox.rewards.length import cosine
from grpo_toolbox.types import Prompt, Rollout


def tokens(*lengths: int) -> list[list[int]]:
    return [[7] * length for length in lengths]


def test_length_penalty_falls_from_0_at_the_target_to_minus_1_at_twice_the_target() -> None:
    # target 100: 150 characters are half a target too long, 200 a whole one, more does not cost more
    reward = build_reward("length_penalty", target_chars=100)
    assert reward(completions=["", "a" * 100, "a" * 150, "a" * 200, "a" * 999]) == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("target", [0, -5, True, 2.5])
def test_a_target_that_is_no_number_of_characters_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match=r"reward\.target_chars"):
        build_reward("length_penalty", target_chars=target)


# ---- soft_overlong


def test_the_last_tokens_before_the_limit_cost_up_to_1() -> None:
    # Yu et al. (2025), eq. 13, limit 100, cache 20: 0 up to 80, then (80 − n)/20, −1 above 100
    reward = build_reward("soft_overlong", max_tokens=100, cache=20)
    expected = [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert reward(completion_ids=tokens(0, 80, 81, 90, 100, 101, 500)) == pytest.approx(expected)


def test_without_a_cache_only_what_is_above_the_limit_costs() -> None:
    reward = build_reward("soft_overlong", max_tokens=10, cache=0)
    assert reward(completion_ids=tokens(0, 10, 11)) == [0.0, 0.0, -1.0]


@settings(deadline=None)
@given(limit=st.integers(1, 60), share=st.floats(0, 1), lengths=st.lists(st.integers(0, 80), min_size=1))
def test_trl_has_the_same_punishment(limit: int, share: float, lengths: list[int]) -> None:
    from trl.rewards import get_soft_overlong_punishment

    cache = int(share * limit)
    ids = tokens(*lengths)
    theirs = get_soft_overlong_punishment(limit, cache)(completion_ids=ids)
    assert build_reward("soft_overlong", max_tokens=limit, cache=cache)(completion_ids=ids) == theirs


# ---- token_cost


def test_each_token_past_the_budget_costs() -> None:
    reward = build_reward("token_cost", budget=100, cost=0.01, limit=0.5)
    scores = reward(completion_ids=tokens(0, 100, 101, 130, 150, 900))
    assert scores == pytest.approx([0.0, 0.0, -0.01, -0.3, -0.5, -0.5])
    assert all(math.copysign(1, score) > 0 for score in scores[:2])  # no cost is 0, not −0


# ---- cosine_length

GOLD = {"answer": ["5"] * 4}


def test_right_and_wrong_answers_go_along_their_own_half_cosine() -> None:
    # Yeo et al. (2025), appendix C.1: long + ½ (short − long)(1 + cos πt); t = 0, ½, ¼, 1
    reward = build_reward("cosine_length", max_tokens=100)
    quarter = math.sqrt(0.5)
    right = [1.0, 0.75, 0.5 + 0.25 * (1 + quarter), 0.5]
    wrong = [-1.0, -0.75, -0.5 - 0.25 * (1 + quarter), -0.5]
    assert reward(completions=["5"] * 4, completion_ids=tokens(0, 50, 25, 100), **GOLD) == pytest.approx(right)
    assert reward(completions=["6"] * 4, completion_ids=tokens(0, 50, 25, 100), **GOLD) == pytest.approx(wrong)


def test_beyond_the_limit_the_cosine_does_not_come_back() -> None:
    reward = build_reward("cosine_length", max_tokens=100)
    assert reward(completions=["5", "6"], completion_ids=tokens(200, 150), answer=["5"] * 2) == [0.5, -0.5]


def test_what_reaches_the_limit_may_get_a_value_of_its_own() -> None:
    # the paper's r_e: right or wrong
    reward = build_reward("cosine_length", max_tokens=100, exceeded=-10.0)
    scores = reward(completions=["5", "5", "6", "5"], completion_ids=tokens(99, 100, 101, 0), **GOLD)
    assert scores[1:] == [-10.0, -10.0, 1.0]
    assert scores[0] == pytest.approx(0.5, abs=1e-3)


def test_a_row_without_gold_answer_has_no_score() -> None:
    reward = build_reward("cosine_length", max_tokens=10)
    assert reward(completions=["5"], completion_ids=tokens(5), answer=[None]) == [None]


def test_any_reward_may_say_what_is_right_and_its_columns_are_needed() -> None:
    correct = {"name": "exact_match", "column": "gold", "extract": "boxed"}
    reward = build_reward("cosine_length", max_tokens=10, correct=correct)
    assert reward.columns_needed() == ("gold",)
    logged: dict[str, float] = {}
    scores = reward(
        completions=[r"\boxed{5}", "5"], completion_ids=tokens(10, 10), gold=["5"] * 2, log_metric=logged.__setitem__
    )
    assert scores == [0.5, -0.5]
    assert logged["invalid_format_rate"] == 0.5  # what the inner reward logs
    with pytest.raises(DataError, match="gold"):
        reward.check_rows([{"prompt": "p", "gold": ""}])  # and what it checks


def down(completions: list[str]) -> list[float]:
    raise OSError("the grader is down")


def test_a_failure_of_the_inner_reward_is_one_of_its_own_and_not_left_out_unseen() -> None:
    rollouts = [Rollout(Prompt(0, "?", (1,), {}), (1,), (), "stop", "5")] * 2
    correct: dict[str, object] = {"name": f"{__name__}:down"}
    with pytest.raises(RewardError, match="'down' failed"):
        score_rollouts(build_reward("cosine_length", max_tokens=10, correct=correct), rollouts, 2)
    tolerant = {**correct, "on_error": "skip"}
    scored = score_rollouts(build_reward("cosine_length", max_tokens=10, correct=tolerant), rollouts, 2)
    assert scored.metrics["rewards/cosine_length/errors"] == scored.metrics["reward_errors"] == 2
    with pytest.raises(RewardError, match=r"'cosine_length' failed on prompt 0, completion 0.*is down"):
        score_rollouts(build_reward("cosine_length", max_tokens=10, correct=tolerant, on_error="stop"), rollouts, 2)


def test_success_says_from_which_score_on_a_completion_is_right() -> None:
    part = {"name": "format", "layout": "think", "credit": "tags"}
    for success, expected in ((1.0, -0.5), (0.5, 0.5)):
        reward = build_reward("cosine_length", max_tokens=10, correct=part, success=success)
        assert reward(completions=["<think>a"], completion_ids=tokens(10)) == [expected]


def test_trl_has_the_same_cosine() -> None:
    from trl.rewards import get_cosine_scaled_reward

    golds = [r"\frac{1}{3}", "42", "7"]
    said = [r"\boxed{\frac{1}{3}}", r"\boxed{41}", r"\boxed{7}"]
    ids = tokens(50, 13, 400)
    theirs = get_cosine_scaled_reward(100)([[{"content": text}] for text in said], golds, ids)
    reward = build_reward("cosine_length", max_tokens=100, correct={"name": "math", "column": "solution"})
    assert reward(completions=said, completion_ids=ids, solution=golds) == pytest.approx(theirs)


@settings(deadline=None)
@given(progress=st.floats(0, 3), start=st.floats(-5, 5), end=st.floats(-5, 5))
def test_a_cosine_stays_between_its_ends(progress: float, start: float, end: float) -> None:
    low, high = sorted((start, end))
    assert low - 1e-12 <= cosine(progress, start, end) <= high + 1e-12
    assert progress < 1 or cosine(progress, start, end) == end


# ---- options


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("soft_overlong", {"max_tokens": 0, "cache": 0}, "max_tokens"),
        ("soft_overlong", {"max_tokens": 10, "cache": -1}, "cache"),
        ("soft_overlong", {"max_tokens": 10, "cache": 11}, "cache"),
        ("soft_overlong", {"max_tokens": 10}, "cache"),
        ("soft_overlong", {"cache": 10}, "max_tokens"),
        ("token_cost", {"budget": -1}, "budget"),
        ("token_cost", {"cost": 0}, "cost"),
        ("token_cost", {"limit": float("inf")}, "limit"),
        ("cosine_length", {}, "max_tokens"),
        ("cosine_length", {"max_tokens": 1.5}, "max_tokens"),
        ("cosine_length", {"max_tokens": 9, "correct": None}, "correct"),
        ("cosine_length", {"max_tokens": 9, "correct": "exact_mach"}, "correct"),
        ("cosine_length", {"max_tokens": 9, "correct": {"name": "exact_match", "extrct": "boxed"}}, "correct"),
        ("cosine_length", {"max_tokens": 9, "wrong_long": "low"}, "wrong_long"),
        ("cosine_length", {"max_tokens": 9, "exceeded": float("nan")}, "exceeded"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.{key}"):
        build_reward(name, **options)
