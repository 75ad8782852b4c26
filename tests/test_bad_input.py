"""Bad input gets a clear error before a model is loaded, a failing step changes nothing, and nothing is lost."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_toolbox.config.build as build
import grpo_toolbox.config.policy as policy
from command_line import SHORT, refused, toolbox, write_module
from grpo_toolbox.checkpoint import latest_checkpoint, load_checkpoint
from grpo_toolbox.models.tiny import tiny_config

QUESTIONS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a policy fails the test."""

    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    for module in (build, policy):
        monkeypatch.setattr(module, "load_model", load_model)


def write_rows(rows: Sequence[dict[str, Any]], name: str = "prompts.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={name}"


def metrics(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def saved(run_dir: str) -> dict[str, Any]:
    newest = latest_checkpoint(Path(run_dir, "checkpoints"))
    assert newest is not None
    return load_checkpoint(newest, "cpu")


# ---- before a model is loaded


def test_good_input_does_get_as_far_as_the_model(no_model: None) -> None:
    with pytest.raises(AssertionError, match="a model was loaded"):
        toolbox("train", *SHORT, write_rows(QUESTIONS))


@pytest.mark.parametrize("advantage", ["group_relative", "dr_grpo", "rloo", "batch_normalized"])
def test_a_group_of_one_has_nothing_to_compare_with(advantage: str, no_model: None) -> None:
    error = refused(*SHORT, f"advantage={advantage}", "rollout.group_size=1")
    assert error.startswith(
        f"advantage={advantage} compares the completions of a group, and rollout.group_size=1 leaves"
    )
    assert "set rollout.group_size to 2 or more" in error


ROWS = [
    (
        [{"question": "1+1=", "answer": "2"}] * 2,
        "prompts.jsonl needs column 'prompt', found: question, answer. Set data.columns.prompt=question",
    ),
    (
        [{"promt": "1+1=", "answer": "2"}] * 2,
        "prompts.jsonl needs column 'prompt', found: promt, answer. Did you mean promt? Set data.columns.prompt",
    ),
    (
        [{"prompt": "1+1=", "solution": "2"}] * 2,
        "reward 'exact_match' needs column 'answer'; the data has: prompt, solution.",
    ),
    (
        [{"prompt": "1+1=", "answer": "2", "completions": "x"}] * 2,
        "prompts.jsonl has a column with a reserved name: completions. Rewards receive something else under",
    ),
    ([*QUESTIONS, {"prompt": "", "answer": "2"}], "prompts.jsonl, row 5: the prompt is empty or blank."),
    ([*QUESTIONS, {"prompt": " \n\t", "answer": "2"}], "prompts.jsonl, row 5: the prompt is empty or blank."),
    ([*QUESTIONS, {"prompt": [], "answer": "2"}], "prompts.jsonl, row 5: the prompt is empty or blank"),
    ([*QUESTIONS, {"prompt": "5+1=", "answer": None}], "prompts.jsonl, row 5: no 'answer'."),
    ([*QUESTIONS, {"prompt": "5+1=", "answer": math.nan}], "prompts.jsonl, row 5: no 'answer'."),
    (
        [*QUESTIONS, {"prompt": "5+1=", "answer": True}],  # d06.4
        "prompt '5+1=': the gold answer True is neither text nor a number. Write column 'answer' as text.",
    ),
    ([*QUESTIONS, {"prompt": 5, "answer": "2"}], "prompts.jsonl, row 5: a prompt is text or a list of messages"),
    ([], "prompts.jsonl is empty. It needs at least one row with column 'prompt'."),
    (
        QUESTIONS[:1],
        "the data has 1 rows and one batch takes rollout.prompts_per_step=2: lower it, or give more data.",
    ),
]


@pytest.mark.parametrize(("rows", "message"), ROWS, ids=[message[:60] for _, message in ROWS])
def test_rows_that_cannot_be_trained_on(rows: list[dict[str, Any]], message: str, no_model: None) -> None:
    assert refused(*SHORT, write_rows(rows)).startswith(message)
    assert not Path("runs").exists()


def test_gold_answers_that_can_never_be_met_are_refused(no_model: None) -> None:
    data = write_rows([{"prompt": "capital?", "answer": "Paris"}] * 2)
    assert refused(*SHORT, data, "reward.extract=last_number") == (
        "no row has a gold answer that is a number in column 'answer' (the first is 'Paris'), so reward.extract="
        "last_number would score nothing. Set data.columns.answer, or another reward.extract."
    )


def test_a_missing_column_of_a_users_reward_is_named(no_model: None) -> None:
    module = write_module("""
        def right(completions, gold):
            return [float(text == one) for text, one in zip(completions, gold, strict=True)]
    """)
    error = refused(*SHORT, f"reward.name={module}:right", write_rows(QUESTIONS))
    assert error.startswith("reward 'right' needs column 'gold'; the data has: answer, prompt.")


def test_columns_are_renamed_by_settings() -> None:
    rows = [{"question": row["prompt"], "solution": row["answer"]} for row in QUESTIONS]
    columns = ("data.columns.prompt=question", "data.columns.answer=solution")
    assert toolbox("train", *SHORT, write_rows(rows), *columns).code == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1=", "answer": "2"', "prompts.jsonl, line 6: not JSON"),
        ("1+1=", "prompts.jsonl, line 6: not JSON"),
        ('["1+1=", "2"]', "prompts.jsonl, line 6: a row must be a JSON object, found"),
    ],
)
def test_a_jsonl_line_that_does_not_parse_is_named(line: str, message: str, no_model: None) -> None:
    data = write_rows(QUESTIONS)
    with Path("prompts.jsonl").open("a") as file:
        file.write(f"\n{line}\n")  # the blank line counts
    assert refused(*SHORT, data).startswith(message)


