"""The event loop that async reward functions run on: one for the process, in a thread of its own.

It outlives a step, so that a client or a semaphore that a function keeps is never bound to a loop that is gone; and
it is nobody else's, so that rewards can be asked from inside a running loop, too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

GRACE = 2.0
"""Seconds that a cancelled coroutine has for its clean-up, and the loop for noticing that a call is late."""


class Loop:
    """A running event loop; coroutines are handed to it from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._stuck = False
        threading.Thread(target=self._run, name="rewards", daemon=True).start()

    @property
    def usable(self) -> bool:
        """False in a forked process, where the thread is missing, and after a coroutine has blocked the loop."""
        return not self._stuck and self._process == os.getpid()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; the future has its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def cancel_all(self) -> None:
        """Cancel every other task; runs on the loop."""
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    def give_up(self) -> None:
        """Leave the loop to whatever blocks it; what comes next gets another one."""
        self._stuck = True

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # raised in a task; who awaits that task gets it, too
                continue


class Flight:
    """The coroutines of one batch: all are over, or cancelled, when it is closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: set[Loop] = set()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> tuple[Future[T], Loop]:
        """Run a coroutine; return its future and the loop that it is on."""
        loop = reward_loop()
        self._loops.add(loop)
        return loop.start(self._tracked(coroutine)), loop

    def task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Make a task of a coroutine; called on the loop."""
        task = asyncio.ensure_future(coroutine)
        self._track(task)
        return task

    def close(self) -> None:
        """Cancel what is still running, and wait a little for its clean-up."""
        ends = [loop.start(self._end()) for loop in self._loops if loop.usable]
        wait(ends, timeout=2 * GRACE)

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._track(task)
        return await coroutine

    def _track(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not print it

    async def _end(self) -> None:
        for _ in range(2):  # what has just been handed over begins first, so that it can clean up after itself
            await asyncio.sleep(0)
        own = [task for task in self._tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in own:
            task.cancel()
        if own:
            await asyncio.wait(own, timeout=GRACE)


def abandon() -> None:
    """Cancel all that runs on the process's loop for rewards: whoever waits for it gets a CancelledError."""
    for loop in list(_current):
        if loop.usable:
            loop.start(loop.cancel_all())


_LOCK = threading.Lock()
_current: list[Loop] = []


def reward_loop() -> Loop:
    """Return the process's loop for rewards, started when it is first asked for."""
    with _LOCK:
        if not _current or not _current[0].usable:
            _current[:] = [Loop()]
        return _current[0]
