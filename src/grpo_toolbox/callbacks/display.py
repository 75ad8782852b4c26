"""What a person sees of a run: a live panel on a terminal, plain lines in a file or a pipe, a summary at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.progress import Progress
from grpo_toolbox.callbacks.screen import closing_lines, counted, headline, live_panel, plain_line
from grpo_toolbox.errors import unknown_option
from grpo_toolbox.types import RunInfo, Step

MODES = ("auto", "live", "plain")
REFRESHES_PER_SECOND = 4


class Display(Callback):
    """Show the run: `auto` is `live` on a terminal and `plain` elsewhere.

    Live, a thread of its own draws four times a second, so that a step costs microseconds and the clock goes on during
    long ones. Plain, there is at most one line a second, fewer as the run gets longer, and the first and last always.
    """

    def __init__(self, mode: str = "auto") -> None:
        if mode not in MODES:
            raise unknown_option("callbacks.display.mode", mode, MODES)
        self._mode = mode
        self._live: Live | None = None
        self._printed: int | None = None
        self._next_line = 0.0

    def on_start(self, run: RunInfo) -> None:
        live = self._mode == "live" or (self._mode == "auto" and _is_screen())
        self._console = Console(highlight=False) if live else Console(highlight=False, color_system=None)
        self._progress = Progress(run, time.monotonic())
        if live:
            # transient: the summary takes the panel's place
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        else:
            done = f" (resumed after step {run.first_step - 1})" if run.first_step > 1 else ""
            print(f"{run.name}: {counted(run.max_steps)}{done}", flush=True)

    def on_step(self, step: Step) -> None:
        now = time.monotonic()
        self._progress.add(step, now)
        always = (self._progress.run.first_step, self._progress.run.max_steps)
        if self._live is None and (now >= self._next_line or step.number in always):
            self._print_line(now)

    def on_end(self, summary: Mapping[str, float]) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._printed != self._progress.number and self._progress.metrics:
            self._print_line(time.monotonic())
        self._print_summary(summary)

    def _draw(self) -> RenderableType:
        return live_panel(self._progress, time.monotonic(), self._console.width)

    def _print_line(self, now: float) -> None:
        print(plain_line(self._progress, now), flush=True)
        self._printed = self._progress.number
        # A fiftieth of the time so far: an hour gives 260 lines, not 3600.
        self._next_line = now + min(max((now - self._progress.started) / 50, 1.0), 60.0)

    def _print_summary(self, ended: Mapping[str, float]) -> None:
        self._console.print(Text(f"\n{headline(self._progress, ended)}", style="bold"), soft_wrap=True)
        for label, value in closing_lines(self._progress, ended, sys.argv):
            # No border and no wrapping: paths and commands are there to be copied.
            self._console.print(Text.assemble((f"  {label:<12}", "dim"), value), soft_wrap=True)


def _is_screen() -> bool:
    """Whether stdout is a terminal that can redraw and knows Unicode; FORCE_COLOR does not make a pipe one."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return sys.stdout.isatty() and not Console().is_dumb_terminal and encoding == "utf8"
