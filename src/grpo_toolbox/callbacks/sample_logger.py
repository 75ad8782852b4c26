"""samples.jsonl: a few completions every N steps, to read while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_toolbox.callbacks import Callback, whole_number
from grpo_toolbox.callbacks.actions import actions
from grpo_toolbox.callbacks.jsonl import JsonLines
from grpo_toolbox.types import RunInfo, Step

FIELDS = ("step", "prompt_id", "prompt", "completion", "finish_reason", "reward", "rewards", "advantage", "columns")


class SampleLogger(Callback):
    """Write the first `completions` completions of the first `prompts` prompts to `<run_dir>/samples.jsonl`.

    Steps written: the first, every `every`-th, and the last. One line per completion. The first ones are taken, not
    the best ones: what is read here stands for what the policy does.
    """

    def __init__(self, every: int = 10, prompts: int = 2, completions: int = 2) -> None:
        self._every = whole_number("callbacks.sample_logger.every", every)
        self._prompts = whole_number("callbacks.sample_logger.prompts", prompts)
        self._completions = whole_number("callbacks.sample_logger.completions", completions)
        self._unwritten: Step | None = None

    def on_start(self, run: RunInfo) -> None:
        self._lines = JsonLines(run.run_dir / "samples.jsonl", run.first_step)

    def on_step(self, step: Step) -> None:
        if step.number == 1 or step.number % self._every == 0:
            self._write(step)
        else:
            self._unwritten = step

    def on_end(self, summary: Mapping[str, float]) -> None:
        if self._unwritten is not None:
            self._write(self._unwritten)
        self._lines.close()

    def _write(self, step: Step) -> None:
        records = actions(step, self._prompts, self._completions)
        self._lines.write({field: record[field] for field in FIELDS} for record in records)
        self._unwritten = None
