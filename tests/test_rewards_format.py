"""format: layouts, patterns, prefilled tags, partial credit. Ids such as c03.1 number checked cases."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import build_reward, formats
from grpo_toolbox.rewards.formats import LAYOUTS, has_layout, layout_tags, tag_credit

BLOCKS = "<think>a</think>\n<answer>5</answer>"

LAYOUT = [
    ("c01.2", "think", "<think>\n", "3 dozen is 36.\nThe answer is 36.", False),
    ("c01.3", "think", "<think>\n", "<think>\n3 dozen is 36.\n</think>\nThe answer is 36.", False),
    ("c01.4", "think", "", "<think>\n3 dozen is 36.\n</think>\nThe answer is 36.", True),
    ("c01.5", "think", "", "3 dozen is 36.\n</think>\nThe answer is 36.", False),
    ("prefilled", "think", "<think>\n", "3 dozen is 36.\n</think>\nThe answer is 36.", True),
    ("no text", "think", "", "<think>a</think>\n", False),
    ("only a stop token", "think", "", "<think>a</think><|im_end|>", False),
    ("closed twice", "think", "", "<think>a</think> b </think>", False),
    ("blank thought", "think", "", "<think> \n</think>The answer is 36.", False),
    ("prefilled blank", "think", "<think>\n", "</think>The answer is 36.", False),
    ("prefilled answer", "think_answer", "<think>\n", "a</think>\n<answer>5</answer>", True),
    ("prefilled reasoning", "reasoning_answer", "<reasoning>\n", "a</reasoning>\n<answer>5</answer>", True),
    ("prefilled, other tag", "think_answer", "<reasoning>\n", "a</reasoning>\n<answer>5</answer>", False),
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
    ("no width", "think_answer", "", "<think>\u200b</think>\n<answer>5</answer>", False),
    ("no-break blanks", "think_answer", "", "<think>\u00a0</think>\n<answer>5</answer>", False),
    ("windows lines", "think_answer", "", "<think>\r\na\r\n</think>\r\n<answer>\r\n5\r\n</answer>\r\n", True),
    ("blanks inside tags", "think_answer", "", "<think >a</think >\n<answer>5</answer>", False),
    ("other signs", "think_answer", "", "<think>if a < b > c, x</think>\n<answer>a<b</answer>", True),
    ("thought in the answer", "think_answer", "", "<think>a</think>\n<answer><think>5</answer>", False),
    ("swapped", "think_answer", "", "</think>a<think>\n<answer>5</answer>", False),
    ("never answered", "think_answer", "", "<think>a</think>\n<answer>5", False),
    ("other layout", "think_answer", "", "<reasoning>a</reasoning>\n<answer>5</answer>", False),
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
    [
        *({"pattern": "a", "layout": "think"}, {"layout": "thinking"}, {"pattern": "["}, {"pattern": "a", "foo": 1}),
        *({"whole": True}, {"credit": "some"}, {"credit": "tags", "pattern": "a"}, {"saturate": 0.5}),
        *({"credit": "tags", "saturate": 0}, {"credit": "tags", "saturate": 1.5}, {"credit": "tags", "saturate": True}),
        *({"trailing_cost": -1}, {"trailing_cost": float("nan")}, {"trailing_cost": "much"}),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.(pattern|layout|foo|whole|credit|saturate|trailing_cost)"):
        build_reward("format", **options)


@pytest.mark.parametrize(
    "text", ["<think>" + "a" * 200_000, "<think>" * 30_000, " " * 200_000 + "x", "<" * 200_000, "<|pad|>" * 30_000]
)
def test_layouts_take_linear_time(text: str) -> None:  # c06.8 at 200,000 characters
    began = time.process_time()
    assert build_reward("format")(completions=[text]) == [0.0]
    assert time.process_time() - began < 5  # quadratic time would take minutes


# ---- prefilled tags


THOUGHT = "3 dozen is 36.\n</think>\nThe answer is 36."


def conversation(*said: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=False)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Think first. <think>\n", 1.0),
        ("Think first.", 0.0),
        ("Write <think> before you think.", 0.0),  # names the tag, opens nothing
        (conversation("3 dozen?", "<think>\n"), 1.0),
        (conversation("3 dozen?", "<think>\nWell: "), 1.0),
        (conversation("3 dozen? <think>"), 0.0),  # the user's, not the assistant's
    ],
)
def test_a_prefilled_tag_is_read_from_the_prompt(prompt: object, expected: float) -> None:
    reward = build_reward("format", layout="think")
    assert reward(completions=[THOUGHT], prompts=[prompt]) == [expected]
    assert build_reward("format", layout="think", prefill="")(completions=[THOUGHT], prompts=[prompt]) == [0.0]


def test_a_tag_that_is_opened_again_after_the_prompt_opened_it_is_wrong() -> None:  # c01.3, by the prompt
    reward = build_reward("format", layout="think")
    assert reward(completions=[f"<think>\n{THOUGHT}"], prompts=["Think. <think>\n"]) == [0.0]


def test_completions_that_all_close_what_none_opened_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    formats._say_prefilled.cache_clear()
    reward = build_reward("format", layout="think")
    with caplog.at_level(logging.WARNING):
        reward(completions=[THOUGHT, f"<think>{THOUGHT}"])
        assert not caplog.records  # one of them opens it, so no template does
        for _ in range(2):
            reward(completions=[THOUGHT, THOUGHT])
    assert [record.getMessage().count("reward.prefill='<think>\\n'") for record in caplog.records] == [1]


# ---- partial credit

FORM = "<reasoning>a</reasoning>\n<answer>5</answer>"

CREDIT = [  # what four tags of a quarter each are worth; by tags, by tags that are there once
    (FORM, 1.0, 1.0),
    (f"{FORM}\n", 1.0, 1.0),
    ("<reasoning>a</reasoning>", 0.5, 0.5),
    ("<answer>5</answer>", 0.5, 0.5),
    ("5", 0.0, 0.0),
    (f"{FORM} Hope that helps!", 0.984, 0.984),  # 16 characters behind the block, the blank before them left out
    (f"{FORM}{'x' * 400}", 0.6, 0.6),
    (f"{FORM}{'x' * 99_999}", 0.0, 0.0),  # a fine has an end
    ("<reasoning>a<reasoning>b</reasoning>\n<answer>5</answer>", 1.0, 0.75),
    (f"{FORM}\n<answer>6</answer>", 1.0, 0.5),
    ("<reasoning></reasoning><answer></answer>" * 50, 1.0, 0.0),  # tags by the dozen
    ("<REASONING>a</REASONING>", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "tags", "once"), CREDIT)
def test_each_tag_earns_its_share(text: str, tags: float, once: float) -> None:
    for credit, expected in (("tags", tags), ("tags_once", once)):
        reward = build_reward("format", layout="reasoning_answer", credit=credit)
        assert reward(completions=[text, f"{text}<|im_end|>"]) == pytest.approx([expected] * 2)


def test_layout_think_has_two_tags_and_text_behind_them_is_free() -> None:
    reward = build_reward("format", layout="think", credit="tags_once")
    assert reward(completions=["<think>a</think>" + "b" * 500, "<think>a", "a"]) == [1.0, 0.5, 0.0]


def test_a_prefilled_tag_earns_its_share() -> None:
    reward = build_reward("format", layout="think", credit="tags_once", prefill="<think>\n")
    assert reward(completions=["a</think>b", "a", "<think>a</think>b"]) == [1.0, 0.5, 0.5]


def test_credit_of_saturate_and_more_is_full_credit() -> None:
    reward = build_reward("format", layout="reasoning_answer", credit="tags_once", saturate=0.75)
    completions = [FORM, f"{FORM} Hope that helps!", "<reasoning>a</reasoning><answer>", "<answer>5</answer>", "5"]
    assert reward(completions=completions) == pytest.approx([1.0, 1.0, 1.0, 2 / 3, 0.0])


def test_a_trailing_cost_of_0_charges_nothing() -> None:
    reward = build_reward("format", layout="reasoning_answer", credit="tags", trailing_cost=0)
    assert reward(completions=[f"{FORM}{'x' * 400}"]) == [1.0]


def test_partial_credit_still_logs_the_share_without_the_form() -> None:
    logged: dict[str, float] = {}
    reward = build_reward("format", layout="reasoning_answer", credit="tags")
    assert reward(completions=[FORM, f"{FORM} x", "5", "6"], log_metric=logged.__setitem__)[1] == pytest.approx(0.999)
    assert logged == {"invalid_format_rate": 0.75}


def test_a_bonus_may_fade_once_the_form_is_learnt() -> None:
    fading = {"name": "adaptive", "initial": 0.2, "high": 0.9, "up": 1.0, "down": 0.5, "lowest": 0.05}
    reward = build_reward("weighted_sum", components=[{"name": "format", "weight": fading}])
    weights = []
    for share in (0.5, 1.0, 1.0, 1.0):  # of four completions in form
        weights.append(reward.at(None).components[0].weight)
        reward.observe([[1.0] * int(4 * share) + [0.0] * (4 - int(4 * share))])
    assert weights == pytest.approx([0.2, 0.2, 0.1, 0.05])


# ---- any text

WORDS = st.text(st.sampled_from("ab5<>/ \n"), max_size=12)


@settings(deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), parts=st.tuples(WORDS, WORDS, WORDS))
def test_blocks_written_by_the_rules_have_the_layout(layout: str, parts: tuple[str, str, str]) -> None:
    tags = layout_tags(layout)
    first, second = f"x{parts[0]}", f"5{parts[1]}"
    blanks = " " * len(parts[2])
    behind = second if len(tags) == 2 else f"{blanks}{tags[2]}{second}{tags[3]}"
    text = f"{blanks}{tags[0]}{first}{tags[1]}{behind}"
    assert has_layout(text, layout)
    assert tag_credit(text, layout, once=True) == 1.0
    for tag in tags:  # one tag more, or one less
        assert not has_layout(text + tag, layout)
        assert not has_layout(text.replace(tag, "", 1), layout)
        assert tag_credit(text.replace(tag, "", 1), layout, once=True) < 1.0


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"])).map("".join))
def test_what_has_the_layout_earns_full_credit_and_credit_is_a_share(text: str) -> None:
    for layout in ("think_answer", "think"):
        for once in (False, True):
            credit = tag_credit(text, layout, once)
            assert 0.0 <= credit <= 1.0
            assert credit == 1.0 or not has_layout(text, layout)


# ---- against TRL

SAME = [
    "<think>\na\n</think>\nb",
    "<think>a</think> b",
    "a",
    "<think>a",
    "<think>a<think>b</think> c",
    "<THINK>a</THINK>b",
]
THERE_OTHERWISE = {
    " <think>a</think> b": (0.0, 1.0),  # a blank before it is no fault
    "<think>a</think>": (1.0, 0.0),  # nothing is answered
    "<think></think> b": (1.0, 0.0),  # nothing is thought
    "<think>a</think> b </think>": (1.0, 0.0),  # a second closing tag
}


def test_trl_agrees_where_it_is_right_and_differs_where_named() -> None:
    from trl.rewards import think_format_reward

    reward = build_reward("format", layout="think")
    for text in [*SAME, *THERE_OTHERWISE]:
        completions = [[{"role": "assistant", "content": text}]]
        both = (think_format_reward(completions)[0], reward(completions=completions)[0])
        assert both == THERE_OTHERWISE.get(text, (both[1], both[1])), text
