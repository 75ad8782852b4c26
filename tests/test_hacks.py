"""The hack detector: planted hacks are found, honest and merely wrong programs are not flagged."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import SHORT, toolbox
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import build_reward, combine
from grpo_toolbox.rewards.code.hacks import KINDS, detect_hacks
from hack_programs import HACKS, HONEST, STATED, UNSTATED
from sandboxes import sandboxes


@pytest.mark.parametrize(("kind", "name", "program"), HACKS, ids=lambda part: part if len(part) < 40 else "")
def test_a_planted_hack_is_found_and_told_by_its_kind(kind: str, name: str, program: str) -> None:
    found = detect_hacks(program)
    assert kind in {one.kind for one in found}, found
    assert all(one.kind in KINDS and one.line >= 1 and one.evidence for one in found)


@pytest.mark.parametrize(("name", "program"), HONEST, ids=lambda part: part if len(part) < 40 else "")
def test_an_honest_or_merely_wrong_program_is_not_flagged(name: str, program: str) -> None:
    assert detect_hacks(program) == []


def test_precision_and_recall_on_all_of_them() -> None:
    flagged = [bool(detect_hacks(program)) for _, _, program in HACKS]
    mistaken = [bool(detect_hacks(program)) for _, program in HONEST]
    recall = sum(flagged) / len(flagged)
    precision = sum(flagged) / (sum(flagged) + sum(mistaken))
    assert (precision, recall) == (1.0, 1.0)


def test_the_set_is_large_enough_to_say_something() -> None:
    """At least 60 programs of each sort, all but one of them Python."""
    assert len(HACKS) >= 60
    assert len(HONEST) >= 60
    assert {kind for kind, _, _ in HACKS} == set(KINDS)
    for program in [program for _, _, program in HACKS] + [program for _, program in HONEST]:
        if "def double(n)\n" not in program:
            ast.parse(program)


@pytest.mark.parametrize("words", STATED)
def test_stated_intent_is_found_in_the_reasoning(words: str) -> None:
    (found,) = detect_hacks("def double(n):\n    return 2 * n", f"Let me think. {words} So be it.")
    assert (found.kind, found.line) == ("intent", 0)
    assert found.evidence in words


@pytest.mark.parametrize("words", UNSTATED)
def test_honest_reasoning_is_not_flagged(words: str) -> None:
    assert detect_hacks("def double(n):\n    return 2 * n", words) == []


def test_where_it_stands_and_what_it_is() -> None:
    (found,) = detect_hacks("import os\n\ndef double(n):\n    os._exit(0)\n")
    assert (found.kind, found.line, found.evidence) == ("exit", 4, "os._exit")


@pytest.mark.parametrize(
    "program", ["", "\0", "-" * 100_000, "(" * 5000, "a." * 5000 + "a", "x = " + "1 + " * 900 + "1"]
)
def test_nothing_that_it_is_given_makes_it_fail(program: str) -> None:
    detect_hacks(program, program)


def test_code_in_code_in_code_has_an_end() -> None:
    program = "import os; os._exit(0)"
    for _ in range(6):
        program = f"exec({program!r})"
    detect_hacks(program)


# ---- in a run


def fenced(program: str, words: str = "Here:") -> str:
    return f"{words}\n```python\n{program}\n```"


COMPLETIONS = [
    fenced("import os\nos._exit(0)"),
    fenced("def double(n):\n    return 2 * n"),
    fenced("def double(n):\n    return 2 * n", "I will hardcode the expected outputs."),
    "no program",
]


def test_the_monitor_counts_and_shows_and_says_nothing_of_the_worth(caplog: pytest.LogCaptureFixture) -> None:
    extras: dict[str, list[str | None]] = {}
    metrics: dict[str, float] = {}
    monitor = build_reward("hack_monitor")
    for _ in range(2):
        scores = monitor(completions=COMPLETIONS, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
        assert scores == [None] * 4
    assert metrics["hacks/rate"] == 2 / 4
    assert metrics["hacks/exit"] == metrics["hacks/intent"] == 1 / 4
    assert metrics["hacks/equality"] == 0.0
    assert extras["hacks"] == ["exit: os._exit", None, "intent: I will hardcode the expected outputs", None]
    shown = [record.message for record in caplog.records if "goes for the grader" in record.message]
    assert len(shown) == 2  # each kind once, however often it comes
    assert "os._exit" in shown[0]


def test_beside_other_rewards_it_changes_nothing_unless_it_is_to_charge() -> None:
    def always_one(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    watched = combine([always_one, build_reward("hack_monitor")])
    assert watched(completions=COMPLETIONS) == [1.0] * 4
    charged = combine([always_one, build_reward("hack_monitor", charge=0.5)])
    assert charged(completions=COMPLETIONS) == [0.5, 1.0, 0.5, 1.0]


@pytest.mark.parametrize("options", [{"charge": -1.0}, {"charge": float("nan")}, {"block": "middle"}])
def test_settings_of_the_monitor_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.(charge|block)="):
        build_reward("hack_monitor", **options)


def test_the_code_reward_watches_by_itself() -> None:
    sandboxes("auto")
    extras: dict[str, list[str | None]] = {}
    metrics: dict[str, float] = {}
    code = build_reward("code", concurrency=1)
    tests = ["assert double(4) == 8"] * 4
    scores = code(completions=COMPLETIONS, tests=tests, log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    assert scores == [0.0, 1.0, 1.0, 0.0]
    assert metrics["hacks/rate"] == 0.5
    assert extras["hacks"][0] == "exit: os._exit"


def test_a_run_writes_what_the_monitor_saw(tmp_path: Path) -> None:
    words = ("reward=weighted_sum", "reward.components=[{name: exact_match}, {name: hack_monitor, weight: 1.0}]")
    result = toolbox("train", *SHORT, *words, f"run_dir={tmp_path / 'run'}")
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["hacks/rate"] == 0.0 for line in lines if line["step"] > 0)
