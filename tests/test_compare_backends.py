"""`toolbox compare-backends`: both trainers on one config, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import toolbox
from grpo_toolbox.backends.compare import Side, compare
from grpo_toolbox.cli.measured import peak_memory
from toolbox_runs import SMALL, all_metrics


def side(rewards: list[float], seconds: list[float]) -> Side:
    lines = [{"reward_mean": r, "time/step": s} for r, s in zip(rewards, seconds, strict=True)]
    return Side(lines, seconds=10.0, memory_mib=512.0)


def test_curves_are_means_of_stretches_and_times_are_medians() -> None:
    """Twelve steps in stretches of two; the other side has stopped after three."""
    whole = side([0.0, 0.2, 0.4, 0.6, *[1.0] * 8], [1.0, 9.0, *[2.0] * 10])
    rows = {row.label: row.values for row in compare([whole, side([0.1, 0.3, 0.5], [4.0, 5.0, 6.0])])}
    assert rows["reward, steps 1-2"] == (pytest.approx(0.1), pytest.approx(0.2))
    assert rows["reward, steps 3-4"] == (pytest.approx(0.5), 0.5)
    assert rows["reward, steps 11-12"] == (1.0, None)
    assert rows["seconds a step, median"] == (2.0, 5.0)
    assert rows["seconds in all"] == (10.0, 10.0)
    assert rows["peak memory, MiB"] == (512.0, 512.0)
    assert "peak GPU memory, MiB" not in rows
    assert "held-out reward, last" not in rows


def test_few_steps_are_shown_one_by_one() -> None:
    rows = [row.label for row in compare([side([0.0, 1.0], [1.0, 1.0])])]
    assert rows[:2] == ["reward, step 1", "reward, step 2"]


def test_memory_is_the_peak_not_the_present() -> None:
    held = bytearray(b"x" * 200 * 2**20)
    with_it = peak_memory()
    del held
    assert peak_memory() >= with_it > 200 * 2**20


def test_it_trains_with_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    folder = tmp_path / "both"
    result = toolbox("compare-backends", "experiment=grpo_tiny", *SMALL, "trainer.max_steps=2", f"run_dir={folder}")
    assert result.code == 0, result.err
    for name in ("toolbox", "trl"):
        assert [line["step"] for line in all_metrics(folder / name)] == [1, 2]
    lines = [line.split() for line in result.out.splitlines()]
    assert ["toolbox", "trl"] in lines
    (curve,) = (line for line in lines if line[:3] == ["reward,", "step", "2"])
    shown = [f"{all_metrics(folder / name)[1]['reward_mean']:.3f}" for name in ("toolbox", "trl")]
    assert curve[3:] == shown
    (memory,) = (line for line in lines if line[:2] == ["peak", "memory,"])
    assert all(float(value.replace(",", "")) > 100 for value in memory[3:])
    saved = json.loads((folder / "comparison.json").read_text())
    assert [row["label"] for row in saved["rows"]][:2] == ["reward, step 1", "reward, step 2"]
    again = toolbox("compare-backends", "experiment=grpo_tiny", f"run_dir={folder}")
    assert again.code == 1
    assert "is not empty: choose another folder" in again.err


def test_what_trl_cannot_do_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    result = toolbox("compare-backends", "experiment=grpo_tiny", "method=dapo", f"run_dir={folder}")
    assert result.code == 1
    assert result.err.startswith("toolbox compare-backends: rollout.dynamic_sampling=true cannot run on TRL: ")
    assert not folder.exists()
    assert "Leave it out" in toolbox("compare-backends", "--multirun", "trainer.seed=0,1").err


def test_its_help() -> None:
    assert toolbox("compare-backends", "--help").out.startswith("usage: toolbox compare-backends")
