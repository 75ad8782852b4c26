"""`toolbox traces`: every number of the summary, by hand; and what it does with files that are not whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.callbacks import trace_summary
from grpo_toolbox.callbacks.trace_rollouts import TraceRollouts
from grpo_toolbox.callbacks.trace_summary import summarise
from grpo_toolbox.cli.traces import run
from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.types import Prompt, Rollout, RunInfo, Scores, Step


def record(step: int, prompt_id: int, completion: str, exact: float | None, tokens: int, **more: Any) -> dict[str, Any]:
    """One action record; reward `form` is 0.5 where `exact` applies and null elsewhere, the total is their sum."""
    form = None if exact is None else 0.5
    base = {
        "step": step,
        "prompt_id": prompt_id,
        "group": prompt_id,
        "prompt": f"question {prompt_id}",
        "completion": completion,
        "finish_reason": "stop",
        "reward": (exact or 0.0) + (form or 0.0),
        "rewards": {"exact": exact, "form": form},
        "token_ids": list(range(tokens)),
    }
    return {**base, **more}


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "traces" / "actions.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.fixture
def actions(tmp_path) -> Path:
    """Ten steps (a fifth is two) of prompts 1 and 2 with two completions each.

    Prompt 1 is wrong in steps 1 to 5 ("no", 4 tokens, twice the same) and right after ("yes" and "yes!", 2 tokens).
    Prompt 2 is right always ("a", "b": 3 tokens) but for its second completion in step 1 (wrong, 8 tokens, cut off).
    """
    records = []
    for step in range(1, 11):
        right = step > 5
        records += [
            record(step, 1, "yes" if right else "no", float(right), 2 if right else 4),
            record(step, 1, "yes!" if right else "no", float(right), 2 if right else 4),
            record(step, 2, "a", 1.0, 3),
            record(step, 2, "b", 1.0, 3),
        ]
    records[3] = record(1, 2, "b", 0.0, 8, finish_reason="length")
    return write(tmp_path, records)


def test_the_overview_counts_rollouts_steps_and_shares(actions):
    summary = summarise(actions)
    assert (summary["rollouts"], summary["steps"], summary["prompts"]) == (40, 10, 2)
    assert (summary["first_step"], summary["last_step"], summary["unreadable_lines"]) == (1, 10, 0)
    assert summary["truncated"] == 1 / 40
    assert summary["correct"] == 29 / 40  # all but ten of prompt 1 and one of prompt 2


def test_rewards_from_the_first_fifth_to_the_last(actions):
    rewards = summarise(actions)["rewards"]
    # steps 1 and 2: 0 0 1 0 and 0 0 1 1
    assert rewards["exact"] == {"first": 3 / 8, "last": 1.0, "null": 0.0}
    assert rewards["form"] == {"first": 0.5, "last": 0.5, "null": 0.0}
    assert rewards["total"] == {"first": 3 / 8 + 0.5, "last": 1.5, "null": 0.0}


def test_length_by_correctness(actions):
    length = summarise(actions)["length"]
    assert length["correct"] == {"first": 3.0, "last": 2.5}  # steps 9 and 10: 2 2 3 3
    assert length["wrong"] == {"first": 4.8, "last": None}  # steps 1 and 2: 4 4 8 and 4 4


def test_prompts_with_their_solve_rates_hardest_first(actions):
    summary = summarise(actions)
    hard, easy = summary["hardest"]
    assert summary["easiest"] == []  # two prompts fit into one table
    assert hard == {
        "prompt_id": 1,
        "prompt": "question 1",
        "solve_rate": 0.5,
        "attempts": 20,
        "mean_tokens": 3.0,
        "first": 0.0,
        "last": 1.0,
    }
    assert (easy["prompt_id"], easy["solve_rate"], easy["first"], easy["last"]) == (2, 0.95, 0.5, 1.0)
    assert easy["mean_tokens"] == 3.25  # 19 of 3 tokens and one of 8


def test_repeats_are_counted_within_groups_only(actions):
    repeats = summarise(actions)["repeats"]
    assert repeats["share"] == 5 / 40  # "no" once too often in five groups; "a" comes back in other groups only
    assert repeats["texts"] == [{"text": "no", "count": 10, "correct": 0.0}]


def test_hardest_and_easiest_do_not_overlap(tmp_path):
    records = [record(1, p, f"{k}", float(k < p), 1) for p in range(5) for k in range(4)]  # prompt p: p of 4 right
    summary = summarise(write(tmp_path, records), prompts=2)
    assert [row["prompt_id"] for row in summary["hardest"]] == [0, 1]
    assert [row["prompt_id"] for row in summary["easiest"]] == [4, 3]


def test_a_null_reward_is_no_wrong_answer_where_nothing_judges(tmp_path):
    records = [record(1, 1, "x", None, 5, reward=None), record(1, 1, "y", 1.0, 2)]
    summary = summarise(write(tmp_path, records))
    assert summary["correct"] == 1.0
    assert summary["rewards"]["exact"] == {"first": 1.0, "last": 1.0, "null": 0.5}
    assert summary["length"]["wrong"] == {"first": None, "last": None}
    assert (summary["hardest"][0]["attempts"], summary["hardest"][0]["solve_rate"]) == (2, 1.0)


def test_another_component_can_say_what_correct_is(actions):
    assert summarise(actions, reward="form")["correct"] == 0.0
    with pytest.raises(ConfigError, match="--reward exakt is not in these traces: exact, form"):
        summarise(actions, reward="exakt")


def test_rarely_repeated_texts_are_forgotten_before_memory_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_summary, "KEPT_TEXTS", 2)
    texts = ["often", "b", "often", "c", "d", "e", "f", "often"]
    records = [record(step, 1, text, 0.0, 1) for step, text in enumerate(texts) for _ in range(2)]
    repeats = summarise(write(tmp_path, records))["repeats"]
    assert (repeats["texts"][0]["text"], repeats["texts"][0]["count"]) == ("often", 6)
    assert len(repeats["texts"]) <= 4
    assert repeats["share"] == 0.5


def test_a_last_line_cut_off_by_a_kill_is_left_out_and_said(actions, capsys):
    with actions.open("ab") as file:
        file.write('{"step": 11, "completion": "zw\u00f6'.encode()[:-1])
    assert summarise(actions)["rollouts"] == 40
    assert run([str(actions)]) == 0
    assert "left out: 1 unreadable line(s)" in capsys.readouterr().out


def test_the_tables_show_the_numbers(actions, capsys):
    for path in (actions, actions.parent, actions.parent.parent):  # the file, its folder, the run folder
        assert run([str(path)]) == 0
        out = capsys.readouterr().out
        assert "40 rollouts of 2 prompts in 10 steps (1 to 10): 72.5% correct, 2.5% cut off, 12.5% repeated" in out
        assert [line.split() for line in out.splitlines() if "exact" in line] == [["exact", "0.375", "1.000", "0.0%"]]
        hardest = next(line for line in out.splitlines() if "question 1" in line)
        assert hardest.split() == ["1", "50.0%", "0.0%", "->", "100.0%", "20", "3.0", "question", "1"]
        assert all(c == "\n" or c.isprintable() for c in out)


def test_text_of_the_data_is_shown_as_it_stands(tmp_path, capsys):
    records = [record(1, 1, "[red]\x1b[2J", 0.0, 1, prompt=[{"role": "user", "content": "[bold]two\nlines"}])] * 2
    run([str(write(tmp_path, records))])
    out = capsys.readouterr().out
    assert "[bold]two ⏎ lines" in out
    assert "[red]·[2J" in out


def test_json_prints_the_summary(actions, capsys):
    run([str(actions), "--json", "--prompts", "1"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == summarise(actions, prompts=1)
    assert set(printed) == {
        *("path", "unreadable_lines", "rollouts", "steps", "first_step", "last_step", "prompts", "correct"),
        *("truncated", "rewards", "length", "hardest", "easiest", "repeats"),
    }


def test_it_reads_what_trace_rollouts_writes(tmp_path):
    prompt = Prompt(3, "1+1=", (1, 2))
    rollouts = [Rollout(prompt, (5, 6), (-0.1, -0.2), "stop", text) for text in ("2", "3")]
    total = torch.tensor([[1.0, 0.0]])
    scores = Scores(("exact",), (1.0,), total[..., None], total)
    callback = TraceRollouts()
    callback.on_start(RunInfo("a-run", tmp_path, 1, 1, {}))
    callback.on_step(Step(1, {}, rollouts, scores, torch.tensor([[0.5, -0.5]])))
    callback.on_end({})
    summary = summarise(tmp_path / "traces" / "actions.jsonl")
    assert (summary["correct"], summary["hardest"][0]["prompt"], summary["repeats"]["share"]) == (0.5, "1+1=", 0.0)


def test_where_there_is_nothing_it_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match=r"holds no actions.jsonl: give runs/<name>/traces"):
        run([str(tmp_path)])
    with pytest.raises(DataError, match="does not exist"):
        run([str(tmp_path / "typo")])
    with pytest.raises(DataError, match="holds no whole record yet"):
        run([str(write(tmp_path, []))])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kl": 0.5}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl, line 1 is not an action record \('rewards'\)"):
        run([str(tmp_path / "metrics.jsonl")])
    with pytest.raises(ConfigError, match="--prompts 0"):
        run([str(tmp_path), "--prompts", "0"])


def test_help_loads_neither_torch_nor_rich():
    code = (
        "import sys; from grpo_toolbox.cli.traces import run\n"
        "try: run(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rich', 'transformers'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "--prompts N" in shown
    assert "--json" in shown
