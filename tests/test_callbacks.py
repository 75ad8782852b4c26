"""The registry, and the files that a run leaves: metrics, samples, traces."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import grpo_toolbox
from grpo_toolbox.callbacks import CALLBACKS, Callback, build_callbacks
from grpo_toolbox.callbacks.actions import actions
from grpo_toolbox.callbacks.loggers import need_extra
from grpo_toolbox.callbacks.metrics_file import MetricsFile
from grpo_toolbox.callbacks.sample_logger import SampleLogger
from grpo_toolbox.callbacks.trace_rollouts import TraceRollouts
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import Prompt, Rollout, RunInfo, Scores, Step

NAN = float("nan")
CONF = Path(grpo_toolbox.__file__).parent / "conf"


def run_info(folder: Path, first_step: int = 1, max_steps: int = 4) -> RunInfo:
    return RunInfo("a-run", folder, max_steps, first_step, {"trainer": {"lr": 0.1}})


def make_step(number: int, advantages: torch.Tensor | None = None, **columns: object) -> Step:
    """Two prompts, two completions each, components exact (1 0 | 1 1) and format (0.1 - | 0.1 0.1)."""
    prompts = [Prompt(7, "1+1=", (3, 4), columns), Prompt(9, [{"role": "user", "content": "2+2="}], (5,), columns)]
    texts = ["2", "3", "4", "4"]
    rollouts = [
        Rollout(prompts[i // 2], (10 + i, 1), (-0.1, -1.5), "stop" if i != 1 else "length", texts[i], number - 1)
        for i in range(4)
    ]
    components = torch.tensor([[[1.0, 0.1], [0.0, NAN]], [[1.0, 0.1], [1.0, 0.1]]])
    total = components.nan_to_num(0.0).sum(-1)
    scores = Scores(("exact", "format"), (1.0, 1.0), components, total)
    if advantages is None:
        advantages = total - total.mean(1, keepdim=True)
    return Step(number, {"reward_mean": total.mean().item()}, rollouts, scores, advantages)


def play(callback: Callback, run: RunInfo, steps: list[Step]) -> None:
    callback.on_start(run)
    for step in steps:
        callback.on_step(step)
    callback.on_end({"seconds": 1.0, "steps": float(len(steps)), "interrupted": 0.0})


def read(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_registered_callback_builds_with_its_defaults(name):
    if name in ("tensorboard", "trackio", "wandb"):
        pytest.importorskip(name)
    assert isinstance(build_callbacks({name: {}})[-1], Callback)


def test_metrics_file_is_first_display_is_last_and_null_switches_off():
    built = build_callbacks({"display": {}, "sample_logger": {"every": 3}, "trace_rollouts": None})
    assert [type(callback).__name__ for callback in built] == ["MetricsFile", "SampleLogger", "Display"]
    assert [type(callback).__name__ for callback in build_callbacks({})] == ["MetricsFile"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"sample_loger": {}}, r"callbacks='sample_loger' is not an option: .*wandb.* Did you mean sample_logger\?"),
        (
            {"sample_logger": {"evry": 3}},
            r"callbacks.sample_logger.evry .* has: every, prompts, completions. Did you mean every\?",
        ),
        ({"metrics_file": {"path": "x"}}, r"callbacks.metrics_file.path .* has: none"),
        ({"metrics_file": None}, "cannot be switched off"),
        ({"sample_logger": {"every": 0}}, r"sample_logger.every=0 .* whole number of at least 1"),
        ({"trace_rollouts": {"every": True}}, r"trace_rollouts.every=True"),
        ({"trace_rollouts": {"every": "ten"}}, r"trace_rollouts.every='ten'"),
        ({"trace_rollouts": 5}, r"callbacks.trace_rollouts=5 .* mapping of options"),
        ({"display": {"mode": "fancy"}}, r"display.mode='fancy' is not an option: auto, live, plain"),
        ({"memory_writer": {"threshold": "high"}}, r"memory_writer.threshold='high'"),
        ({"no_such_package:Thing": {}}, r"no_such_package:Thing.* cannot be imported"),
        ({"json:JSONDecoder": {}}, r"derive it from grpo_toolbox.callbacks.Callback"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_opened(specs, message):
    with pytest.raises(ConfigError, match=message):
        build_callbacks(specs)


def test_a_callback_of_the_users_own_plugs_in_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks.py").write_text(
        "from grpo_toolbox.callbacks import Callback\n"
        "class Stopwatch(Callback):\n"
        "    def __init__(self, unit): self.unit = unit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    built = build_callbacks({"my_callbacks:Stopwatch": {"unit": "s"}})
    assert built[-1].unit == "s"
    with pytest.raises(ConfigError, match="needs unit"):
        build_callbacks({"my_callbacks:Stopwatch": {}})


def test_a_missing_extra_is_named_even_where_a_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("some_logger") is not None
    with pytest.raises(ConfigError, match=r'pip install "grpo-toolbox\[some_logger\]"'):
        need_extra("some_logger")


@pytest.mark.parametrize("option", ["default", "none", "tensorboard", "trackio", "wandb"])
def test_every_yaml_composes_into_callbacks(option):
    if option in ("tensorboard", "trackio", "wandb"):
        pytest.importorskip(option)
    with initialize_config_dir(str(CONF), version_base=None):
        config = OmegaConf.to_container(compose(overrides=[f"+callbacks={option}"]).callbacks)
    assert set(config) == set(CALLBACKS) - {"metrics_file"}  # each can be set from the command line without a plus
    on = {name for name, options in config.items() if options is not None}
    usual = {"sample_logger", "trace_rollouts", "memory_writer", "display"}
    assert on == {"default": usual, "none": set()}.get(option, {*usual, option})
    assert len(build_callbacks(config)) == 1 + len(on)


def test_building_the_default_callbacks_imports_no_torch():
    code = (
        "import sys; from grpo_toolbox.callbacks import build_callbacks;"
        "build_callbacks({'sample_logger': {}, 'trace_rollouts': {}, 'memory_writer': {}, 'display': {}});"
        "from grpo_toolbox.cli import memory, traces;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_metrics_are_strict_json_with_the_step_first(tmp_path):
    metrics = {"kl": NAN, "step": 3, "loss": math.inf, "lr": 1e-3, "clipped": 2}
    play(MetricsFile(), run_info(tmp_path), [Step(3, metrics)])
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 3, "kl": null, "loss": null, "lr": 0.001, "clipped": 2}\n'
    )


def test_a_line_is_on_disk_as_soon_as_its_step_is_done(tmp_path):
    callback = MetricsFile()
    callback.on_start(run_info(tmp_path))
    callback.on_step(Step(1, {"kl": 0.5}))
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "kl": 0.5}]


def test_a_resumed_run_leaves_the_same_files_as_one_that_never_stopped(tmp_path):
    """Killed in the middle of step 4, after the checkpoint of step 2."""
    specs = {"sample_logger": {"every": 2, "prompts": 1}, "trace_rollouts": {}}
    steps = [Step(0, {"eval/reward": 0.0}), *map(make_step, range(1, 5))]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for callback in build_callbacks(specs):
        play(callback, run_info(whole), steps)
    for callback in build_callbacks(specs):
        callback.on_start(run_info(killed))
        for step in steps[:4]:
            callback.on_step(step)
    for name in ("metrics.jsonl", "samples.jsonl", "traces/actions.jsonl"):
        with (killed / name).open("a") as file:
            file.write('{"step": 4, "reward_m')
    for callback in build_callbacks(specs):
        play(callback, run_info(killed, first_step=3), steps[3:])
    for name in ("metrics.jsonl", "samples.jsonl", "traces/actions.jsonl"):
        assert (killed / name).read_text() == (whole / name).read_text()
        assert {record["step"] for record in read(whole / name)} >= {1, 2, 4}


def test_half_a_line_of_an_earlier_step_is_dropped_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kl": 1.0}\n{"step": 2, "kl')
    play(MetricsFile(), run_info(tmp_path, first_step=3), [Step(3, {})])
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 1.0}\n')
    play(MetricsFile(), run_info(tmp_path, first_step=1), [Step(0, {"eval/reward": 0.5})])
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/reward": 0.5}]


def test_samples_are_taken_at_the_first_every_nth_and_last_step(tmp_path):
    play(SampleLogger(every=3, prompts=1, completions=2), run_info(tmp_path), [make_step(n) for n in range(1, 9)])
    records = read(tmp_path / "samples.jsonl")
    assert [record["step"] for record in records] == [1, 1, 3, 3, 6, 6, 8, 8]
    assert records[1] == {
        "step": 1,
        "prompt_id": 7,
        "prompt": "1+1=",
        "completion": "3",
        "finish_reason": "length",
        "reward": 0.0,
        "rewards": {"exact": 0.0, "format": None},
        "advantage": -0.55,  # 0 - (1.1 + 0) / 2
        "columns": {},
    }


def test_the_last_step_is_sampled_once(tmp_path):
    play(SampleLogger(every=2, prompts=1, completions=1), run_info(tmp_path), [make_step(1), make_step(2)])
    assert [record["step"] for record in read(tmp_path / "samples.jsonl")] == [1, 2]


def test_every_rollout_is_traced_as_one_action_record(tmp_path):
    play(TraceRollouts(), run_info(tmp_path), [Step(0, {"eval/reward": 0.1}), make_step(1, answer="2")])
    records = read(tmp_path / "traces" / "actions.jsonl")
    assert [(r["group"], r["index"], r["prompt_id"]) for r in records] == [(0, 0, 7), (0, 1, 7), (1, 0, 9), (1, 1, 9)]
    assert records[2] == {
        "step": 1,
        "prompt_id": 9,
        "group": 1,
        "index": 0,
        "prompt": [{"role": "user", "content": "2+2="}],
        "completion": "4",
        "finish_reason": "stop",
        "reward": 1.1,
        "rewards": {"exact": 1.0, "format": 0.1},
        "advantage": 0.0,
        "columns": {"answer": "2"},
        "weights_version": 0,
        "prompt_ids": [5],
        "token_ids": [12, 1],
        "logps": [-0.1, -1.5],
        "written": None,
    }


def test_traces_every_second_step(tmp_path):
    play(TraceRollouts(every=2), run_info(tmp_path), [make_step(n) for n in range(1, 6)])
    assert [r["step"] for r in read(tmp_path / "traces" / "actions.jsonl")] == [2] * 4 + [4] * 4


def test_a_per_token_advantage_is_as_long_as_its_completion():
    padded = torch.tensor([[[0.5, -0.25, 9.0], [NAN, 1.0, 9.0]], [[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]]])  # (2, 2, 3)
    records = list(actions(make_step(1, padded)))
    assert records[0]["advantage"] == [0.5, -0.25]
    assert records[1]["advantage"] == [None, 1.0]


def test_columns_that_json_cannot_hold_are_left_out(tmp_path):
    step = make_step(1, answer="2", image=b"png", level=NAN, tags=("a", "b"), half_emoji="\ud83d")
    play(TraceRollouts(), run_info(tmp_path), [step])
    columns = read(tmp_path / "traces" / "actions.jsonl")[0]["columns"]
    assert columns == {"answer": "2", "level": None, "tags": ["a", "b"], "half_emoji": "\ud83d"}
