"""exact_match: finding the answer, comparing it, and what is no answer. Ids such as b03.1 number checked cases."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.answers import as_number, find_answer, last_boxed, last_number, own_turn

CALM = "That agrees with the estimate made at the start. " * 8

EXTRACT = [
    ("b01.1", "In all she has 84 stamps, give or take none, honestly.", "84"),
    ("b01.3", "Total: 84,", "84"),
    ("b01.4", "#### ,", None),
    ("b02.3", "The profit is \\boxed{\\$7{,}250}.", "7250"),
    ("b02.4", "#### 1,234,567.50", "1234567.5"),
    ("b02.5", "#### 0.075", "0.075"),
    ("b04.5", "He has 12-5 = 7 left", "7"),
    ("b06.4", "The growth rate is 6.75%", "6.75"),
    ("b06.5", "Answer: p+q = 128+19 = 147", "147"),
    ("b06.9", "#### 1.5e3", "1500"),
]

GRADE = [
    ("b03.1", "#### 36", "Her bill is $36.00.", 1.0),
    ("b03.2", "#### 36", "#### $36", 1.0),
    ("b03.4", "#### 36", "#### 36 dollars", 1.0),
    ("b03.5", "#### 36", "#### 36.5", 0.0),
    ("b04.3", "#### 4", "#### -4", 0.0),
    ("b04.4", "#### -4", "#### −4", 1.0),
    ("b04.6", "#### 0", "#### 0", 1.0),
    ("b04.8", 72, "#### 72", 1.0),
    ("b05.1", "#### 58", f"20+38=58\n#### 58\n{CALM}", 1.0),
    ("b05.3", "#### 12", "#### 58\n\nQuestion: Tom has 3 pens and buys 9.\nAnswer: 3+9=12\n#### 12", 0.0),
    ("b05.4", "#### 58", "Example from the prompt: #### 12. Now ours: 20+38=58\n#### 58", 1.0),
    ("b06.3", "#### 1/4", "#### 1/5", 0.0),
    ("b06.6", "18 - 7 = <<18-7=11>>11 pens\n#### 11", "#### 11", 1.0),
]


def grade(completion: object, gold: object, **options: object) -> float | None:
    return build_reward("exact_match", **options)(completions=[completion], answer=[gold])[0]


@pytest.mark.parametrize(("case", "completion", "expected"), EXTRACT)
def test_last_number_finds_the_number(case: str, completion: str, expected: str | None) -> None:
    found = find_answer(completion, last_number)
    assert (None if found is None else as_number(found)) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize("extract", ["last_number", "hash"])
@pytest.mark.parametrize(("case", "gold", "completion", "expected"), GRADE)
def test_grades(case: str, gold: object, completion: str, expected: float, extract: str) -> None:
    if extract == "hash" and "####" not in completion:
        expected = 0.0  # b03.1: without the marker there is no answer for `hash`
    assert grade(completion, gold, extract=extract) == expected


def test_a_box_inside_answer_tags_is_read() -> None:  # b06.8
    assert grade("<answer>\\boxed{72}</answer>", "#### 72", extract="boxed") == 1.0
    assert grade("<answer>\\boxed{72}</answer>", "#### 72", extract="last_number") == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{6} ... \\boxed{11}", "11"),
        ("\\boxed{\\frac{3}{7}}.", "\\frac{3}{7}"),
        ("\\boxed{\\{27, 8\\}}", "\\{27, 8\\}"),
        ("\\boxed{6} and then \\boxed{1", "6"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("{ stray \\boxed{8} }", "8"),
        ("\\fbox{2}", "2"),
        ("no box: {5}", None),
    ],
)
def test_the_last_balanced_box_counts(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-$1,234.50", "-1234.5"),
        ("$-5", "-5"),
        (".5", "1/2"),
        ("3/4", "3/4"),
        ("12\\,500", "12500"),
        ("7{,}250", "7250"),
        ("36.", "36"),
        ("**36**", "36"),
        ("x = 5", "5"),
        ("The answer is: 5", "5"),
        ("35%", "35"),
        ("$36$", "36"),
        ("2 pi", None),
        ("5x", None),
        ("12 or 36", None),
        ("2 million", None),
        ("\\sqrt{2}", None),
        ("1/0", None),
        ("1e999999999", None),  # must not be written out
        ("9" * 5000, None),
    ],
)
def test_what_is_one_number(text: str, value: str | None) -> None:
    assert as_number(text) == (None if value is None else Fraction(value))


def test_text_is_compared_without_case_blanks_and_full_stop() -> None:
    assert grade("  The  Nile.", "the nile", extract="whole") == 1.0
    assert grade("The Nile", "the nile", extract="whole", ignore_case=False) == 0.0
    assert grade("The Nil", "the nile", extract="whole") == 0.0


def test_regex_takes_the_last_match_and_its_first_group() -> None:
    completion = "Answer: 3\nWait.\nAnswer: 4 (sure)"
    assert grade(completion, 4, extract="regex", pattern=r"Answer: (\S+)") == 1.0
    assert grade(completion, 3, extract="regex", pattern=r"Answer: (\S+)") == 0.0
    assert grade(completion, "Answer: 4", extract="regex", pattern=r"Answer: \S+") == 1.0


def test_whole_needs_the_whole_completion_but_not_the_stop_token() -> None:
    assert grade("12<|im_end|>", "12", extract="whole") == 1.0
    assert grade("so 12, or is it 13", "12", extract="whole") == 0.0


def test_a_message_list_is_read_like_its_text() -> None:
    assert grade([{"role": "assistant", "content": "so 12"}], "12") == 1.0
    assert grade([{"role": "assistant", "content": None}], "12") == 0.0


def test_the_answer_of_an_invented_turn_counts_only_without_an_own_one() -> None:
    assert own_turn("Question: 2+2?\n#### 4") == "Question: 2+2?\n#### 4"  # the model restates its question first
    assert grade("Let me restate.\nQuestion: 2+2?\n#### 4", "4", extract="hash") == 1.0


@pytest.mark.parametrize("gold", ["", "   ", "####  ", None, float("nan")])
def test_without_gold_answer_there_is_no_score(gold: object) -> None:  # d06.3
    assert grade("0", gold) is None


def test_a_gold_answer_that_can_never_be_met_is_left_out() -> None:
    assert grade("Paris has 2 airports", "Paris", extract="last_number") is None


def test_a_decimal_is_a_number() -> None:
    assert grade("#### 7.5", Decimal("7.50")) == 1.0
    assert grade("7.5 and 7", Decimal("7.50")) == 0.0


@pytest.mark.parametrize("gold", [True, ["12"], {"answer": 12}])
def test_a_gold_answer_that_is_no_text_or_number_is_an_error(gold: object) -> None:  # d06.4
    with pytest.raises(RewardError, match=r"exact_match.*completion 0.*neither text nor a number"):
        grade("1", gold)


def test_invalid_format_rate_is_the_share_without_answer() -> None:
    logged: dict[str, float] = {}
    extras: dict[str, list[object]] = {}
    reward = build_reward("exact_match", extract="boxed")
    scores = reward(
        completions=["\\boxed{1}", "1", "none", "\\boxed{2}"],
        answer=[1, 1, 1, 1],
        log_metric=logged.__setitem__,
        log_extra=extras.__setitem__,
    )
    assert scores == [1.0, 0.0, 0.0, 0.0]
    assert logged == {"invalid_format_rate": 0.5}
    assert extras == {"extracted": ["1", None, None, "2"]}


def test_the_gold_column_can_have_another_name() -> None:
    reward = build_reward("exact_match", column="solution")
    assert reward.columns_needed() == ("solution",)
    assert reward(completions=["12"], solution=["12"]) == [1.0]


@pytest.mark.parametrize(
    "options",
    [
        {"extract": "last"},
        {"extract": "regex"},
        {"extract": "regex", "pattern": "("},
        {"extract": "boxed", "pattern": "a"},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.(extract|pattern)"):
        build_reward("exact_match", **options)


@pytest.mark.parametrize("text", ["\\boxed{" * 30_000, "\\" * 200_000, "1,111" * 40_000, "1/" * 100_000, "#" * 200_000])
def test_reading_takes_linear_time(text: str) -> None:
    began = time.process_time()
    for extract in ("last_number", "boxed", "hash"):
        grade(text, "5", extract=extract)
    assert time.process_time() - began < 5  # quadratic time would take minutes
