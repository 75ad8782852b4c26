"""numeric: which number counts, what it is equal to, and gold numbers. Ids such as b03.1 number checked cases."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from grpo_toolbox.errors import DataError, RewardError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.numeric import find_number, gold_number

CALM = "That agrees with the estimate made at the start. " * 8

EXTRACT = [
    ("b01.1", "In all she has 84 stamps, give or take none, honestly.", "84"),
    ("b01.3", "Total: 84,", "84"),
    ("b01.4", "#### ,", None),
    ("b02.3", "The profit is \\boxed{\\$7{,}250}.", "7250"),
    ("b02.4", "#### 1,234,567.50", "1234567.5"),
    ("b02.5", "#### 0.075", "0.075"),
    ("b04.5", "He has 12-5 = 7 left", "7"),
    ("a difference below zero", "8 - 10 = - 2", "-2"),
    ("a dash", "He has 12 - 5", "5"),
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
    ("b06.8", "#### 72", "<answer>\\boxed{72}</answer>", 1.0),
]
MARKED = [
    *(
        ("#### 12\n#### 58", "58"),
        ("\\boxed{3} #### 4", "4"),
        ("#### 4, so \\boxed{3}", "3"),
        ("#### \\boxed{72}", "72"),
    ),
    *(("####\n58", "58"), ("####58", "58"), ("#### 58.", "58"), ("#### **58**", "58"), ("#### $58", "58")),
    *(("#### -$1,234.50", "-1234.5"), ("#### $-5", "-5"), ("#### 5€", "5"), ("#### .5", "1/2"), ("#### 007", "7")),
    *(("#### <<5+5=10>>10", "10"), ("#### - 2", "-2"), ("#### 8 - 10 = - 2", "-2")),
    *(("#### x = 5", "5"), ("#### 3 + 4 = 7", "7"), ("#### 12 * 6 = 72", "72"), ("#### The answer is 72", "72")),
    *(
        ("#### 72 pens in all.", "72"),
        ("#### 18 dollars per day", "18"),
        ("#### 6.75%", "6.75"),
        ("#### 1 234", "1234"),
    ),
    *(
        (r"\boxed{\frac{1}{2}}", "1/2"),
        ("#### 3 1/2", "7/2"),
        (r"\boxed{12\text{ cm}}", "12"),
        ("#### 2 million", "2000000"),
    ),
    *((r"\boxed{3\times10^5}", "300000"), (r"\boxed 58", "58"), ("\\boxed{}\n#### 5", "5"), ("#### 5<|im_end|>", "5")),
    *(("<think>#### 5</think>Now #### 6", "6"), ("#### 5\n\nQuestion: 3+9?\n#### 12", "5")),
]
NO_NUMBER = [
    *(
        "",
        "nothing",
        "#### ",
        "#### none",
        "#### 12 or 36",
        "#### 5 or more",
        "#### 1,2,3",
        "#### 10:30",
        "#### 1.000.000",
    ),
    *(
        "\\boxed{x}",
        "#### 3 apples and 4 pears",
        "<think>I begin with 5",
        "#### 2 to the third",
        "#### 1/0",
        "####" * 9,
    ),
]


def grade(completion: Any, gold: Any, **options: Any) -> float | None:
    return build_reward("numeric", **options)(completions=[completion], answer=[gold])[0]


@pytest.mark.parametrize(("case", "completion", "expected"), EXTRACT)
def test_finds_the_number(case: str, completion: str, expected: str | None) -> None:
    assert find_number(completion) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(("case", "gold", "completion", "expected"), GRADE)
def test_grades(case: str, gold: Any, completion: str, expected: float) -> None:
    assert grade(completion, gold) == expected


@pytest.mark.parametrize(("case", "gold", "completion", "expected"), GRADE)
def test_require_marker_wants_marker_or_box(case: str, gold: Any, completion: str, expected: float) -> None:
    marked = "####" in completion or "boxed" in completion
    assert grade(completion, gold, require_marker=True) == (expected if marked else 0.0)


@pytest.mark.parametrize(("completion", "number"), MARKED)
@pytest.mark.parametrize("require_marker", [True, False])
def test_the_number_behind_the_last_marker_or_in_the_last_box(
    completion: str, number: str, require_marker: bool
) -> None:
    assert grade(completion, number, require_marker=require_marker) == 1.0
    assert grade(completion, f"#### {number}9", require_marker=require_marker) == 0.0


@pytest.mark.parametrize("completion", NO_NUMBER)
def test_what_gives_no_number_is_wrong_and_counted(completion: str) -> None:
    logged: dict[str, float] = {}
    assert find_number(completion) is None
    scores = build_reward("numeric")(completions=[completion], answer=["12"], log_metric=logged.__setitem__)
    assert scores == [0.0]
    assert logged == {"invalid_format_rate": 1.0}


def test_without_marker_it_is_the_last_number_unless_one_is_required() -> None:
    assert find_number("3 cats and 2 dogs") == 2
    assert find_number("3 cats and 2 dogs", require_marker=True) is None


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),
        *(("72", "72"), (72, "72"), (7.5, "7.5"), (Decimal("7.50"), "7.5"), ("1,000", "1000"), ("$1,000.50", "1000.5")),
        *(("72 dollars", "72"), ("-4", "-4"), ("1/4", "0.25"), (r"\frac{1}{4}", "0.25"), ("#### 12\n", "12")),
    ],
)
def test_gold_numbers_are_read_from_the_raw_column_or_a_prepared_one(gold: Any, number: str) -> None:
    assert gold_number(gold) == Fraction(number)


@pytest.mark.parametrize("gold", ["", "#### ", None, float("nan"), "Paris", "12 or 13", "see above"])
def test_without_gold_number_there_is_no_score(gold: Any) -> None:
    assert grade("#### 12", gold) is None


def test_a_message_list_is_read_and_the_number_is_logged() -> None:
    extras: dict[str, list[Any]] = {}
    reward = build_reward("numeric", column="solution")
    completions = [[{"role": "assistant", "content": "so #### 0.5"}], "#### 1/3", "none"]
    assert reward(completions=completions, solution=["1/2", "1", "1"], log_extra=extras.__setitem__) == [1.0, 0.0, 0.0]
    assert extras == {"extracted": ["1/2", "1/3", None]}


def test_gold_numbers_are_checked_before_a_model_is_loaded() -> None:
    reward = build_reward("numeric")
    reward.check_rows([{"prompt": "?", "answer": "none"}, {"prompt": "?", "answer": "#### 7"}])
    with pytest.raises(
        DataError, match=r"no row has a gold answer that is a number in column 'answer'.*reward=numeric"
    ):
        reward.check_rows([{"prompt": "?", "answer": "Paris"}])
    with pytest.raises(DataError, match="neither text nor a number"):
        reward.check_rows([{"prompt": "?", "answer": True}])
    with pytest.raises(RewardError, match=r"numeric.*neither text nor a number"):
        grade("#### 1", True)
