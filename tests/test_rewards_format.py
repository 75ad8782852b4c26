"""format and length_penalty. Ids such as c03.1 number checked cases."""

from __future__ import annotations

import time

import pytest

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import build_reward

BLOCKS = "<think>a</think>\n<answer>5</answer>"

LAYOUT = [
    ("c01.2", "think", "<think>\n", "3 dozen is 36.\nThe answer is 36.", False),
    ("c01.3", "think", "<think>\n", "<think>\n3 dozen is 36.\n</think>\nThe answer is 36.", False),
    ("c01.4", "think", "", "<think>\n3 dozen is 36.\n</think>\nThe answer is 36.", True),
    ("c01.5", "think", "", "3 dozen is 36.\n</think>\nThe answer is 36.", False),
    ("prefilled", "think", "<think>\n", "3 dozen is 36.\n</think>\nThe answer is 36.", True),
    ("no text", "think", "", "<think>a</think>\n", False),
    ("c02.1", "think_answer", "", "<think>\n1. pens\n2. caps\n</think>\n<answer>5</answer>", True),
    ("c02.3", "reasoning_answer", "", "<reasoning>\none\n\nthree\n</reasoning>\n<answer>\n5\n</answer>\n", True),
    ("c02.4", "think_answer", "", "<think>short</think><answer>5</answer>", True),
    ("c03.1", "think_answer", "", "<think>a</think>   \n\n <answer>5</answer>", True),
    ("c03.3", "think_answer", "", f"{BLOCKS}   \n", True),
    ("blanks before", "think_answer", "", f" \n{BLOCKS}", True),
    ("c03.4", "think_answer", "", "<think>a</think> so <answer>5</answer>", False),
    ("c03.6", "think_answer", "", f"{BLOCKS}\nHope that helps!", False),
    ("text before", "think_answer", "", f"Sure.\n{BLOCKS}", False),
    ("c04.1", "think_answer", "", "<think>\na\n</think>\n<answer>\n5\n</answer>\n</answer>", False),
    ("c04.2", "think_answer", "", f"{BLOCKS}\n<answer>6</answer>", False),
    ("c04.3", "think_answer", "", "<think>a <think>b</think> c</think>\n<answer>5</answer>", False),
    ("c04.5", "think_answer", "", "<answer>5</answer>\n<think>a</think>", False),
    ("c04.6", "think_answer", "", "<think>I will write <answer>4</answer> later</think>\n<answer>5</answer>", False),
    ("c05.1", "think_answer", "", f"{BLOCKS}<|im_end|>", True),
    ("c05.2", "think_answer", "", f"{BLOCKS}<|im_end|><|endoftext|><|endoftext|>", True),
    ("c06.1", "think_answer", "", "<think></think>\n<answer>5</answer>", False),
    ("c06.2", "think_answer", "", "<think>\n\n</think>\n\n<answer>5</answer>", False),
    ("blank answer", "think_answer", "", "<think>a</think>\n<answer> </answer>", False),
    ("c06.5", "think_answer", "", "<THINK>a</THINK>\n<ANSWER>5</ANSWER>", False),
    ("c06.6", "think_answer", "", f"```\n{BLOCKS}\n```", False),
    ("c06.8", "think_answer", "", "<think>" + "a" * 5000, False),
]


@pytest.mark.parametrize("form", ["text", "messages"])
@pytest.mark.parametrize(("case", "layout", "prefill", "completion", "expected"), LAYOUT)
def test_layouts(case: str, layout: str, prefill: str, completion: str, expected: bool, form: str) -> None:
    said = completion if form == "text" else [{"role": "assistant", "content": completion}]
    reward = build_reward("format", layout=layout, prefill=prefill)
    assert reward(completions=[said]) == [float(expected)]


def test_a_pattern_is_found_anywhere_and_its_dot_matches_newlines() -> None:
    reward = build_reward("format", pattern="<answer>.*</answer>")
    assert reward(completions=["so\n<answer>\n5\n</answer> yes", "<answer>5", "5"]) == [1.0, 0.0, 0.0]


def test_whole_needs_the_whole_completion() -> None:
    reward = build_reward("format", pattern="<answer>.*</answer>", whole=True)
    assert reward(completions=["<answer>5</answer><|im_end|>", "so <answer>5</answer>"]) == [1.0, 0.0]


def test_neither_pattern_nor_layout_is_think_answer() -> None:
    assert build_reward("format")(completions=[BLOCKS, "5"]) == [1.0, 0.0]


def test_invalid_format_rate_is_the_share_without_the_form() -> None:
    logged: dict[str, float] = {}
    build_reward("format")(completions=[BLOCKS, "5", "6", "7"], log_metric=logged.__setitem__)
    assert logged == {"invalid_format_rate": 0.75}


@pytest.mark.parametrize(
    "options",
    [{"pattern": "a", "layout": "think"}, {"layout": "thinking"}, {"pattern": "["}, {"pattern": "a", "foo": 1}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.(pattern|layout|foo)"):
        build_reward("format", **options)


@pytest.mark.parametrize(
    "text", ["<think>" + "a" * 200_000, "<think>" * 30_000, " " * 200_000 + "x", "<" * 200_000, "<|pad|>" * 30_000]
)
def test_layouts_take_linear_time(text: str) -> None:  # c06.8 at 200,000 characters
    began = time.process_time()
    assert build_reward("format")(completions=[text]) == [0.0]
    assert time.process_time() - began < 5  # quadratic time would take minutes


def test_length_penalty_falls_from_0_at_the_target_to_minus_1_at_twice_the_target() -> None:
    # target 100: 150 characters are half a target too long, 200 a whole one, more does not cost more
    reward = build_reward("length_penalty", target_chars=100)
    assert reward(completions=["", "a" * 100, "a" * 150, "a" * 200, "a" * 999]) == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("target", [0, -5, True, 2.5])
def test_a_target_that_is_no_number_of_characters_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match=r"reward\.target_chars"):
        build_reward("length_penalty", target_chars=target)
