"""One interpreter in its sandbox: messages in and out, what it prints, what it uses, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_toolbox.rewards.code.records import MOST_PATIENCE, Limits
from grpo_toolbox.rewards.code.sandbox import Process, children

_MEGABYTE = 1 << 20
_WATCH_SECONDS = 0.05
_STEP_SECONDS = 0.25
_OWN_PROCESSES = 4
"""Processes of a sandbox's own, at most."""

T = TypeVar("T")


class Ended(Exception):
    """The process behind a box is gone, or says what its wire does not allow."""


class Box:
    """One interpreter in its sandbox: messages in and out, what is printed, and the end of it."""

    def __init__(self, process: Process, limits: Limits) -> None:
        self.process = process
        self.limits = limits
        self.printed = bytearray()
        self.fault = ""
        """Which limit it broke: `output`, `memory` or `processes`."""
        self.pid: int | None = getattr(process, "pid", None) if sys.platform.startswith("linux") else None
        self.clock = 0.0
        self.before: dict[int, Turns] = {}
        self.may_print_on = False
        """Whether what it prints is thrown away, however much it is."""
        self.tasks = [asyncio.create_task(self._read_output())]

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message; Ended where nobody reads."""
        await self.send_line(json.dumps(message).encode("ascii") + b"\n")

    async def send_line(self, line: bytes) -> None:
        """Write what is in its final form already."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            await self.process.stdin.drain()
        except (OSError, RuntimeError) as error:  # a closed pipe, or a transport that is closing
            raise Ended("it is gone") from error

    async def receive(self) -> dict[str, Any]:
        """The next message; Ended where there is none or it is no JSON object."""
        try:
            message = json.loads(await self.receive_line())
        except (ValueError, RecursionError) as error:  # whatever the candidate wrote there
            raise Ended("it sent what is no message") from error
        if not isinstance(message, dict):
            raise Ended("it sent what is no message")
        return message

    async def receive_line(self) -> bytes:
        """The next message as it was sent."""
        assert self.process.stdout is not None
        try:
            line = await self.process.stdout.readline()
        except ValueError as error:  # longer than any message may be
            raise Ended("it sent too long a message") from error
        if not line.endswith(b"\n"):
            raise Ended("it is gone")
        return line

    def start_clock(self) -> None:
        """From now on count how long its processes wait for a CPU."""
        self.clock = time.monotonic()
        self.before = self._turns()

    def starved(self) -> float:
        """Seconds that one of its processes was ready to run and did not; the most of any."""
        passed = time.monotonic() - self.clock
        most = 0.0
        for pid, turns in self._turns().items():
            before = self.before.get(pid, Turns())
            most = max(most, turns.waited - before.waited)
            if turns.ready:  # what it has been waiting for since its last turn is not in the kernel's count yet
                most = max(most, passed - (turns.ran - before.ran))
        return most

    def _turns(self) -> dict[int, Turns]:
        return {pid: read_turns(str(pid)) for pid in descendants(self.pid)} if self.pid else {}

    def watch(self) -> None:
        """From now on, end it when all its processes together use too much memory, or are too many."""
        if self.pid:
            self.tasks.append(asyncio.create_task(self._watch_tree(self.pid)))

    async def close(self) -> None:
        """Kill it, and return when nothing of it is left."""
        self._kill()
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.fault != "output":  # what was printed last may still be in the pipe
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self.tasks[0])
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _read_output(self) -> None:
        """Keep what is printed up to the limit, and end what prints more."""
        assert self.process.stderr is not None
        most = self.limits.output_kb << 10
        while piece := await self.process.stderr.read(1 << 14):
            if self.may_print_on:
                continue
            self.printed += piece[: most - len(self.printed)]
            if len(self.printed) >= most:
                self._end("output")
                return

    async def _watch_tree(self, pid: int) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            tree = descendants(pid)
            if resident_bytes(tree) > self.limits.memory_mb * _MEGABYTE:
                self._end("memory")
            elif len(tree) > self.limits.processes + _OWN_PROCESSES:
                self._end("processes")

    def _end(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self.process.kill()


@dataclass(frozen=True)
class Turns:
    """A process at the scheduler: seconds that it ran and that it waited to, and whether it could run just now."""

    ran: float = 0.0
    waited: float = 0.0
    ready: bool = False


def read_turns(task: str) -> Turns:
    """The turns of a process, or of a thread (`self/task/<number>`)."""
    try:
        ran, waited, _ = Path(f"/proc/{task}/schedstat").read_text().split()
        state = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
        return Turns()
    return Turns(int(ran) / 1e9, int(waited) / 1e9, state == "R")


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of several processes together; what they share counts once, where the kernel lets us look."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is looked at
            total += _resident(pid)
    return total


def _resident(pid: int) -> int:
    try:
        sizes = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(sizes.split("\nPss:")[1].split()[0]) << 10
    except PermissionError:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def within(seconds: float, boxes: Sequence[Box], work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; TimeoutError where it takes longer than `seconds`, not counting time that nobody had.

    Time in which this process did not run (it was stopped, or its threads had to wait) does not count, nor what the
    boxes wait for a CPU. A busy machine is not the candidate's fault; but a candidate can keep the machine busy, so
    patience with its own waiting has an end.
    """
    for box in boxes:
        box.start_clock()
    task = asyncio.ensure_future(work)
    began = time.monotonic()
    late = 0.0
    try:
        while not task.done():
            patience = min(sum(box.starved() for box in boxes), MOST_PATIENCE * seconds)
            left = began + seconds + late + patience - time.monotonic()
            if left <= 0:
                raise TimeoutError
            step, asleep = min(left, _STEP_SECONDS), time.monotonic()
            await asyncio.wait({task}, timeout=step)
            late += max(0.0, time.monotonic() - asleep - step)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
