"""SIGTERM and Ctrl-C end a run between two finished steps, never inside an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop; what is in memory is the last finished step.

    A KeyboardInterrupt, so that a reward's `except Exception` does not swallow it and that asyncio and executors let it
    through as they let Ctrl-C through.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"stopped by {received.name}")
        self.received = received
        """The signal; a command line exits with 128 + its number."""


class GracefulStop:
    """Turn the first SIGTERM or SIGINT into Interrupted: at once, or at the end of a protected block.

        with GracefulStop() as stop:
            try:
                for step in range(first, last + 1):
                    ...  # rollouts and scores: given up at once
                    with stop.protect():
                        ...  # update, record, write: all of it or nothing
            except Interrupted:
                ...  # save the last finished step

    The save stands inside the `with`: there a repeated SIGTERM is ignored, as schedulers send it more than once. A
    Ctrl-C after the first signal raises KeyboardInterrupt at once, inside a protected block, too: then nothing in
    memory may be saved. Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._protected = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that was not set from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that asked the run to stop."""
        return self._received

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let the block finish and raise nothing after it: for the save that ends a run, stopped or not."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1

    @contextmanager
    def protect(self) -> Iterator[None]:
        """Let the block finish before a signal stops the run; an error raised in the block goes first."""
        self._raise_if_received()
        with self.shield():
            yield
        self._raise_if_received()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
            self._raise_if_received()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _raise_if_received(self) -> None:
        # Asked again at every protected block: an Interrupted raised inside a destructor is lost, the request is not.
        if self._received is not None and not self._protected:
            raise Interrupted(self._received)
