"""The run folder: which one, whether it may be used, and what is written there first."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import RunInfo


@contextmanager
def claim_run_dir(config: RunConfig, plain: dict[str, Any]) -> Iterator[RunInfo]:
    """Give the run its folder for the block: found usable, and from then on this run's.

    A new run that ends before its first step is finished leaves nothing that was not there before, so that the same
    command can be given again. Raises ConfigError for a folder that holds another run or cannot be written.
    """
    run_dir = _run_dir(config)
    ours = not run_dir.is_dir() or not any(run_dir.iterdir())
    info = _open(config, run_dir, plain)
    if info.first_step == 1:
        write_config(info)
    try:
        yield info
    finally:
        if info.first_step == 1 and not _has_steps(run_dir):
            _give_back(run_dir, whole=ours)


def write_config(info: RunInfo) -> None:
    """Write `config.yaml`, the resolved configuration."""
    text = yaml.safe_dump(dict(info.config), sort_keys=False, allow_unicode=True)
    (info.run_dir / "config.yaml").write_text(text, encoding="utf-8")


def stages_dir(config: RunConfig) -> Path:
    """Return the folder of a run of several stages, each of which claims a folder below it."""
    from grpo_toolbox.checkpoint import check_run_dir

    run_dir = _run_dir(config)
    if config.resume is None and not config.trainer.resume:
        check_run_dir(run_dir, resuming=False)
    elif not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"resume={run_dir} holds no run of several stages (config.yaml is missing).")
    elif not _has_stages(run_dir):
        raise ConfigError(
            f"resume={run_dir} is a run of its own, or one stage, and trainer.stages is set. Name the folder that "
            "holds the stages, or leave trainer.stages out."
        )
    return run_dir


def _open(config: RunConfig, run_dir: Path, plain: dict[str, Any]) -> RunInfo:
    from grpo_toolbox.checkpoint import check_run_dir, finished_step, latest_checkpoint, load_checkpoint

    resuming = config.resume is not None or config.trainer.resume
    check_run_dir(run_dir, resuming=resuming)
    finished = 0
    if resuming:
        newest = latest_checkpoint(run_dir / "checkpoints", warn=False)  # building the run warns
        finished = finished_step(newest) if newest else 0
        if newest and finished >= config.trainer.max_steps and not load_checkpoint(newest, "cpu")["owed"]:
            raise ConfigError(
                f"{run_dir} has already finished step {finished}, and trainer.max_steps={config.trainer.max_steps}: "
                "raise trainer.max_steps to train on."
            )
    return RunInfo(config.name, run_dir, config.trainer.max_steps, finished + 1, plain)


def _has_stages(run_dir: Path) -> bool:
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    return config.get("trainer", {}).get("stages") is not None


def _has_steps(run_dir: Path) -> bool:
    """Whether a step was finished; step 0 is the evaluation before training."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open(encoding="utf-8") as lines:
        return any(json.loads(line)["step"] > 0 for _, line in zip(range(2), lines, strict=False))


def _give_back(run_dir: Path, *, whole: bool) -> None:
    if whole:
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    for name in ("config.yaml", "metrics.jsonl"):  # what marks a folder as a run's
        (run_dir / name).unlink(missing_ok=True)


def _run_dir(config: RunConfig) -> Path:
    if config.resume is not None:
        if config.run_dir not in (None, config.resume):
            raise ConfigError(f"resume={config.resume} and run_dir={config.run_dir} name two folders: set only resume.")
        return Path(config.resume).expanduser()
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser()
    if config.trainer.resume:
        raise ConfigError("trainer.resume=true needs run_dir=<the run to go on with>, or set resume=<run_dir>.")
    base = Path("runs") / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    taken = 1
    run_dir = base
    while run_dir.exists():  # jobs of one sweep start within a second
        taken += 1
        run_dir = base.with_name(f"{base.name}-{taken}")
    return run_dir