@pytest.mark.parametrize("experiment", ["", "~experiment"])
def test_a_prompt_longer_than_the_models_positions_is_named(experiment: str, no_model: None) -> None:
    positions = tiny_config().max_position_embeddings
    long = {"prompt": "1" * (positions - 2), "answer": "2"}  # and 3 tokens of completion
    error = refused(*SHORT, write_rows([*QUESTIONS, long]), *filter(None, [experiment]))
    assert error.startswith(f"1 of 5 prompts are too long; the first is row 5 with {positions - 2} tokens, allowed are")
    assert f"{positions} positions of the model" in error
    assert "data.on_long=drop" in error


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused(no_model: None) -> None:
    assert refused(*SHORT, "rollout.max_new_tokens=128").startswith("rollout.max_new_tokens=128 leaves no room for a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=nosuch/folder/model"], "model.path='nosuch/folder/model' is neither a folder nor a hub name"),
        (["trainer.device=cuda:99"], "trainer.device='cuda:99' cannot be used"),
        (["trainer.device=tpu"], "trainer.device='tpu' cannot be used"),
        (["objective.clip_eps=-0.1"], "objective.clip_eps=-0.1 must be >= 0"),
        (["data.chat=true"], "the prompts are chat messages (data.chat=true, or message lists in the data), but the"),
        (["data.system_prompt=hello"], "data.system_prompt is set, but plain-text prompts have no place for it."),
        (["data.eval_size=55", "trainer.eval_every=1"], "data.eval_size=55 cannot be held out of 55 rows"),
    ],
)
def test_settings_that_do_not_fit_the_data_or_the_machine(words: list[str], message: str, no_model: None) -> None:
    assert refused(*SHORT, *words).startswith(message)


# ---- what the data says arrives


ASKS = """
    import json
    from pathlib import Path

    def remember(completions, answer, prompts):
        with Path("seen.jsonl").open("a") as file:
            file.write(json.dumps(answer) + "\\n")
        return [float(one) if one.isdigit() else 0.0 for one in answer]
"""


def test_csv_text_reaches_the_reward_as_text() -> None:
    Path("codes.csv").write_text("prompt,answer\n1+1=,007\n1+2=,None\n")
    module = write_module(ASKS)
    assert toolbox("train", *SHORT, "data.path=codes.csv", f"reward.name={module}:remember").code == 0
    for line in Path("seen.jsonl").read_text().splitlines():
        assert sorted(json.loads(line)) == ["007", "007", "None", "None"]  # two completions of each prompt


