"""TensorBoard: one scalar per metric and step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.loggers import need_extra, numbers
from grpo_toolbox.types import RunInfo, Step


class TensorBoard(Callback):
    """Write every metric as a scalar to `dir` (relative to the run folder); see it with `tensorboard --logdir runs`.

    A resumed run hides what was logged after the step that it resumes from.
    """

    def __init__(self, dir: str = "tensorboard") -> None:
        need_extra("tensorboard")
        self._dir = Path(dir)

    def on_start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.first_step if run.first_step > 1 else None
        self._writer = SummaryWriter(str(run.run_dir / self._dir), purge_step=purge_step, flush_secs=10)

    def on_step(self, step: Step) -> None:
        for name, value in numbers(step.metrics).items():
            self._writer.add_scalar(name, value, step.number)

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._writer.close()
