"""math: cases from public reports, where the answer stands, what is no gold answer, and graders that go wrong.

Ids such as a03.1 number checked cases.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.rewards import build_reward, score_rollouts
from grpo_toolbox.rewards.answers import boxes
from grpo_toolbox.rewards.maths import reward as math_module
from grpo_toolbox.rewards.maths.final_answer import final_answer, gold_formula
from grpo_toolbox.rewards.selftest import graders, try_grader
from grpo_toolbox.types import Prompt, Rollout

CASES = [
    ("a01.2", "7", "The last digits are 007, so \\boxed{007} it is.\n\n**Final Answer**\n\\boxed{007}", 1.0),
    ("a01.4", "16", r"\boxed{016}", 1.0),  # leading zero does not change an integer
    ("a02.1", r"$\frac{3}{7}$", r"So the share is \boxed{\frac{3}{7}}.", 1.0),  # same fraction
    ("a02.2", r"$\frac{3}{7}$", r"So the share is \boxed{\frac{3}{8}}.", 0.0),
    ("a03.1", "11", r"First try: \boxed{6}. That forgot a case; corrected: \boxed{11}.", 1.0),
    ("a03.5", "$3,5$", r"The roots are \boxed{3}", 0.0),  # one of two roots
    ("a03.6", "11", "\\boxed{6}\n\nWait.\n\n\\boxed{11}", 1.0),  # last box wins
    ("a03.7", "5", r"I am not sure; either \boxed{4} or \boxed{5} or \boxed{6}", 0.0),
    ("a04.1", r"$8 \text{ and } 27$", r"The cubes are \boxed{27}", 0.0),  # subset of the required answers
    ("a04.3", r"$\{8, 27\}$", r"\boxed{\{27, 8\}}", 1.0),  # sets have no order
    ("a04.4", "$(8, 27)$", r"\boxed{(27, 8)}", 0.0),  # an ordered pair has
    ("a04.5", r"$\pm 12$", r"\boxed{12}", 0.0),  # one of two values
    ("a04.6", "$12$", r"\boxed{\pm 12}", 0.0),  # hedged sign
    ("a04.12", r"$(0,1)\cup(2,3)$", r"\boxed{(2,3)\cup(0,1)}", 1.0),  # union has no order
    ("a04.13", r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", 1.0),
    ("a04.14", r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$", r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}", 0.0),
    ("a04.15", "$(3,4)$", r"\boxed{\begin{pmatrix}3\\4\end{pmatrix}}", 1.0),  # [policy] same vector written as column
    ("a05.3", r"$3\times 10^{-7}$", r"\boxed{9\times 10^{-7}}", 0.0),  # factor three apart
    ("a05.5", r"$\sqrt{19}$", r"\boxed{4.358898943540674}", 1.0),  # full double precision
    ("a05.6", "$1000000$", r"\boxed{1000001}", 0.0),  # integers compare exactly
    ("a05.7", r"$\frac{1}{3}$", r"\boxed{0.33}", 0.0),  # two digits are not one third
    ("a06.2", r"2 - \sqrt{3}", r"\boxed{2}", 0.0),  # same, gold without dollars
    ("a06.3", r"2 - \sqrt{3}", r"\boxed{2 - \sqrt{3}}", 1.0),  # identical formula
    ("a06.4", r"4\sqrt{2}", r"\boxed{4}", 0.0),  # same fault
    ("a06.8", r"\dfrac{9}{4}", r"\boxed{\dfrac{9}{4}}", 1.0),  # same fraction
    ("a06.9", "$x=5$", r"\boxed{5}", 1.0),  # assignment and value
    ("a06.10", "$5$", r"\boxed{x=5}", 1.0),  # value and assignment
    ("a06.11", "$5x - 2y + 9=0$", r"\boxed{5x + 7y + 11=0}", 0.0),  # different lines
    ("a06.13", "$m=4,6,9$", r"\boxed{m=4,6,8}", 0.0),  # last value differs
    ("a07.2", r"$35\%$", r"\boxed{0.35}", 1.0),  # same quantity
    ("a07.4", "$0.35$", r"\boxed{35}", 0.0),  # no percent anywhere
    ("a07.5", "$12$", r"\boxed{12\text{ cm}}", 1.0),  # unit added
    ("a07.6", "$12$", r"\boxed{12\,\mathrm{cm}^2}", 1.0),  # squared unit is not a power of 12
    ("a07.10", "$12500$", r"\boxed{12,500}", 1.0),  # comma group
    ("a07.11", "$12500$", r"\boxed{12{,}500}", 1.0),  # LaTeX comma group
    ("a07.12", "$12500$", r"\boxed{12\,500}", 1.0),  # thin-space group
    ("a07.13", "$12500$", r"\boxed{12\ 500}", 1.0),  # control-space group
    ("a07.15", r"$2\frac{1}{3}$", r"\boxed{\frac{7}{3}}", 1.0),  # mixed number
    ("a07.16", "$0.5$", r"\boxed{.5}", 1.0),  # no leading zero
    ("a08.1", "$C$", r"\boxed{\text{C}}", 1.0),  # wrapped letter
    ("a08.2", "C", r"\boxed{\text{C}}", 1.0),  # wrapped letter, plain gold
    ("a08.4", "$C$", r"\boxed{\textbf{(C)}}", 1.0),  # bold letter in parentheses
    ("a08.5", "$C$", r"\boxed{B}", 0.0),  # other letter
    ("a08.10", "58", "so 500 - 58 = 442.\n\nFinal Answer: **58**", 1.0),  # [lenient mode] bold final answer
    ("a08.11", "58", "so 58 + 442 = 500.\n\nFinal Answer: **442**", 0.0),  # gold only occurs on the way
    ("a08.14", r"$-\frac{1}{2}$", r"\boxed{\frac{-1}{2}}", 1.0),  # place of the sign
    ("a08.15", r"$\frac12$", r"\boxed{0.5}", 1.0),  # short fraction
    ("a08.16", r"$\sqrt{5/k}$", r"\boxed{\frac{\sqrt{5}}{\sqrt{k}}}", 1.0),  # [policy] equal for k>0
    ("a08.17", r"$7\sin(\frac{\pi}{5}x)$", r"\boxed{7 sin(pi*x/5)}", 1.0),  # [policy] plain-text function
    ("a08.18", r"$\frac{3\pi}{4}$", r"\boxed{3*pi/4}", 1.0),  # [policy] plain-text pi
    ("a09.1", "43", r"\boxed{7^{9^{9^{8}}}}", 0.0),
    ("a09.3", "43", r"\boxed{43}", 1.0),  # ordinary sample called from a worker thread must not raise
]


PATIENCE = 120.0
"""Seconds for a comparison, on a machine that is busy with other tests."""


def scores(golds: list[Any], completions: list[Any], **options: Any) -> list[float | None]:
    return build_reward("math", **{"timeout": PATIENCE, **options})(completions=completions, answer=golds)


def grade(completion: Any, gold: Any, **options: Any) -> float | None:
    return scores([gold], [completion], **options)[0]


def all_cases() -> list[float | None]:
    return scores([case[1] for case in CASES], [case[2] for case in CASES])


def in_a_thread() -> list[float | None]:
    found: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: found.append(all_cases()))
    thread.start()
    thread.join()
    return found[0]


def under_asyncio() -> list[float | None]:
    function = build_reward("math", timeout=PATIENCE).components[0].function

    async def ask() -> list[float | None]:
        halves = [CASES[::2], CASES[1::2]]  # two calls at once on one loop
        asked = [function(answer=[case[1] for case in half], completions=[case[2] for case in half]) for half in halves]
        even, odd = await asyncio.gather(*asked)
        return [(odd if index % 2 else even)[index // 2] for index in range(len(CASES))]

    return asyncio.run(ask())


def inside_a_running_loop() -> list[float | None]:
    async def ask() -> list[float | None]:
        return all_cases()

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [all_cases, in_a_thread, under_asyncio, inside_a_running_loop])
def test_the_cases_come_out_right_wherever_they_are_asked(ask: Callable[[], list[float | None]]) -> None:
    found = dict(zip([case[0] for case in CASES], ask(), strict=True))
    assert {case[0]: case[3] for case in CASES} == found


FINAL = [
    (r"\boxed{6} so \boxed{11}", "11"),
    (r"First \boxed{41}. Wrong, it is \boxed{42}", "42"),
    (r"either \boxed{4} or \boxed{5} or \boxed{6}", "4, 5, 6"),  # a row of guesses is no single answer
    (r"The roots are $\boxed{3}$ and $\boxed{5}$.", "3, 5"),
    (r"\boxed{3},\quad\boxed{4}", "3, 4"),
    (r"\boxed{5} I repeat: \boxed{5}", "5"),
    (r"\boxed{\frac{\sqrt{2}}{3}}", r"\frac{\sqrt{2}}{3}"),
    (r"\fbox{3}", "3"),
    (r"\boxed 58.", "58"),
    (r"$\boxed58$", "58"),
    (r"\boxed\frac{1}{2}", r"\frac{1}{2}"),
    (r"\boxed{12} and a cut off \boxed{1", "12"),
    (r"cut off: \boxed{\frac{1}{2}", None),
    (r"5 goes into \boxed{}", None),
    (r"\boxed{5}. I had to answer as \boxed{...}", "5"),
    (r"<think>\boxed{5}</think> So: \boxed{6}", "6"),
    ("<think>\\boxed{5}</think> I am\nnot sure", None),
    (r"I begin. <think>\boxed{5}", None),  # cut off while it was thinking
    (r"no opening tag \boxed{5}</think>\boxed{6}", "6"),
    ("\\boxed{58}\n\nQuestion: and 3+9?\n\\boxed{12}", "58"),  # an invented question
    ("so 500 - 58 = 442.\n\nFinal Answer: **58**", "58"),
    ("**Final Answer**\n\n58", "58"),
    ("<answer> The answer is 58 </answer>", "58"),
    ("The correct option is (C).", "(C)"),
    ("The answer is 58. The best option is to check it again.", "58"),
    ("答案是 58", "58"),
    ("The answer is 58 (see above).", "58"),
    ("The answer is 3.5 and not 4.", "3.5"),
    ("The answer is (a, b).", "(a, b)"),
    ("The answer is not 58.", "not 58"),
    ("The answer is 4. No.\nThe answer is $5$. Checked.", "$5$"),
    ("The answer is 3.5.", "3.5"),
    ("Reasoning.\n#### 58 dollars", "58 dollars"),
    ("Reasoning.\n<answer>\n58\n</answer>", "58"),
    ("58", "58"),
    ("first 500\nthen 58", None),  # the last number in the text is no answer
    ("", None),
    ("   \n", None),
]


@pytest.mark.parametrize(("completion", "answer"), FINAL)
def test_where_the_final_answer_stands(completion: str, answer: str | None) -> None:
    assert final_answer(completion, "announced") == answer


@pytest.mark.parametrize(
    ("completion", "boxed", "last_number"),
    [
        ("The answer is 5.", None, "5"),
        ("first 500\nthen 58", None, "58"),
        (r"\boxed{7} and 58", "7", "7"),
        ("58", None, "58"),
        ("The answer is east.\nOr 3?", None, "east"),
    ],
)
def test_what_counts_without_a_box_is_an_option(completion: str, boxed: str | None, last_number: str | None) -> None:
    assert final_answer(completion, "none") == boxed
    assert final_answer(completion, "last_number") == last_number


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{1} { \boxed{2} } \fbox{\boxed{3} m}", ["1", "2", r"\boxed{3} m"]),
        (r"\boxed{1 \boxed{2}", ["2"]),
        (r"} \boxed{\{1\}}", [r"\{1\}"]),
        (r"\\boxed{3}", ["3"]),
    ],
)
def test_boxes_are_outermost_and_closed(text: str, contents: list[str]) -> None:
    assert [box[2] for box in boxes(text)] == contents


@pytest.mark.parametrize(
    ("gold", "formula"),
    [
        (r"Adding gives 7, so $x=\boxed{\frac{3}{7}}$.", r"\frac{3}{7}"),  # a solution column
        ("18 - 7 = <<18-7=11>>11 pens\n#### 11", "11"),
        (72, "72"),
        (0.5, "0.5"),
        ("$x$", "$x$"),
        (None, None),
        (float("nan"), None),
        ("  ", None),
    ],
)
def test_the_gold_answer_of_a_column(gold: Any, formula: str | None) -> None:
    assert gold_formula(gold) == formula


@pytest.mark.parametrize("gold", ["", "$$", None, float("nan"), r"\frac{1}{", "2 3", r"\frac{1}{0}", "word " * 60])
def test_a_gold_answer_that_cannot_be_read_gives_no_verdict_and_is_counted(gold: Any) -> None:
    logged: dict[str, float] = {}
    reward = build_reward("math")
    found = reward(completions=[r"\boxed{5}", "5\nor 6"], answer=[gold, gold], log_metric=logged.__setitem__)
    assert found == [None, None]
    assert logged == {"invalid_format_rate": 0.5, "math/unread_golds_total": 2.0}


def test_an_answer_that_is_not_found_is_wrong_and_what_was_found_is_logged() -> None:
    extras: dict[str, list[Any]] = {}
    reward = build_reward("math")
    completions = ["no\nidea", [{"role": "assistant", "content": r"so \boxed{\frac12}<|im_end|>"}], r"\boxed{\frac{1}{"]
    assert reward(completions=completions, answer=["0.5"] * 3, log_extra=extras.__setitem__) == [0.0, 1.0, 0.0]
    assert extras == {"extracted": [None, r"\frac12", None]}


def test_a_comparison_that_takes_too_long_is_a_timeout_and_no_wrong_answer() -> None:
    slow = r"\boxed{\prod_{k=1}^{9999}\cos(k)}"
    rollouts = [Rollout(Prompt(0, "?", (1,), {"answer": "43"}), (), (), "stop", text) for text in (slow, r"\boxed{43}")]
    scored = score_rollouts(build_reward("math", timeout=0.5), rollouts, 2)
    assert scored.metrics["rewards/math/timeouts"] == 1
    assert scored.metrics["reward_errors"] == 1
    assert scored.total.isnan().tolist() == [[True, False]]


TOWERS = [
    *("7^{9^{9^{8}}}", "9^{9^{9^{9^9}}}", "10^{10^{10}}", "(10^{10})!", r"\binom{10^9}{10^8}", "99999999999!"),
    *("(9^9)^{9^9}", r"\sqrt{9^{9^{9}}}", r"\sin(9^{9^9})", "10^{-10^{10}}", "e^{e^{e^{e^{e}}}}", "x^{9^{9^9}}"),
    *("9" * 5000, "{" * 400 + "43" + "}" * 400, "(" * 400 + "43" + ")" * 400, r"\frac{1}{" * 60 + "2" + "}" * 60),
    *(r"\sqrt{" * 300 + "43" + "}" * 300, "^" * 900, "-" * 1500 + "43", "43" + "^43" * 40, r"\frac" * 400),
    *(r"\prod_{k=1}^{10^9} k", r"\sum_{k=1}^{10^8}\cos(k)", r"\sum_{i=1}^{10^{10}} i", "2^{10^6}", r"\frac{1}{0}"),
    *("(A)" * 300, "Answer: " * 120, "x=" * 400 + "44", "(1," * 25 + "43" + ")" * 25),
]


def test_no_expression_holds_anything_up() -> None:
    found = scores(["43"] * len(TOWERS), [rf"\boxed{{{tower}}}" for tower in TOWERS])
    assert dict(zip(TOWERS, found, strict=True)) == dict.fromkeys(TOWERS, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback": "lastnumber"}, r"reward\.fallback='lastnumber'.*announced, last_number, none.*mean last_number"),
        ({"timeout": 0}, r"reward\.timeout=0 must be above 0"),
        ({"timeouts": 1}, r"reward\.timeouts is not an option of math.*Did you mean timeout\?"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("math", **options)


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reward=math needs math-verify.*pip install 'grpo-toolbox\[math\]'"):
        build_reward("math")


def rows(*golds: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {index}", "answer": gold} for index, gold in enumerate(golds)]


def test_data_is_checked_before_a_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    reward = build_reward("math", timeout=PATIENCE)
    reward.check_rows(rows("5", r"\sqrt{2}", "east"))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        reward.check_rows(rows("5", r"\frac{1}{", "", r"\heartsuit 5 \&"))
    assert "3 of 4 rows cannot be read" in caplog.text
    with pytest.raises(DataError, match=r"no row has a gold answer in column 'answer'.*'\$\$'.*data\.columns\.answer"):
        reward.check_rows(rows("$$", "2 3"))
    with pytest.raises(DataError, match=r"question 1.*True.*neither text nor a number"):
        reward.check_rows(rows("5", True))


def test_a_grader_that_grades_wrongly_is_found_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_module, "CANARY", ((r"\sqrt{8}", r"3\sqrt{2}", "right"),))
    with pytest.raises(ConfigError, match=r"reward=math does not work here: 3\\sqrt\{2\} for .* came out as 'wrong'"):
        build_reward("math", timeout=PATIENCE).check_rows(rows("5"))


def test_the_grader_is_tried_with_the_answers_of_the_data() -> None:
    golds = (r"\frac{1}{2}", r"2-\sqrt{3}", "$(1,2)$", "C", "1,234")
    prompts = [Prompt(index, "?", (1,), {"answer": gold}) for index, gold in enumerate(golds)]
    (grader,) = graders(build_reward("math", timeout=PATIENCE))
    trial = try_grader(grader, prompts)
    assert not isinstance(trial, str)
    assert trial.right == dict.fromkeys(("as in the data", "bare", "boxed", "hash", "sentence", "label", "tags"), 1.0)
    assert trial.wrong == {"empty text": 0.0, "the prompt": 0.0, "another row's answer": 0.0}


TRL = [
    *(("42", r"\boxed{42}"), ("42", "The answer is $42$"), ("42", r"\boxed{43}"), ("42", r"\boxed{42} dollars")),
    *((r"$\frac{3}{7}$", r"\boxed{\frac{6}{14}}"), (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}"), ("$x=5$", r"\boxed{y=5}")),
    *(("$x^2-1$", r"\boxed{(x-1)(x+1)}"), (r"$\{1,2\}$", r"\boxed{\{2,1\}}"), ("$(1,2)$", r"\boxed{(2,1)}")),
    *((r"$\sqrt{19}$", r"\boxed{4.3588989}"), ("$x<3$", r"\boxed{(-\infty,3)}"), ("42", "")),
]
OTHERWISE: dict[str, tuple[str, str, float | None, float]] = {
    "several boxes become a set": ("42", r"\boxed{41}, no: \boxed{42}", 0.0, 1.0),
    "a gold answer in bare LaTeX is its first number": (r"2-\sqrt{3}", r"\boxed{2}", 1.0, 0.0),
    "and the right answer to it is wrong": (r"2-\sqrt{3}", r"\boxed{2-\sqrt{3}}", 0.0, 1.0),
    "a letter is no gold answer": ("C", r"\boxed{\text{C}}", None, 1.0),
    "words are none": ("Yes", r"\boxed{\text{No}}", None, 0.0),
    "an announced number without dollars is no answer": ("42", "The answer is 42", 0.0, 1.0),
    "a bare completion is no answer": ("42", "42", 0.0, 1.0),
    "thin spaces make two numbers": ("$12500$", r"\boxed{12\,500}", 0.0, 1.0),
    "a percentage is not its hundredth": (r"$35\%$", r"\boxed{0.35}", 0.0, 1.0),
    "a half is not 0.5": ("$0.5$", r"\boxed{\frac12}", 0.0, 1.0),
    "plain-text functions are letters": (r"$\frac{3\pi}{4}$", r"\boxed{3*pi/4}", 0.0, 1.0),
    "a pair is a set": (r"$\{1,2\}$", r"\boxed{(1,2)}", 1.0, 0.0),
    "centimetres are metres": (r"$12\text{ cm}$", r"\boxed{12\text{ m}}", 1.0, 0.0),
    "capitals and small letters are one": ("$R^2-r^2$", r"\boxed{0}", 1.0, 0.0),
}


def trl_says(gold: str, completion: str) -> float | None:
    from trl.rewards import accuracy_reward

    said: float | None = accuracy_reward([[{"role": "assistant", "content": completion}]], [gold])[0]
    return said


def test_trl_agrees_where_it_is_right() -> None:
    ours = scores([gold for gold, _ in TRL], [completion for _, completion in TRL])
    assert [trl_says(*pair) for pair in TRL] == ours


@pytest.mark.parametrize("name", OTHERWISE)
def test_where_trl_says_otherwise(name: str) -> None:
    gold, completion, theirs, ours = OTHERWISE[name]
    assert (trl_says(gold, completion), grade(completion, gold)) == (theirs, ours)


@pytest.mark.slow
def test_three_hundred_easy_answers_a_second() -> None:
    golds = [rf"\frac{{{index % 97 + 1}}}{{{index % 89 + 2}}}" for index in range(3000)]
    completions = [
        "Let me see. " * 100 + rf"\boxed{{\dfrac{{{index % 97 + 1}}}{{{index % 89 + 2}}}}}" for index in range(3000)
    ]
    grade("5", "5")
    began = time.perf_counter()
    assert scores(golds, completions) == [1.0] * 3000
    assert time.perf_counter() - began < 10.0