def test_equal_prompts_stay_separate_groups() -> None:
    # Each group gets one reward throughout, 1 or 2: no spread within groups, but 0.577 (= √(4·0.25/3)) in the batch.
    rows = [{"prompt": "1+1=", "answer": "1"}, {"prompt": "1+1=", "answer": "2"}]
    module = write_module(ASKS)
    words = (write_rows(rows), f"reward.name={module}:remember", "run_dir=a", "callbacks=default")
    assert toolbox("train", *SHORT, *words).code == 0
    for step in metrics("a"):
        assert (step["frac_reward_zero_std"], step["group_reward_std"]) == (1.0, 0.0)
        assert step["reward_std"] == pytest.approx(0.57735, abs=1e-4)
    actions = [json.loads(line) for line in Path("a/traces/actions.jsonl").read_text().splitlines()]
    assert {action["prompt_id"] for action in actions} == {0, 1}
    assert {action["advantage"] for action in actions} == {0.0}


# ---- the run folder


def test_a_folder_that_holds_another_run_is_left_alone(no_model: None) -> None:
    Path("a").mkdir()
    Path("a/metrics.jsonl").write_text('{"step": 1}\n')
    error = refused(*SHORT, "run_dir=a")
    assert error == (
        "run_dir=a already holds a run (metrics.jsonl). Choose another run_dir=, or go on with that run: resume=a."
    )
    assert [path.name for path in Path("a").iterdir()] == ["metrics.jsonl"]
    assert Path("a/metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("words", [["run_dir=file"], ["resume=file"], ["run_dir=file", "trainer.resume=true"]])
def test_a_file_is_no_run_folder(words: list[str], no_model: None) -> None:
    Path("file").write_text("not a folder")
    error = refused(*SHORT, *words)
    assert error.startswith(("run_dir=file cannot be written (", "resume=file has no whole checkpoint"))
    assert Path("file").read_text() == "not a folder"


def test_a_folder_that_cannot_be_written_is_refused(no_model: None) -> None:
    Path("file").write_text("not a folder")
    error = refused(*SHORT, "run_dir=file/a")
    assert error.startswith("run_dir=file/a cannot be written (")
    assert "choose a folder below one that you may write to" in error


def test_a_start_that_fails_can_be_made_again_into_the_same_folder() -> None:
    too_long = (*SHORT, "run_dir=a", "rollout.max_new_tokens=128")
    refused(*too_long)
    assert not Path("a").exists()
    # a folder that was there before stays, with what was in it
    Path("a").mkdir()
    Path("a/notes.txt").write_text("mine")
    refused(*too_long)
    assert [path.name for path in Path("a").iterdir()] == ["notes.txt"]
    assert toolbox("train", *SHORT, "run_dir=a").code == 0
    assert Path("a/notes.txt").read_text() == "mine"


def test_a_reward_that_fails_in_the_first_step_can_be_mended_and_the_command_given_again() -> None:
    broken = write_module("""
        def reward(completions):
            raise RuntimeError("no such service")
    """)
    words = (*SHORT, "run_dir=a", "callbacks=default", "data.eval_size=4", "trainer.eval_every=0")
    result = toolbox("train", *words, f"reward.name={broken}:reward")
    assert result.code == 1
    assert "reward 'reward' failed on prompt" in result.err
    assert "(RuntimeError: no such service)" in result.err
    assert "stopped after step 0 of 2" in result.out
    assert not Path("a").exists()
    assert toolbox("train", *words).code == 0


# ---- during training


SPOILT = """
    def spoilt(completions, trainer_state):
        scores = [float(sum(map(str.isdigit, text))) for text in completions]
        return {bad} if trainer_state.step == 3 else scores
"""
FOUR_STEPS = (*SHORT, "trainer.max_steps=4", "run_dir=a")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1 / 0", r"reward 'spoilt' failed on prompt \d+, completion 0 \(ZeroDivisionError: division by zero\)"),
        ("scores[:-1]", "reward 'spoilt' returned 3 values for 4 completions: it must return one finite number"),
        ("[]", "reward 'spoilt' returned 0 values for 4 completions"),
        ("{'score': scores}", r"reward 'spoilt' returned \{'score': .*, not a list"),
        ("[{'reward': 1.0}] * 4", r"returned a dict without 'score' for prompt \d+, completion 0"),
        ("'good'", "reward 'spoilt' returned 'good', not a list"),
        ("['good'] * 4", r"reward 'spoilt' returned 'good' for prompt \d+, completion 0, which is not a number"),
        ("None", "reward 'spoilt' returned None, not a list"),
        ("1.0", r"reward 'spoilt' returned 1\.0, not a list"),
        (
            "[0.0, float('nan'), 0.0, 0.0]",
            r"reward 'spoilt' returned nan for prompt \d+, completion 1, which is not finite",
        ),
        (
            "[0.0, 0.0, float('inf'), 0.0]",
            r"reward 'spoilt' returned inf for prompt \d+, completion 0, which is not finite",
        ),
        ("[1e300] * 4", "which overflows float32"),
    ],
)
def test_a_spoilt_reward_stops_the_run_and_the_finished_steps_are_saved(bad: str, message: str) -> None:
    module = write_module(SPOILT.format(bad=bad))
    result = toolbox("train", *FOUR_STEPS, f"reward.name={module}:spoilt")
    assert (result.code, result.err.count("\n")) == (1, 1), result.err
    assert re.search(message, result.err), result.err
    assert [step["step"] for step in metrics("a")] == [1, 2]
    assert saved("a")["step"] == 2


