"""`trainer.stages`: each run goes on from the model of the one before, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command_line import toolbox
from grpo_toolbox.checkpoint import latest_checkpoint
from grpo_toolbox.models.load import load_model
from toolbox_runs import SMALL, all_metrics

STAGES = (
    "trainer.stages=[{name: form, reward: {name: 'plugs:digits'}, trainer: {max_steps: 3, lr: 0.01}},"
    " {name: answer, reward: exact_match, trainer.max_steps: 4, rollout.max_new_tokens: 2}]"
)


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in load_model(str(folder)).parameters()])


def last_model(folder: Path) -> Path:
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return newest / "model"


def test_the_second_stage_starts_where_the_first_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = toolbox("train", *SMALL, STAGES, "trainer.lr=0", f"run_dir={run_dir}")
    assert result.code == 0, result.err
    first, second = (all_metrics(run_dir / name) for name in ("form", "answer"))
    assert (len(first), len(second)) == (3, 4)
    assert "rewards/digits/mean" in first[0]
    assert "rewards/exact_match/mean" in second[0]
    trained = weights(last_model(run_dir / "form"))
    assert not torch.equal(trained, weights(Path("builtin:tiny")))
    assert torch.equal(trained, weights(last_model(run_dir / "answer")))  # whose rate is 0: what it began with
    config = (run_dir / "answer" / "config.yaml").read_text()
    assert "max_new_tokens: 2" in config
    assert f"path: {last_model(run_dir / 'form')}" in config


def test_a_run_of_stages_that_was_stopped_goes_on_in_the_stage_it_was_in(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    broken = STAGES.replace("reward: exact_match", "reward: {name: 'plugs:failing_at_3'}")
    stopped = toolbox("train", *SMALL, "callbacks.display={}", broken, f"run_dir={run_dir}")
    assert stopped.code == 1
    said = [line for line in stopped.out.splitlines() if "resume=" in line]
    assert said == [f"  go on with  toolbox train resume={run_dir}"]  # none that would go on with a stage alone
    done = all_metrics(run_dir / "form")
    one = toolbox("train", *SMALL, STAGES, f"resume={run_dir / 'form'}")
    assert one.err.startswith(f"toolbox train: resume={run_dir / 'form'} is a run of its own, or one stage, and")
    result = toolbox("train", *SMALL, STAGES, f"resume={run_dir}")
    assert result.code == 0, result.err
    assert all_metrics(run_dir / "form") == done
    assert len(all_metrics(run_dir / "answer")) == 4
    again = toolbox("train", f"resume={run_dir}")  # everything is finished: nothing is trained again
    assert again.code == 0, again.err
    assert len(all_metrics(run_dir / "answer")) == 4


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("3", "must be a list of mappings"),
        ("[{name: a}, {name: a}]", "must be a name of its own"),
        ("[{name: a/b}]", "must be a name of its own"),
        ("[{trainer.max_step: 3}]", "stage-1: trainer.max_step is not a key. Did you mean trainer.max_steps?"),
        ("[{name: a, reward: formats}]", "formats"),
        ("[{name: a}, {name: b, trainer.max_steps: 0}]", "trainer.stages, b: trainer.max_steps=0"),
        ("[{name: a}, {name: b, data.path: no.jsonl}]", "no.jsonl"),
    ],
)
def test_a_mistake_in_any_stage_is_found_before_the_first_begins(stages: str, words: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = toolbox("train", *SMALL, f"trainer.stages={stages}", f"run_dir={run_dir}")
    assert result.code == 1
    assert words in result.err
    assert not (run_dir / "config.yaml").exists()
