"""`toolbox reward check`: every member passes on data it can grade, and planted broken graders are caught and named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import Result, toolbox, write_module
from grpo_toolbox.rewards import Reward, build_reward
from grpo_toolbox.rewards.check import check_reward
from grpo_toolbox.rewards.golds import FORMS, from_pattern, other_digit, other_sign
from grpo_toolbox.rewards.language import LANGUAGES, language_share, sample
from grpo_toolbox.rewards.schema import validator
from grpo_toolbox.rewards.schema_golds import example
from grpo_toolbox.types import Prompt

GRADER = """
import re, time

def right(completions, answer):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

def always(completions, answer):
    return [1.0] * len(completions)

def never(completions, answer):
    return [0.0] * len(completions)

def loses_the_sign(completions, answer):
    return [float(text.lower().lstrip("-") == gold.lower().lstrip("-")) for text, gold in zip(completions, answer)]

def first_digit(completions, answer):
    return [float(text[-1:] == gold[-1:]) for text, gold in zip(completions, answer)]

def pays_nothing_said(completions, answer):
    return [float(not text or text == gold) for text, gold in zip(completions, answer)]

_kept = {}

def one_at_a_time(completions, answer):
    _kept["texts"] = completions
    time.sleep(0.002)
    return [float(text == gold) for text, gold in zip(_kept["texts"], answer)]

def short_only(completions, answer):
    if any(len(text) > 5000 for text in completions):
        raise ValueError("string too long")
    return right(completions, answer)

def raises(completions, answer):
    return [float(text == row["gold"]) for text, row in zip(completions, answer)]

def boxed_two_or_zero(completions, answer):
    return [2.0 * (f"boxed{{{gold}}}" in text) for text, gold in zip(completions, answer)]

def minus_one(completions, answer, **kwargs):
    return [1.0 if text == gold else -1.0 for text, gold in zip(completions, answer)]

def everything(completions, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, kwargs["answer"])]

def always_and_blind(completions, **kwargs):
    return [0.5 for _ in completions]

async def later(completions, answer):
    return right(completions, answer)

def table(completions, parts):
    return [float(str(part["sum"]) == text) for text, part in zip(completions, parts)]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 24 additions and subtractions, each with its answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [
        {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "parts": {"sum": a + b}}
        for a, b in zip(range(3, 27), [*range(-40, -28), *range(10, 22)], strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def check(*words: str) -> Result:
    return toolbox("reward", "check", "data=file", "data.path=rows.jsonl", "data.eval_size=0", *words)


def check_own(function: str) -> Result:
    return check("reward=custom", f"reward.name={write_module(GRADER)}:{function}", "--n", "24")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("always", "wrong answers are paid like right ones"),
        ("never", "no right answer is ever paid"),
        ("loses_the_sign", "sign: 24 of 24 wrong answers are paid"),
        ("first_digit", "wrong answers are paid like right ones"),
        ("pays_nothing_said", "empty text: 24 of 24 wrong answers are paid"),
        ("one_at_a_time", "thread safety"),
        ("short_only", "10k characters: it fails on 8 of 8"),
        ("raises", "gold answer: it fails on 24 of 24"),
        ("always_and_blind", "every completion earns 0.5"),
    ],
)
def test_a_broken_grader_is_caught_and_named(function: str, said: str) -> None:
    result = check_own(function)
    assert result.code == 1, result
    problems = [line for line in result.out.splitlines() if line.startswith(f"{function}: ")]
    assert any(said in line for line in problems), result.out
    assert result.out.splitlines()[-1].endswith(f": {function}")


@pytest.mark.parametrize("function", ["right", "boxed_two_or_zero", "minus_one", "everything"])
def test_a_grader_that_is_right_passes(function: str) -> None:
    result = check_own(function)
    assert result.code == 0, result.out
    assert "same from 4 threads" in result.out
    assert "nothing wrong was found" in result.out


def test_examples_show_completion_and_prompt() -> None:
    out = check_own("loses_the_sign").out
    assert "'37' earned 1.0 for the prompt 'What is 3 + -40?'" in out


def test_a_judge_over_a_network_is_not_asked_and_said_to_be() -> None:
    result = check_own("later")
    assert (result.code, "was not asked" in result.out) == (0, True)


def test_a_column_that_holds_no_answer_is_said_to_have_no_golds() -> None:
    result = check_own("table")
    assert result.code == 0
    assert "right answers cannot be written: column 'parts' is neither text nor numbers" in result.out


