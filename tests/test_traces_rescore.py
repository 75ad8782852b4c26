"""`toolbox traces --rescore`: every number of what would have changed, by hand, and on a run that was trained here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import SHORT, Result, toolbox, write_module
from grpo_toolbox.cli.rescore import rescore
from grpo_toolbox.errors import DataError, RewardError
from grpo_toolbox.rewards import combine

GROUPS = (
    # (completion, reward that the run gave), with gold answer 7
    (("7", 1.0), ("8", 0.0), ("9", 0.0)),  # stays: the same verdicts
    (("the 7", 0.0), ("8", 0.0), ("9", 0.0)),  # revived: one is right after all
    (("8", 1.0), ("9", 0.0), ("1", 0.0)),  # died: the one that was paid is wrong
    (("is 7", 0.0), ("8", 1.0), ("9", None)),  # both flipped; the third had no reward
    (("7", 0.5), ("7", 0.5), ("7", 0.5)),  # another reward, and no spread before or after
)


def record(step: int, group: int, index: int, completion: str, reward: float | None, **more: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "prompt_id": 10 + group,
        "group": group,
        "index": index,
        "prompt": "3 + 4",
        "completion": completion,
        "finish_reason": "stop",
        "reward": reward,
        "rewards": {"old": reward},
        "columns": {"answer": "7"},
        "prompt_ids": [1],
        "token_ids": [2, 3],
    }
    return {**base, **more}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(records: list[dict[str, Any]]) -> Path:
    path = Path("run/traces/actions.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.fixture
def actions() -> Path:
    """The five groups: the first three are step 1, the others step 2."""
    return write(
        [
            record(1 + (group > 2), group % 3, index, *pair)
            for group, pairs in enumerate(GROUPS)
            for index, pair in enumerate(pairs)
        ]
    )


def rescored(*words: str) -> dict[str, Any]:
    result = toolbox("traces", "run", "--json", "--rescore", *words)
    assert result.code == 0, result
    return json.loads(result.out)


def refused(*words: str) -> str:
    result = toolbox("traces", "run", *words)
    assert result.code == 1, result
    assert len(result.err.splitlines()) == 1, result.err
    return result.err


def test_every_number_by_hand(actions: Path) -> None:
    report = rescored("reward=exact_match")
    assert (report["rollouts"], report["groups"], report["reward"]) == (15, 5, "exact_match")
    # before: 1 + 1 + 1 + 1.5 over the 14 that had a reward; after: 1 + 1 + 0 + 1 + 3 of 15
    assert report["mean"] == {"before": 4.5 / 14, "after": 6 / 15}
    assert report["unscored"] == {"before": 1, "after": 0}
    # 1 in group two, 1 in three, 3 in four (one of them had none), 3 in five
    assert report["changed"] == 8
    assert report["flipped"] == 2
    assert (report["groups_revived"], report["groups_died"]) == (1, 1)
    assert report["groups_with_spread"] == {"before": 3, "after": 3}


def test_examples_are_flipped_ones_first(actions: Path) -> None:
    result = toolbox("traces", "run", "--prompts", "2", "--json", "--rescore", "reward=exact_match")
    examples = json.loads(result.out)["examples"]
    assert [(one["completion"], one["flipped"]) for one in examples] == [("is 7", True), ("8", True)]
    assert examples[0]["reward"] == {"before": 0.0, "after": 1.0}
    # before 0 − 1/2 over the two that had a reward, after 1 − 1/3 over three
    assert examples[0]["advantage"] == {"before": -0.5, "after": pytest.approx(2 / 3)}


def test_options_are_overrides(actions: Path) -> None:
    whole = rescored("reward=exact_match", "reward.extract=whole")
    assert whole["mean"]["after"] == 4 / 15  # "the 7" and "is 7" are no 7
    assert whole["groups_revived"] == 0


def test_the_tables_say_it(actions: Path) -> None:
    out = toolbox("traces", "run", "--rescore", "reward=exact_match").out
    assert "advantages flipped     2 (13.3% of the rollouts)" in out
    assert "groups with a spread   3 -> 3: 1 revived, 1 died" in out
    assert "mean reward            0.321 -> 0.400" in out


def test_a_function_of_the_users_and_a_sum(actions: Path) -> None:
    name = write_module(
        "def long(completions, least=2):\n    return [float(len(text) > least) for text in completions]"
    )
    own = rescored("reward=custom", f"reward.name={name}:long", "+reward.least=4")
    assert own["parts"] == {"long": 1 / 15}
    parts = f"[{{name: exact_match}}, {{name: '{name}:long', weight: 10}}]"
    both = rescored("reward=weighted_sum", f"reward.components={parts}")
    assert both["parts"] == {"exact_match": 6 / 15, "long": 2 / 15}
    assert both["mean"]["after"] == pytest.approx((6 + 20) / 15)


def test_a_run_without_spread_in_its_rewards_flips_nothing(actions: Path) -> None:
    report = rescore(actions, combine([lambda completions: [0.1] * len(completions)]))
    assert (report["flipped"], report["groups_died"], report["groups_revived"]) == (0, 3, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rescore", "reward=exact_mach"), "Did you mean exact_match?"),
        (("--rescore", "reward=exact_match", "reward.extract=boxd"), "Did you mean boxed?"),
        (("--rescore", "reward=exact_match", "reward.extrct=boxed"), "Did you mean reward.extract?"),
        (("--rescore", "rewrd=exact_match"), "takes reward=<name> and reward.<key>=<value>"),
        (("--rescore", "trainer.lr=1"), "takes reward=<name> and reward.<key>=<value>"),
        (("--rescore", "reward.extract=boxed"), "needs reward=<name>"),
        (("--rescore", "reward=custom"), "reward.name has no default"),
        (("--rescore", "reward=numeric", "reward.column=solution"), "needs column 'solution'"),
        (("--reward", "old", "--rescore", "reward=numeric"), "goes without --rescore"),
    ],
)
def test_mistakes_are_refused_in_a_line(actions: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


def test_a_reward_that_fails_names_prompt_and_completion(actions: Path) -> None:
    def fails(completions: list[str], answer: list[str]) -> list[float]:
        return [1 / (text != "9") for text in completions]

    with pytest.raises(RewardError, match="'fails' failed on prompt 10"):
        rescore(actions, combine([fails]))


def test_a_cut_off_line_is_left_out_and_another_programs_file_refused(actions: Path) -> None:
    with actions.open("a") as file:
        file.write('{"step": 3, "pro')
    assert rescored("reward=exact_match")["rollouts"] == 15
    actions.write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="line 1 is not an action record"):
        rescore(actions, combine([lambda completions: [0.0] * len(completions)]))


def test_conversations_and_columns_reach_the_reward() -> None:
    prompt = [{"role": "user", "content": "3 + 4"}]
    write([record(1, 0, index, text, 0.0, prompt=prompt) for index, text in enumerate(("7", "8"))])
    report = rescored("reward=exact_match")
    assert report["mean"]["after"] == 0.5
    assert report["examples"][0]["prompt"] == "3 + 4"


def test_a_run_of_ours_keeps_its_reward_and_takes_another_option() -> None:
    trained = ("train", "experiment=grpo_tiny", *SHORT, "callbacks.trace_rollouts={every: 1}", "run_dir=run")
    result: Result = toolbox(*trained)
    assert result.code == 0, result.err
    same = rescored("reward.ignore_case=false")  # the tiny task has no letters in its answers
    assert same["reward"] == "exact_match"
    assert (same["rollouts"], same["changed"], same["flipped"]) == (8, 0, 0)
