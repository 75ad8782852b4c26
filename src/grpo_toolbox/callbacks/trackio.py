"""Trackio: a dashboard on this machine, or on a Hugging Face Space."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.loggers import need_extra, numbers
from grpo_toolbox.types import RunInfo, Step


class Trackio(Callback):
    """Log every metric to Trackio under `project`; the run is named like the run folder unless `name` is set.

    Without `space_id` the numbers stay on this machine (in TRACKIO_DIR, by default Trackio's cache folder); see them
    with `trackio show --project grpo-toolbox`. A resumed run goes on under its name.
    """

    def __init__(
        self,
        project: str = "grpo-toolbox",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
    ) -> None:
        need_extra("trackio")
        self._project, self._name, self._group, self._space_id = project, name, group, space_id

    def on_start(self, run: RunInfo) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints colours into logs; the line below says the same
            self._run = trackio.init(
                project=self._project,
                name=self._name or run.name,
                group=self._group,
                space_id=self._space_id,
                config=dict(run.config),
                resume="allow" if run.first_step > 1 else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # Steps that were logged after the checkpoint are there already; Trackio would keep both copies.
        self._next_step = getattr(self._run, "_next_step", 0) if run.first_step > 1 else 0
        print(f'trackio: see the run with  trackio show --project "{self._project}"', flush=True)

    def on_step(self, step: Step) -> None:
        if step.number >= self._next_step:
            self._run.log(numbers(step.metrics), step=step.number)

    def on_end(self, summary: Mapping[str, float]) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()
