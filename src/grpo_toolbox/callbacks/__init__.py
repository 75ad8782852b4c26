"""What happens beside training: files, displays and loggers, each seeing finished steps only."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_toolbox.types import RunInfo, Step


class Callback:
    """A listener of the loop; override what you need. It reads records and never changes them."""

    def on_start(self, run: RunInfo) -> None:
        """Called once before the first step."""

    def on_step(self, step: Step) -> None:
        """Called after each finished optimizer step, and once with `number=0` after the evaluation before training."""

    def on_end(self, summary: Mapping[str, float]) -> None:
        """Called once after the last finished step, also when the run was interrupted or failed."""
