"""`toolbox train` with `trainer.stages`: each stage in a folder of its own, from the model of the one before."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help does not wait for OmegaConf
    from grpo_toolbox.config.schema import RunConfig


def train_stages(
    config: RunConfig, plain: dict[str, Any], train: Callable[[tuple[RunConfig, dict[str, Any]]], int]
) -> int:
    """Train the stages that are not finished yet; returns 0, or the code of the one that was stopped.

    Everything that can be wrong with any stage is found before the first begins. A stage that does not finish is
    followed by the command that goes on with it and the others.
    """
    from grpo_toolbox.checkpoint import latest_checkpoint
    from grpo_toolbox.config.folder import stages_dir, write_config
    from grpo_toolbox.config.inputs import check_inputs
    from grpo_toolbox.config.stages import stages_of, starting_from
    from grpo_toolbox.types import RunInfo

    run_dir = stages_dir(config)
    stages = stages_of(plain, run_dir)
    for stage in stages:
        check_inputs(stage.config)
    write_config(RunInfo(config.name, run_dir, 0, 1, plain))
    sys.argv = sys.argv[:1]  # of which the display makes a command: one of a single stage would be another run
    start: Path | None = None
    for stage in stages:
        ready = stage if start is None else starting_from(stage, start)
        folder = run_dir / stage.name
        if not _is_finished(folder, ready.config.trainer.max_steps):
            resumed = str(folder) if latest_checkpoint(folder / "checkpoints", warn=False) else None
            work = (dataclasses.replace(ready.config, resume=resumed), ready.plain)
            if code := _finish(partial(train, work), run_dir):
                return code
        newest = latest_checkpoint(folder / "checkpoints")
        start = newest / "model" if newest else start
    return 0


def _finish(train_stage: Callable[[], int], run_dir: Path) -> int:
    """Train one stage and return its code; where it does not finish, say what goes on with it and the others."""
    code = 1
    try:
        code = train_stage()
    finally:
        if code:
            print(f"  {'go on with':<12}{shlex.join(['toolbox', 'train', f'resume={run_dir}'])}", flush=True)
    return code


def _is_finished(folder: Path, max_steps: int) -> bool:
    from grpo_toolbox.checkpoint import finished_step, latest_checkpoint, load_checkpoint

    newest = latest_checkpoint(folder / "checkpoints", warn=False)
    if newest is None or finished_step(newest) < max_steps:
        return False
    return not load_checkpoint(newest, "cpu")["owed"]
