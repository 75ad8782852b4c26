"""TensorBoard, Trackio and Weights & Biases: the numbers come back out of what each of them wrote."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_toolbox.callbacks import Callback, build_callbacks
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import RunInfo, Step


def log(callback: Callback, folder: Path, steps: range, first_step: int = 1) -> None:
    callback.on_start(RunInfo("a-run", folder, 9, first_step, {"trainer": {"lr": 0.1}}))
    for n in steps:
        callback.on_step(Step(n, {"step": n, "reward_mean": n / 8, "eval/pass@1": 0.5, "kl": math.nan}))
    callback.on_end({"seconds": 1.0, "steps": float(len(steps)), "interrupted": 0.0})


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(build_callbacks({"tensorboard": {}})[-1], tmp_path, range(1, 5))
    log(build_callbacks({"tensorboard": {}})[-1], tmp_path, range(3, 6), first_step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"reward_mean", "eval/pass@1", "kl"}
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(n, n / 8) for n in range(1, 6)]


def test_trackio_holds_each_step_once_after_a_resume(tmp_path):
    """In a process of its own: Trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(Path(__file__).parent)}
    code = """
from pathlib import Path
from test_callbacks_loggers import build_callbacks, log
for first_step in (1, 3):
    trackio = build_callbacks({"trackio": {"project": "sums"}})[-1]
    log(trackio, Path("a-run"), range(first_step, first_step + 3), first_step)
"""
    shell = {"env": environment, "cwd": tmp_path, "check": True, "capture_output": True, "text": True}
    written = subprocess.run([sys.executable, "-c", code], **shell)
    assert written.stdout == 'trackio: see the run with  trackio show --project "sums"\n' * 2
    reader = [sys.executable, "-m", "trackio.cli", "get", "metric", "--project", "sums", "--run", "a-run"]
    read = subprocess.run([*reader, "--metric", "reward_mean", "--json"], **shell)
    values = json.loads(read.stdout)["values"]
    assert [(v["step"], v["value"]) for v in values] == [(n, n / 8) for n in range(1, 6)]


def test_wandb_writes_an_offline_run_and_goes_on_under_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"wandb": {"mode": "offline", "project": "sums", "tags": ["tiny"]}}
    log(build_callbacks(options)[-1], tmp_path, range(1, 3))
    log(build_callbacks(options)[-1], tmp_path, range(3, 5), first_step=3)
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{run_id}.wandb"}
    assert all(file.stat().st_size > 0 for file in files)


def test_wandb_refuses_an_unknown_mode():
    pytest.importorskip("wandb")
    with pytest.raises(ConfigError, match=r"callbacks.wandb.mode='ofline' .* Did you mean offline\?"):
        build_callbacks({"wandb": {"mode": "ofline"}})
