"""Interpreters that wait in their sandboxes for a program: each serves one candidate and is killed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

from grpo_toolbox.rewards.code.box import Box, Ended, within
from grpo_toolbox.rewards.code.records import Limits, SandboxError
from grpo_toolbox.rewards.code.sandbox import Sandbox, View, boot_command, harness

START_SECONDS = 30.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.5
MOST_READY = 8
"""Boxes that wait, at most; more than these may be at work."""


class State:
    """What has to be ended with a pool."""

    def __init__(self) -> None:
        self.open: set[Box] = set()
        self.waiting: deque[asyncio.Task[Box]] = deque()
        """Boxes that come up, and then wait for a candidate."""
        self.starts: set[asyncio.Task[Box]] = set()
        """Those that come up just now."""
        self.working: set[asyncio.Task[Any]] = set()
        """Judges at work."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let the pool know of the current task while the block lasts."""
        task = asyncio.current_task()
        assert task is not None
        self.working.add(task)
        try:
            yield
        finally:
            self.working.discard(task)


class Pool:
    """Boxes that are ready, and the thread on whose event loop everything about sandboxes happens."""

    def __init__(self, sandbox: Sandbox, shown: View, limits: Limits, at_once: int) -> None:
        self.sandbox = sandbox
        self.command = boot_command(shown.python)
        self.harness = harness(shown.compiled)
        self.paths = list(shown.packages)
        self.limits = limits
        self.ready = min(at_once, MOST_READY)
        """How many boxes wait for candidates."""
        self.turns = asyncio.Semaphore(at_once)
        self.referees: list[Box] = []
        self.state = State()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run_loop, args=(self.loop,), name="sandboxes", daemon=True)
        self.thread.start()
        self.finalizer = weakref.finalize(self, _shut, self.loop, self.thread, self.state)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Have a coroutine run on the pool's own loop, from any thread and any loop."""
        if not self.finalizer.alive:
            work.close()
            raise SandboxError("the sandboxes are closed")
        return asyncio.run_coroutine_threadsafe(_at_work(self.state, work), self.loop)

    def close(self) -> None:
        """Kill every box and end the thread; nothing is left when this returns."""
        self.finalizer()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A place among those that may judge at a time."""
        with self.state.at_work():
            async with self.turns:
                yield

    async def take(self) -> Box:
        """A box that nobody has used; another one is started in its place. SandboxError where none comes up."""
        for attempt in range(ATTEMPTS):
            while len(self.state.waiting) <= self.ready:
                starting = asyncio.create_task(self._start())
                self.state.starts.add(starting)
                starting.add_done_callback(self.state.starts.discard)
                self.state.waiting.append(starting)
            starting = self.state.waiting.popleft()
            try:
                return await asyncio.shield(starting)
            except SandboxError:
                if attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
            except asyncio.CancelledError:  # whoever asked gave up; the next one may have it
                self.state.waiting.appendleft(starting)
                raise
        raise AssertionError("unreachable")

    async def take_referee(self) -> Box:
        """A box whose process runs test code; it is to be given back with `give_referee`, or discarded."""
        if self.referees:
            return self.referees.pop()
        box = await self.take()
        box.may_print_on = True
        try:
            await box.send({"role": "referee"})
        except Ended as error:
            await self.discard(box)
            raise SandboxError(f"the tests' own sandbox ended: {error}") from error
        return box

    def give_referee(self, box: Box) -> None:
        """Take back a referee that has finished its suite."""
        self.referees.append(box)

    async def discard(self, box: Box) -> None:
        """End a box."""
        await asyncio.shield(self._close(box))

    async def _close(self, box: Box) -> None:
        await box.close()
        self.state.open.discard(box)

    async def _start(self) -> Box:
        """Start an interpreter, and have it take on its limits; SandboxError where it does not come up."""
        began = time.monotonic()
        try:
            process = await self.sandbox(self.command)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        box = Box(process, self.limits)
        self.state.open.add(box)
        try:
            await within(START_SECONDS, (box,), self._greet(box))
        except (Ended, TimeoutError) as error:
            await self._close(box)
            said = box.printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
            waited = f"no interpreter after {time.monotonic() - began:.1f} s"
            raise SandboxError(f"the sandbox does not come up: {said[:300] or waited}") from error
        return box

    async def _greet(self, box: Box) -> None:
        """Send the harness and the limits, and wait until they hold."""
        names = ("cpu_seconds", "memory_mb", "processes", "file_mb", "files", "life_seconds")
        limits = {name: getattr(self.limits, name) for name in names}
        await box.send_line(self.harness)
        await box.send({**limits, "paths": self.paths, "user": getattr(box.process, "user", None)})
        await box.receive()


async def _at_work(state: State, work: Coroutine[Any, Any, Any]) -> Any:
    with state.at_work():
        return await work


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _shut(loop: asyncio.AbstractEventLoop, thread: threading.Thread, state: State) -> None:
    """End a pool's boxes and its thread."""
    if threading.current_thread() is thread:  # where the last reference went; it cannot wait for itself
        threading.Thread(target=_shut, args=(loop, thread, state)).start()
        return

    async def end() -> None:
        judges = [*state.working]
        for judge in judges:
            judge.cancel()
        await asyncio.gather(*judges, return_exceptions=True)
        # a start that is broken off may leave its process behind
        await asyncio.gather(*state.starts, *state.waiting, return_exceptions=True)
        await asyncio.gather(*(box.close() for box in [*state.open]), return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
