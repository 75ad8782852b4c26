"""Where a trainer of the library writes, and from where it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_toolbox.checkpoint import check_run_dir, finished_step, latest_checkpoint, load_checkpoint
from grpo_toolbox.config.folder import claim_run_dir, write_config
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import RunInfo

log = logging.getLogger(__name__)

_TAKEN = ("metrics.jsonl", "config.yaml", "checkpoints")


def free_folder(wanted: Path) -> Path:
    """Return `wanted`, or where it holds a run the first of `wanted-2`, `wanted-3`, … that does not."""
    wanted = wanted.expanduser()
    folder, number = wanted, 1
    while _holds_run(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    if folder != wanted:
        log.warning("output_dir=%s holds a run already: this one is written to %s.", wanted, folder)
    return folder


def resumed_from(asked: str | bool | None, output_dir: str) -> Path | None:
    """Return the checkpoint that `train(resume_from_checkpoint=…)` means; None where it means none."""
    if not asked:
        return None
    if asked is True:
        folder = _latest_of(Path(output_dir).expanduser())
    else:
        folder = Path(str(asked)).expanduser()
        folder = folder.parent if folder.name == "model" else folder
        if (folder / "state.pt").is_file():
            return folder.resolve()
    newest = latest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise ConfigError(
            f"resume_from_checkpoint={asked!r}: {folder} has no whole checkpoint. Name a run folder or a folder "
            "checkpoints/step-… of one, or leave it out to begin anew."
        )
    return newest.resolve()


def _latest_of(wanted: Path) -> Path:
    """Return the last of the folders that runs of this output_dir have been written to."""
    folder, number = wanted, 1
    while True:
        number += 1
        following = wanted.with_name(f"{wanted.name}-{number}")
        if not _holds_run(following):
            return folder
        folder = following


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TAKEN)


@contextmanager
def claimed(config: RunConfig, plain: dict[str, Any], checkpoint: Path | None) -> Iterator[RunInfo]:
    """Give the run its folder for the block: a new one, or that of the checkpoint it goes on from."""
    if checkpoint is None:
        with claim_run_dir(config, plain) as info:
            yield info
        return
    run_dir = checkpoint.parents[1]
    check_run_dir(run_dir, resuming=True)
    finished = finished_step(checkpoint)
    if finished >= config.trainer.max_steps and not load_checkpoint(checkpoint, "cpu")["owed"]:
        raise ConfigError(
            f"{checkpoint} has already finished step {finished} of {config.trainer.max_steps}: raise max_steps or "
            "num_train_epochs to train on."
        )
    info = RunInfo(config.name, run_dir, config.trainer.max_steps, finished + 1, plain)
    write_config(info)
    yield info
