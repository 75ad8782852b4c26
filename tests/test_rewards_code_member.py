"""reward=code from end to end: finding the program, scores and what is logged, refusals, a run that trains on it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import SHORT, refused, toolbox
from grpo_toolbox.errors import ConfigError, DataError, RewardError
from grpo_toolbox.rewards import Reward, build_reward, combine
from grpo_toolbox.rewards.code import member
from grpo_toolbox.rewards.code.extraction import fenced_blocks, find_code, parse
from grpo_toolbox.rewards.code.member import code
from grpo_toolbox.rewards.code.records import SandboxError
from sandboxes import sandboxes

DOUBLE = "def double(n):\n    return 2 * n"
WRONG = "def double(n):\n    return n + 4"
TESTS = "assert double(4) == 8\nassert double(5) == 10"


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nThat doubles."


@pytest.fixture(scope="module")
def reward() -> Reward:
    sandboxes("auto")
    return build_reward("code", concurrency=2, timeout=5.0)


# ---- finding the program

EXTRACTIONS = {
    "a block": (fenced("x = 1"), "x = 1"),
    "the last of two": (f"{fenced('x = 1')}\n{fenced('x = 2')}", "x = 2"),
    "one that says python among others": (f"{fenced('x = 1')}\n{fenced('x=1 # shell', 'bash')}", "x = 1"),
    "no language": (fenced("x = 1", ""), "x = 1"),
    "closed within its last line": ("```python\nx = 1```", "x = 1"),
    "a byte order mark": (f"\ufeff{fenced(chr(0xFEFF) + 'x = 1')}", "x = 1"),
    "a language beats none": (f"{fenced('x = 1', 'py')}\n{fenced('output', '')}", "x = 1"),
    "only other languages": (fenced("echo 1", "bash"), None),
    "capitals and attributes": (fenced("x = 1", 'Python title="a.py"'), "x = 1"),
    "braces": (fenced("x = 1", "{.python .numberLines}"), "x = 1"),
    "tildes": ("~~~python\nx = 1\n~~~", "x = 1"),
    "four marks": ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
    "never closed": ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
    "in a list": ("1. so:\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1"),
    "windows lines": ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
    "a form feed is no line's end": ("```python\nx = 'a\x0cb'\n```", "x = 'a\x0cb'"),
    "empty blocks": ("```python\n\n```", None),
    "before the reasoning ended": (f"<think>{fenced('x = 1')}</think>\nI do not know.", None),
    "behind the reasoning": (f"<think>{fenced('x = 1')}</think>\n{fenced('x = 2')}", "x = 2"),
    "reasoning without end": (f"<think>{fenced('x = 1')}", None),
    "a prefilled tag": (f"I try {fenced('x = 1')}</think>{fenced('x = 2')}", "x = 2"),
    "no fence, Python": ("def f():\n    return 1\n", "def f():\n    return 1\n"),
    "no fence, prose": ("The answer is simply to double it.", None),
    "no fence, a word": ("Sorry", None),
    "no fence, a number": ("8", None),
    "a call": ("print(8)", "print(8)"),
    "nothing": ("", None),
    "inline marks": ("Use `double` or ```double```, as you like.", None),
}


@pytest.mark.parametrize("name", EXTRACTIONS)
def test_the_program_of_a_completion_is_found(name: str) -> None:
    text, program = EXTRACTIONS[name]
    assert find_code(text) == program


def test_first_all_and_whole() -> None:
    text = f"{fenced('x = 1')}\n{fenced('echo', 'bash')}\n{fenced('y = 2')}"
    assert find_code(text, "first") == "x = 1"
    assert find_code(text, "all") == "x = 1\n\ny = 2"
    assert find_code(text, "whole") == text
    assert find_code("  ", "whole") is None


def test_an_endless_text_is_read_in_linear_time() -> None:
    for text in ("```" * 100_000, "`" * 300_000, " " * 300_000 + "```", "```python\n" * 50_000, "-" * 300_000):
        fenced_blocks(text)
        find_code(text)


@pytest.mark.parametrize(
    "source", ["-" * 200_000 + "1", "(" * 100_000, "a." * 100_000 + "a", "x = \0", "def f(", "\ud800"]
)
def test_what_cannot_be_parsed_is_no_program_and_no_crash(source: str) -> None:
    assert parse(source) is None


# ---- scores, and what is logged


def test_programs_are_scored_and_their_ends_are_logged(reward: Reward) -> None:
    extras: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    completions = [
        fenced(DOUBLE),
        fenced(WRONG),
        "I cannot.",
        fenced("import os\nos._exit(0)"),
        fenced(DOUBLE),
        fenced("1/0"),
    ]
    tests = [TESTS, TESTS, TESTS, TESTS, None, TESTS]
    scores = reward(completions=completions, tests=tests, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    assert scores == [1.0, 0.0, 0.0, 0.0, None, 0.0]
    assert extras["code_status"] == ["passed", "failed", "no_code", "died", None, "raised"]
    assert extras["code_passed"] == ["2/2", "1/2", "0/2", "0/2", None, "0/2"]
    assert extras["code_reason"][5] == "ZeroDivisionError: division by zero"
    # of five rows that were judged
    assert metrics["invalid_format_rate"] == metrics["code/died_rate"] == metrics["code/raised_rate"] == 1 / 5
    assert metrics["code/timeout_rate"] == 0.0


def test_a_share_of_the_tests_can_be_paid() -> None:
    sandboxes("auto")
    share = combine([code(credit="share", concurrency=1)])
    assert share(completions=[fenced(DOUBLE), fenced(WRONG)], tests=[TESTS, TESTS]) == [1.0, 0.5]


def test_conversations_and_other_columns(reward: Reward) -> None:
    said = [[{"role": "assistant", "content": fenced(DOUBLE) + "<|im_end|>"}]]
    tests = ["def check(candidate):\n    assert candidate(4) == ZERO + 8"]
    assert reward(completions=said, tests=tests, entry_point=["double"], setup=["ZERO = 0"]) == [1.0]
    assert reward.columns_needed() == ("tests",)


def test_programs_run_at_the_same_time_and_inside_an_event_loop() -> None:
    """Four sleepers of 0.4 s and two sandboxes: they cannot have run one after the other."""
    sandboxes("auto")
    member_function = code(concurrency=4)
    sleeper = fenced("import time\ntime.sleep(0.4)\n" + DOUBLE)

    async def score() -> list[Any]:
        return await member_function(completions=[sleeper] * 4, tests=[TESTS] * 4)

    async def both() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        scores = await score()
        ticking.cancel()
        return scores, ticks

    scores, ticks = asyncio.run(both())
    assert scores == [1.0] * 4
    assert ticks > 5  # the loop went on meanwhile


def test_the_sandbox_s_failure_is_an_error_of_its_row(reward: Reward, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = member.judge

    async def failing(pool: Any, program: str, problem: Any) -> Any:
        if "unlucky" in program:
            raise SandboxError("the sandbox does not come up")
        return await judged(pool, program, problem)

    monkeypatch.setattr(member, "judge", failing)
    texts = [fenced(DOUBLE), fenced(DOUBLE + "  # unlucky")]
    with pytest.raises(RewardError, match=r"completion 1.*does not come up"):
        reward(completions=texts, tests=[TESTS] * 2)
    tolerant = build_reward("code", concurrency=1, on_error="skip")
    assert tolerant(completions=texts, tests=[TESTS] * 2) == [1.0, None]


def test_tests_that_cannot_be_run_are_never_a_zero(reward: Reward) -> None:
    with pytest.raises(RewardError, match="no_such_module"):
        reward(completions=[fenced(DOUBLE)], tests=["import no_such_module\nassert double(4) == 8"])


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": "middle"}, r"reward\.block='middle' is not an option"),
        ({"credit": "half"}, r"reward\.credit='half' is not an option"),
        ({"sandbox": "docker"}, r"reward\.sandbox='docker' is not an option"),
        ({"timeout": 0.0}, r"reward\.timeout=0\.0"),
        ({"memory_mb": 1}, r"reward\.memory_mb=1"),
        ({"concurrency": 0}, r"reward\.concurrency=0"),
        ({"sandbox": "no_such_module:box"}, "no_such_module"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("code", **options)


def test_data_without_tests_is_refused(reward: Reward) -> None:
    with pytest.raises(ConfigError, match="needs column 'tests'"):
        reward.check_columns(["prompt", "answer"])
    with pytest.raises(DataError, match="no row has tests in column 'tests'"):
        reward.check_rows([{"prompt": "double", "tests": None}])
    with pytest.raises(DataError, match="prompt 'double': tests 'assert double"):
        reward.check_rows([{"prompt": "double", "tests": "assert double(4 =="}])
    reward.check_rows([{"prompt": "double", "tests": TESTS}, {"prompt": "other", "tests": None}])


# ---- a run

PROBLEM = {"prompt": "2+2=", "tests": TESTS}


def data(folder: Path, **row: Any) -> str:
    path = folder / "problems.jsonl"
    path.write_text((json.dumps({**PROBLEM, **row}) + "\n") * 4)
    return f"data.path={path}"


def test_a_run_trains_on_it(tmp_path: Path) -> None:
    sandboxes("auto")
    words = ("reward=code", "data=file", data(tmp_path), "data.columns.answer=null", "reward.concurrency=1")
    result = toolbox("train", *SHORT, *words, f"run_dir={tmp_path / 'run'}")
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {1, 2}
    assert all(line["reward_mean"] == 0.0 and line["reward_errors"] == 0 for line in lines)
    assert "code/timeout_rate" in lines[0]


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    words = (*SHORT, "reward=code", "data=file", "data.columns.answer=null")
    said = refused(*words, data(tmp_path, tests="assert double(4 =="))
    assert "are no Python" in said
    assert "sandbox" in refused(*words, data(tmp_path), "reward.sandbox=docker")