@pytest.mark.parametrize(
    "words",
    [
        ("reward=exact_match",),
        ("reward=exact_match", "reward.extract=boxed"),
        ("reward=exact_match", "reward.extract=hash"),
        ("reward=exact_match", "reward.extract=whole"),
        ("reward=exact_match", "reward.extract=regex", r"reward.pattern='Answer:\s*(-?\d+)'"),
        ("reward=numeric", "reward.require_marker=true"),
        ("reward=math",),
        ("reward=format", "reward.layout=think_answer"),
        ("reward=format", "reward.pattern='<answer>.+</answer>'"),
        ("reward=weighted_sum",),
        ("reward=cosine_length", "reward.max_tokens=100"),
        ("reward=cosine_length", "reward.max_tokens=100", "reward.correct=math"),
        ("reward=length_penalty",),
        ("reward=soft_overlong", "reward.max_tokens=100", "reward.cache=20"),
        ("reward=token_cost",),
        ("reward=repetition_penalty",),
        ("reward=repetition_penalty", "reward.unit=words"),
        ("reward=language_consistency",),
        ("reward=language_consistency", "reward.language=ja", "reward.part=thinking"),
        ("reward=hack_monitor", "reward.charge=0.5"),
        ("reward=json_schema", f"reward.schema={Path(__file__).parents[1]}/examples/order_email.json"),
    ],
)
def test_the_members_pass(words: tuple[str, ...]) -> None:
    result = check(*words)
    assert result.code == 0, result.out
    assert "gold answer" in result.out


def test_a_reward_of_groups_is_not_blamed_for_what_shows_in_groups_alone() -> None:
    result = check("reward=duplicate_penalty")
    assert result.code == 0
    assert "here each was alone" in result.out


def test_gold_documents_pass_json_schema_and_a_changed_field_does_not() -> None:
    document = {"order_id": "ORD-48213", "lines": [{"count": 2, "size": None}], "total": 1.5, "paid": True}
    prompts = [Prompt(i, f"mail {i}", (), {"answer": {**document, "total": i + 0.5}}) for i in range(4)]
    number: dict[str, Any] = {"type": "number"}
    line = {"type": "object", "properties": {"count": {"type": "integer"}, "size": {"type": ["null", "integer"]}}}
    properties = {"order_id": {"pattern": "^ORD-[0-9]{5}$"}, "lines": {"type": "array", "items": line}}
    schema = {"type": "object", "properties": {**properties, "total": number, "paid": {"type": "boolean"}}}
    for credit in ("fields", "valid"):
        (report,) = check_reward(build_reward("json_schema", schema=schema, credit=credit), prompts)
        kinds = {kind.name: (kind.must, kind.accepted, kind.rows) for kind in report.kinds}
        assert report.problems == []
        assert kinds["gold answer"] == ("accept", 4, 4)
        assert kinds["a field is missing"] == kinds["another field"] == ("reject", 0, 4)
        assert ("another value" in kinds) == (credit == "fields")  # the schema allows another value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}, "b": {"enum": ["x", "y"]}}},
        {"type": "array", "items": {"type": "integer", "minimum": 5, "multipleOf": 3}, "minItems": 2},
        {"type": "array", "prefixItems": [{"type": "null"}, {"const": 7}], "minItems": 3, "items": {"type": "boolean"}},
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        {"allOf": [{"properties": {"a": {"type": "number", "exclusiveMinimum": 1}}}, {"required": ["a"]}]},
        {"$ref": "#/$defs/code", "$defs": {"code": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"}}},
        {
            "type": "object",
            "required": ["a"],
            "properties": {"b": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"type": "integer", "maximum": -1}},
        },
        {"type": "string", "format": "email"},
    ],
)
def test_a_document_is_made_that_a_schema_allows(schema: dict[str, Any]) -> None:
    assert validator(schema)(example(schema)), example(schema)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sample_of_each_language_is_in_it(language: str) -> None:
    text = sample(language, "all")
    assert text is not None
    assert language_share(text, language) == 1.0
    other = "ru" if LANGUAGES[language] == ("latin",) else "en"
    assert language_share(sample(other, "all") or "", language) == 0.0


def test_each_part_of_a_sum_is_tried_by_itself() -> None:
    name = write_module(GRADER)
    parts = f"[{{name: numeric, weight: 1.0}}, {{name: '{name}:always', weight: 0.5}}]"
    result = check("reward=weighted_sum", f"reward.components={parts}")
    assert result.code == 1
    assert "1 of" not in [line for line in result.out.splitlines() if line.startswith("numeric: ")]
    assert "always: " in result.out
    assert "disagrees with always" in result.out


