"""repetition_penalty: hand numbers, invariances, TRL."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.repetition import repeated_share, words_of


def test_runs_that_have_come_before_cost_their_share() -> None:
    # 5,5,5,5,5 has four pairs, one of them new: 3/4. 1,2,1,2,3 has 12, 21, 12, 23: 1/4. Too short for a pair: 0.
    reward = build_reward("repetition_penalty", ngram=2)
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 3], [1], []]
    assert reward(completion_ids=ids) == [0.0, -0.75, -0.25, 0.0, 0.0]


def test_max_penalty_is_what_endless_repetition_comes_to() -> None:
    reward = build_reward("repetition_penalty", max_penalty=-0.5)
    assert reward(completion_ids=[[1] * 1002]) == pytest.approx([-0.5 * 0.999])
    assert build_reward("repetition_penalty", max_penalty=0)(completion_ids=[[1] * 9]) == [0.0]


def test_words_are_read_without_case_stops_and_stop_tokens() -> None:
    # the same three words, four times: 10 runs, 3 of them new
    reward = build_reward("repetition_penalty", unit="words")
    said = "So it is. so it is, SO IT IS!\nSo it is<|im_end|>"
    assert reward(completions=[said, [{"role": "assistant", "content": said}], ""]) == pytest.approx([-0.7, -0.7, 0.0])


def test_scripts_without_blanks_are_read_by_letters() -> None:
    assert words_of("abc 漢字 ひらがな, Größe 3x") == ["abc", "漢", "字", "ひ", "ら", "が", "な", "größe", "3x"]
    assert build_reward("repetition_penalty", unit="words")(completions=["好的" * 50])[0] < -0.9


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 3), max_size=30), ngram=st.integers(1, 5))
def test_the_share_is_a_share_and_does_not_depend_on_direction_or_names(ids: list[int], ngram: int) -> None:
    share = repeated_share(ids, ngram)
    assert 0.0 <= share < 1.0
    assert share == repeated_share(ids[::-1], ngram) == repeated_share([7 - one for one in ids], ngram)
    assert repeated_share([*range(100, 100 + len(ids))], ngram) == 0.0


@settings(deadline=None)
@given(ids=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1), ngram=st.integers(1, 5))
def test_trl_has_the_same_penalty(ids: list[list[int]], ngram: int) -> None:
    from trl.rewards import get_repetition_penalty_reward

    theirs = get_repetition_penalty_reward(ngram)(completion_ids=ids)
    assert build_reward("repetition_penalty", ngram=ngram)(completion_ids=ids) == theirs


def test_trl_takes_runs_of_nothing_until_it_divides_by_zero() -> None:
    from trl.rewards import get_repetition_penalty_reward

    with pytest.raises(ZeroDivisionError):
        get_repetition_penalty_reward(0)(completion_ids=[[1, 2]])
    with pytest.raises(ConfigError, match=r"reward\.ngram=0"):
        build_reward("repetition_penalty", ngram=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ngram", 1.5), ("ngram", True), ("max_penalty", 0.5), ("max_penalty", float("nan")), ("unit", "letters")],
)
def test_options_that_cannot_work_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.{key}"):
        build_reward("repetition_penalty", **{key: value})