POISONED = """
    import torch

    calls = 0

    def poisoned(logps, old_logps, advantages, *, at=0, how="loss"):
        global calls
        calls += 1  # the first call is the probe before the run, then one a step
        loss = -advantages * logps
        if calls == at + 1:
            # the square root has an infinite slope at 0: a finite loss with a gradient that is not
            loss = loss * float("nan") if how == "loss" else loss + (logps - logps.detach()).abs().sqrt()
        return loss, torch.zeros_like(logps, dtype=torch.bool)
"""


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_never_reaches_the_parameters(how: str) -> None:
    words = ("trainer.schedule=constant", "trainer.lr=1e-2", "reward=length_penalty", "reward.target_chars=2")
    good = write_module(POISONED)
    two_steps = (*SHORT, "run_dir=good", *words, f"objective.name={good}:poisoned")
    assert toolbox("train", *two_steps).code == 0
    bad = write_module(POISONED)
    options = (f"objective.name={bad}:poisoned", "+objective.at=3", f"+objective.how={how}")
    result = toolbox("train", *FOUR_STEPS, *words, *options)
    assert result.code == 1
    assert result.err.startswith(f"toolbox train: step 3: the {how} is not finite, so the optimizer was not called;")
    assert "the parameters are still those of step 2" in result.err
    assert [step["step"] for step in metrics("a")] == [1, 2]

    expected, found = saved("good"), saved("a")
    assert (expected["step"], found["step"]) == (2, 2)
    assert expected["parameters"].keys() == found["parameters"].keys()
    for name, value in expected["parameters"].items():
        assert torch.equal(value, found["parameters"][name]), name
    start = build.load_model("builtin:tiny").state_dict()
    moved = [name for name, value in found["parameters"].items() if not torch.equal(value, start[name])]
    assert moved  # the two steps did train


def test_a_run_that_stopped_at_a_spoilt_step_goes_on_when_the_fault_is_mended() -> None:
    module = write_module(SPOILT.format(bad="None"))
    assert toolbox("train", *FOUR_STEPS, f"reward.name={module}:spoilt").code == 1
    Path(f"{module}.py").unlink()
    mended = write_module(SPOILT.format(bad="scores"))
    assert toolbox("train", "resume=a", f"reward.name={mended}:spoilt").code == 0
    assert [step["step"] for step in metrics("a")] == [1, 2, 3, 4]
