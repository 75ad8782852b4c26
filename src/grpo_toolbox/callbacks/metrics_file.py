"""metrics.jsonl: one line of numbers per finished step."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.jsonl import JsonLines, drop_steps, finite
from grpo_toolbox.types import RunInfo, Step


class MetricsFile(Callback):
    """Append each finished step's metrics to `<run_dir>/metrics.jsonl`, `step` first, non-finite numbers as null.

    A resumed run drops the lines after the step that it resumes from: they were written after its checkpoint. Where
    that step comes again, now with the evaluation that a stop had cut short, its line is written anew.
    """

    def on_start(self, run: RunInfo) -> None:
        self._path = run.run_dir / "metrics.jsonl"
        self._lines = JsonLines(self._path, run.first_step)
        self._before = run.first_step - 1

    def on_step(self, step: Step) -> None:
        if step.number == self._before:
            drop_steps(self._path, step.number)
        metrics = {name: finite(value) for name, value in step.metrics.items() if name != "step"}
        self._lines.write([{"step": step.number, **metrics}])

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._lines.close()
