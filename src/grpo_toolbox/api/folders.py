"""Where a trainer of the library writes, and from where it goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_toolbox.checkpoint import check_run_dir, finished_step, latest_checkpoint
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
        folder = Path(str(asked)).expanduser().resolve()
        folder = folder.parent if folder.name == "model" else folder
        if (folder / "state.pt").is_file():
            return folder
        if (folder / "trainer_state.json").is_file():
            raise ConfigError(
                f"resume_from_checkpoint={asked!r} is a checkpoint of transformers' own trainer, whose state is of "
                f"other parts: start a new run from its weights, model={str(folder)!r}."
            )
    newest = latest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise ConfigError(
            f"resume_from_checkpoint={asked!r}: {folder} has no whole checkpoint. Name a run folder or a folder "
            "checkpoints/step-… of one, or leave it out to begin anew."
        )
    return newest.resolve()


def link_checkpoint(output_dir: Path, step: int, checkpoint: Path) -> Path:
    """Make `checkpoint-<step>` in output_dir, where transformers would write it, lead to a checkpoint's model folder.

    So `get_last_checkpoint` finds it and `from_pretrained` reads it. Links to what is gone are removed. Returns the
    link, or the model folder where a folder of another trainer has its name.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for link in _links(output_dir):
        if not link.exists():
            link.unlink()
    link, model = output_dir / f"checkpoint-{step}", checkpoint / "model"
    if link.exists() and not link.is_symlink():
        log.warning("%s is not a checkpoint of this run, which is %s.", link, checkpoint)
        return model
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(model.resolve(), output_dir.resolve()), target_is_directory=True)
    except OSError as error:  # a file system without links
        log.warning("%s cannot be made (%s): the checkpoint is %s.", link, error.strerror, checkpoint)
        return model
    return link


def drop_links(output_dir: Path) -> None:
    """Remove the links to the checkpoints of an earlier run, which stay where they are."""
    for link in _links(output_dir):
        link.unlink()


def _links(output_dir: Path) -> list[Path]:
    return [path for path in output_dir.glob("checkpoint-*") if path.is_symlink()]


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
    if finished >= config.trainer.max_steps:
        log.warning(
            "%s has already finished step %d of %d: nothing is trained; raise max_steps or num_train_epochs to go on.",
            *(checkpoint, finished, config.trainer.max_steps),
        )
    info = RunInfo(config.name, run_dir, config.trainer.max_steps, finished + 1, plain)
    write_config(info)
    yield info
