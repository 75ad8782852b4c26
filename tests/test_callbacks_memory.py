"""memory_writer: which completions it keeps, and the rows that it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from grpo_toolbox.callbacks.memory_writer import MemoryWriter, export_sft
from grpo_toolbox.cli.memory import run
from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.types import Message, Prompt, Rollout, RunInfo, Scores, Step

NAN = float("nan")


def make_step(
    number: int,
    completions: list[tuple[str, int, list[float]]],
    prompt_id: int = 1,
    text: str | list[Message] = "1+1=",
    cut_off: bool = False,
) -> Step:
    """One group: (text, number of tokens, components); the total is the sum of the components that apply."""
    prompt = Prompt(prompt_id, text, (1,))
    reason = "length" if cut_off else "stop"
    rollouts = [Rollout(prompt, tuple(range(n)), (0.0,) * n, reason, text) for text, n, _ in completions]
    components = torch.tensor([[values for *_, values in completions]])  # (1, G, R)
    names = ("exact", "format")[: components.shape[-1]]
    return Step(number, {}, rollouts, Scores(names, (1.0,) * len(names), components, components.nansum(-1)))


def remember(folder: Path, steps: list[Step], first_step: int = 1, **options: object) -> list[tuple[str, str]]:
    writer = MemoryWriter(**options)
    writer.on_start(RunInfo("a-run", folder, 9, first_step, {}))
    for step in steps:
        writer.on_step(step)
    writer.on_end({})
    return [(row["prompt"], row["completion"]) for row in export_sft(folder / options.get("path", "memory.sqlite"))]


def test_the_best_come_first_then_the_shortest_and_only_so_many(tmp_path):
    step = make_step(1, [("long", 9, [1.0]), ("wrong", 1, [0.9]), ("best", 9, [2.0]), ("short", 2, [1.0])])
    assert remember(tmp_path, [step], per_prompt=3) == [("1+1=", "best"), ("1+1=", "short"), ("1+1=", "long")]


def test_a_later_better_completion_pushes_the_worst_out(tmp_path):
    steps = [
        make_step(1, [("a", 5, [1.0]), ("b", 4, [1.0])]),
        make_step(2, [("c", 3, [1.0]), ("d", 9, [1.0])]),
    ]
    assert [completion for _, completion in remember(tmp_path, steps, per_prompt=2)] == ["c", "b"]


def test_a_text_is_kept_once_with_its_best_reward(tmp_path):
    steps = [make_step(1, [("a", 5, [1.0]), ("a", 5, [1.0]), ("b", 1, [1.5])]), make_step(2, [("a", 5, [2.0])])]
    assert [completion for _, completion in remember(tmp_path, steps)] == ["a", "b"]


def test_equal_prompts_of_different_rows_stay_apart(tmp_path):
    steps = [make_step(1, [("2", 1, [1.0])], prompt_id=1), make_step(2, [("2", 1, [1.0])], prompt_id=5)]
    assert remember(tmp_path, steps, per_prompt=1) == [("1+1=", "2"), ("1+1=", "2")]


def test_verified_is_what_the_first_component_says(tmp_path):
    """Correct but badly formatted (total 0.8) is kept; wrong and well formatted (total 1.2) is not."""
    step = make_step(1, [("right", 1, [1.0, -0.2]), ("wrong", 1, [0.2, 1.0])])
    assert [completion for _, completion in remember(tmp_path, [step])] == ["right"]


def test_another_component_can_decide_and_a_wrong_name_is_an_error(tmp_path):
    step = make_step(1, [("right", 1, [1.0, -0.2]), ("formatted", 1, [0.2, 1.0])])
    assert [completion for _, completion in remember(tmp_path, [step], component="format")] == ["formatted"]
    with pytest.raises(ConfigError, match=r"component='exakt' is not a reward: exact, format"):
        remember(tmp_path, [step], component="exakt")


def test_the_total_decides_where_the_component_does_not_apply(tmp_path):
    step = make_step(1, [("code", 1, [NAN, 1.0]), ("prose", 1, [NAN, 0.5]), ("nothing", 1, [NAN, NAN])])
    assert [completion for _, completion in remember(tmp_path, [step])] == ["code"]


def test_a_threshold_that_float32_cannot_hold_is_still_reached(tmp_path):
    assert torch.tensor(0.7).item() < 0.7
    assert len(remember(tmp_path, [make_step(1, [("a", 1, [0.7])])], threshold=0.7)) == 1


def test_a_completion_that_was_cut_off_is_not_kept(tmp_path):
    assert remember(tmp_path, [make_step(1, [("2 because", 8, [1.0])], cut_off=True)]) == []


def test_replayed_steps_change_nothing(tmp_path):
    steps = [make_step(n, [(f"a{n}", n, [1.0]), ("b", 3, [1.0])]) for n in range(1, 6)]
    once = remember(tmp_path, steps, per_prompt=3)
    assert remember(tmp_path, steps[2:], first_step=3, per_prompt=3) == once


def test_a_killed_run_loses_no_finished_step(tmp_path):
    writer = MemoryWriter()
    writer.on_start(RunInfo("a-run", tmp_path, 9, 1, {}))
    writer.on_step(make_step(1, [("2", 1, [1.0])]))
    assert len(export_sft(tmp_path / "memory.sqlite")) == 1  # read while the writer still holds it open


def test_a_conversation_is_exported_as_messages(tmp_path):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    writer = MemoryWriter()
    writer.on_start(RunInfo("a-run", tmp_path, 9, 1, {}))
    writer.on_step(make_step(1, [("2", 1, [1.0])], text=messages))
    writer.on_end({})
    assert export_sft(tmp_path / "memory.sqlite") == [{"messages": [*messages, {"role": "assistant", "content": "2"}]}]


def test_the_command_writes_jsonl_beside_the_store_or_to_stdout(tmp_path, capsys):
    remember(tmp_path, [make_step(1, [("zwölf", 1, [1.0])])])
    assert run(["export", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"1 verified completions -> {tmp_path / 'sft.jsonl'}\n"
    assert (tmp_path / "sft.jsonl").read_text() == '{"prompt": "1+1=", "completion": "zwölf"}\n'
    run(["export", str(tmp_path / "memory.sqlite"), "--out", "-"])
    assert json.loads(capsys.readouterr().out) == {"prompt": "1+1=", "completion": "zwölf"}
    run(["export", str(tmp_path), "--out", str(tmp_path / "new" / "rows.jsonl")])
    assert (tmp_path / "new" / "rows.jsonl").exists()


def test_a_missing_or_foreign_store_is_named(tmp_path):
    with pytest.raises(DataError, match=r"memory.sqlite does not exist: train with callbacks.memory_writer"):
        run(["export", str(tmp_path)])
    (tmp_path / "memory.sqlite").write_text("not a database, just a text that is long enough to have a header")
    with pytest.raises(DataError, match=r"is not a store that callbacks.memory_writer wrote"):
        run(["export", str(tmp_path)])
