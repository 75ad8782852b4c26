"""metrics.jsonl: one line of numbers per finished step."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.jsonl import JsonLines, finite
from grpo_toolbox.types import RunInfo, Step


class MetricsFile(Callback):
    """Append each finished step's metrics to `<run_dir>/metrics.jsonl`, `step` first, non-finite numbers as null.

    A resumed run drops the lines after the step that it resumes from: they were written after its checkpoint.
    """

    def on_start(self, run: RunInfo) -> None:
        self._lines = JsonLines(run.run_dir / "metrics.jsonl", run.first_step)

    def on_step(self, step: Step) -> None:
        metrics = {name: finite(value) for name, value in step.metrics.items() if name != "step"}
        self._lines.write([{"step": step.number, **metrics}])

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._lines.close()