def test_a_held_out_verifier_is_tried_too() -> None:
    result = check("reward=numeric", f"reward.heldout={write_module(GRADER)}:never")
    assert result.code == 1
    assert "heldout/never: gold answer: no right answer is ever paid" in result.out


def test_no_model_is_looked_for() -> None:
    assert check("reward=numeric", "model=file", "model.path=/not/there").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--n", "1"), "--n 1 is not an option"),
        (("--n=many",), "--n many is not an option"),
        (("reward=nummeric",), "Did you mean numeric?"),
        (("reward=exact_match", "reward.extract=boxd"), "Did you mean boxed?"),
        (("reward=reward_model", "reward.path=x"), "nothing to check without"),
        (("reward=numeric", "reward.column=solution"), "needs column 'solution'"),
    ],
)
def test_mistakes_are_refused_in_a_line(words: tuple[str, ...], said: str) -> None:
    result = check(*words)
    assert result.code == 1
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def test_the_subcommand_is_named() -> None:
    assert toolbox("reward").code == 2
    assert "Did you mean check?" in "".join(toolbox("reward", "chek").err)
    assert "--n ROWS" in toolbox("reward", "check", "--help").out
    assert "reward " in toolbox("--help").out


# ---- the same from Python


def prompts(*columns: dict[str, object]) -> list[Prompt]:
    return [Prompt(index, f"question {index}", (), one) for index, one in enumerate(columns)]


def problems(reward: Reward, *columns: dict[str, object]) -> list[str]:
    return [problem for report in check_reward(reward, prompts(*columns)) for problem in report.problems]


def test_latex_golds_of_every_kind_pass_math() -> None:
    golds = [
        r"2-\sqrt{3}",
        r"\dfrac{9}{4}",
        "(2,3)",
        "B",
        r"\frac{1}{2}",
        "12,500",
        r"\{1,2\}",
        "[0,1)",
        "x=5",
        "Paris",
    ]
    assert problems(build_reward("math"), *({"answer": gold} for gold in golds)) == []


def test_tables_and_programs_pass_the_code_reward() -> None:
    rows = (
        {
            "tests": [
                {"call": "add", "args": [1, 2], "expected": 3},
                {"call": "add", "args": [[1], [2]], "expected": [1, 2]},
            ]
        },
        {"tests": [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16\n"}]},
        {"tests": "assert square(3) == 9", "solution": "def square(x):\n    return x * x"},
        {"tests": "assert cube(2) == 8"},
    )
    reports = check_reward(build_reward("code"), prompts(*rows))
    assert reports[0].problems == []
    assert [(kind.rows, kind.accepted) for kind in reports[0].kinds if kind.name == "gold answer"] == [(3, 3)]
    assert "1 of 4 rows have no answer that can be written" in reports[0].notes


@pytest.mark.parametrize(
    ("answer", "sign", "digit"),
    [
        ("5", "-5", "6"),
        ("-5", "5", "-6"),
        ("0", None, "1"),  # -0 is 0
        ("9", "-9", "8"),
        ("1,234", "-1,234", "2,234"),
        ("$5", "-$5", "$6"),
        (r"\frac{1}{2}", r"-(\frac{1}{2})", r"\frac{2}{2}"),
        (r"\pm 3", None, r"\pm 4"),  # -(±3) is ±3
        ("(2,3)", None, "(3,3)"),
        ("5 m^2", "-(5 m^2)", "6 m^2"),  # not the exponent
        ("Paris", None, "Qaris"),
        ("zz", None, "yz"),
        (r"\text{east}", None, None),
    ],
)
def test_a_sign_and_a_digit_change_the_value(answer: str, sign: str | None, digit: str | None) -> None:
    assert (other_sign(answer), other_digit(answer)) == (sign, digit)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"<answer>(.*?)</answer>", "<answer>7</answer>"),
        (r"(?i)final answer\s*[:=]\s*(\d+)$", "final answer : 7"),
        (r"Result => (-?\d+(?:\.\d+)?)", "Result => 7"),
        (r"\\boxed\{(.*)\}", r"\boxed{7}"),
    ],
)
def test_a_text_is_guessed_from_a_plain_pattern(pattern: str, text: str) -> None:
    assert from_pattern(pattern, "7") == text


def test_every_form_holds_the_answer() -> None:
    assert all("7" in form("7") for form in FORMS.values())
