"""traces/actions.jsonl: every rollout as one action record, for `toolbox traces` and for any later analysis."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_toolbox.callbacks import Callback, whole_number
from grpo_toolbox.callbacks.actions import actions
from grpo_toolbox.callbacks.jsonl import JsonLines
from grpo_toolbox.types import RunInfo, Step


class TraceRollouts(Callback):
    """Write every rollout of every `every`-th step to `<run_dir>/traces/actions.jsonl`, one record per line.

    A resumed run drops the records of later steps, so that no step is there twice.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = whole_number("callbacks.trace_rollouts.every", every)

    def on_start(self, run: RunInfo) -> None:
        self._lines = JsonLines(run.run_dir / "traces" / "actions.jsonl", run.first_step)

    def on_step(self, step: Step) -> None:
        if step.number % self._every == 0:
            self._lines.write(actions(step))

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._lines.close()
