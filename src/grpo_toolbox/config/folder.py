"""The run folder: which one, whether it may be used, and what is written there first."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import yaml

from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import RunInfo


def open_run_dir(config: RunConfig, plain: dict[str, Any]) -> RunInfo:
    """Return the run's folder, made and found usable, and its first step."""
    from grpo_toolbox.checkpoint import check_run_dir, finished_step, latest_checkpoint

    resuming = config.resume is not None or config.trainer.resume
    run_dir = _run_dir(config)
    check_run_dir(run_dir, resuming=resuming)
    finished = 0
    if resuming:
        newest = latest_checkpoint(run_dir / "checkpoints")
        finished = finished_step(newest) if newest else 0
        if finished >= config.trainer.max_steps:
            raise ConfigError(
                f"{run_dir} has already finished step {finished}, and trainer.max_steps={config.trainer.max_steps}: "
                "raise trainer.max_steps to train on."
            )
    return RunInfo(config.name, run_dir, config.trainer.max_steps, finished + 1, plain)


def write_config(info: RunInfo) -> None:
    """Write `config.yaml`, the resolved configuration; from then on the folder belongs to this run."""
    text = yaml.safe_dump(dict(info.config), sort_keys=False, allow_unicode=True)
    (info.run_dir / "config.yaml").write_text(text, encoding="utf-8")


def _run_dir(config: RunConfig) -> Path:
    if config.resume is not None:
        if config.run_dir not in (None, config.resume):
            raise ConfigError(f"resume={config.resume} and run_dir={config.run_dir} name two folders: set only resume.")
        return Path(config.resume)
    if config.run_dir is not None:
        return Path(config.run_dir)
    if config.trainer.resume:
        raise ConfigError("trainer.resume=true needs run_dir=<the run to go on with>, or set resume=<run_dir>.")
    base = Path("runs") / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    taken = 1
    run_dir = base
    while run_dir.exists():  # jobs of one sweep start within a second
        taken += 1
        run_dir = base.with_name(f"{base.name}-{taken}")
    return run_dir
