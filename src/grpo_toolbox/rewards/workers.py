"""A pool of processes that can be killed: for work that may never end, or take all memory.

A worker is a Python process of its own (`python -m grpo_toolbox.rewards.worker`), never a fork of this one, started
when there is work for it and ended when it has been idle for a while, with this process, or when a job takes too
long. Jobs are given in from any thread.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
"""What a worker may take to import what it needs; it does not count against the limit of a job."""
IDLE_SECONDS = 300.0
"""After so long without work a worker ends."""
_GLANCE = 0.25
"""Seconds waited at a time: of those in which this process was stopped, as a batch system does it, no more count."""
_PACKAGES = Path(__file__).parents[2]


class TooMuch(TimeoutError):
    """A job that took more time or memory than it was allowed, or that two workers in a row did not survive."""


class JobFailed(RuntimeError):
    """A job that raised an exception."""


class WorkerFailed(RuntimeError):
    """A worker that does not start."""


class _Gone(Exception):
    """The worker ended without an answer."""


@dataclass
class _Job:
    argument: Any
    seconds: float
    future: Future[Any] = field(default_factory=Future)


class Pool:
    """Up to `size` workers that call `target` (`module:function`), each with at most `megabytes` of address space."""

    def __init__(self, target: str, size: int, megabytes: int = 2048) -> None:
        self.target, self.size, self.megabytes = target, size, megabytes
        self._jobs: collections.deque[_Job] = collections.deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._threads = 0
        self._closed = False
        self._workers: set[_Worker] = set()
        _pools.add(self)

    def submit(self, argument: Any, seconds: float) -> Future[Any]:
        """Have some worker answer `argument` (JSON) within `seconds`.

        The future may end in TooMuch, JobFailed or WorkerFailed.
        """
        job = _Job(argument, seconds)
        with self._changed:
            if self._closed:
                raise WorkerFailed("the pool of workers is closed")
            self._jobs.append(job)
            if self._idle < len(self._jobs) and self._threads < self.size:
                self._threads += 1
                threading.Thread(target=self._serve, name="worker", daemon=True).start()
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """End all workers now; what they were at is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
            jobs = list(self._jobs)
            self._jobs.clear()
        for worker in workers:
            worker.process.kill()  # all of them, before a second Ctrl-C can end the waiting for one
        for worker in workers:
            worker.kill()
        for job in jobs:
            job.future.cancel()

    def forget(self) -> None:
        """In a forked process: let go of the parent's workers without ending them."""
        self._closed = True
        for worker in self._workers:
            worker.let_go()

    @property
    def process_ids(self) -> list[int]:
        """The workers that run now."""
        return [worker.process.pid for worker in list(self._workers)]

    def _serve(self) -> None:
        """Answer jobs with one worker until there are none for a while."""
        worker: _Worker | None = None
        self._is_free()
        while job := self._next():
            if not job.future.set_running_or_notify_cancel():
                self._is_free()
                continue
            answer, worker = self._answer(job, worker)
            self._is_free()  # before whoever waited for this comes with the next job
            if isinstance(answer, Exception):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer["value"])
        self._end(worker)

    def _is_free(self) -> None:
        with self._changed:
            self._idle += 1

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed, timeout=IDLE_SECONDS)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None

    def _answer(self, job: _Job, worker: _Worker | None) -> tuple[dict[str, Any] | Exception, _Worker | None]:
        """The answer to a job or what it ended in, and the worker that is left.

        A job whose worker is gone, killed by whomever, gets a second one.
        """
        for last in (False, True):
            try:
                worker = worker or self._start()
                answer = worker.ask(job)
                return (JobFailed(answer["error"]) if "error" in answer else answer), worker
            except (TooMuch, WorkerFailed, OSError) as error:
                self._end(worker)
                return error, None
            except _Gone as error:
                self._end(worker)
                worker = None
                if last or self._closed:
                    return TooMuch(f"two workers ended at it ({error})"), None
        raise AssertionError("the second try returns")

    def _start(self) -> _Worker:
        worker = _Worker(self.target, self.megabytes)
        with self._changed:
            self._workers.add(worker)
            closed = self._closed
        if closed:
            self._end(worker)
            raise WorkerFailed("the pool of workers is closed")
        try:
            worker.wait_until_ready()
        except (_Gone, WorkerFailed):
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()
            worker.let_go()
            with self._changed:
                self._workers.discard(worker)


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self, target: str, megabytes: int) -> None:
        path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_toolbox.rewards.worker", target, str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the parent, which ends its workers
        )
        self._read = b""

    def wait_until_ready(self) -> None:
        """Wait for the imports."""
        try:
            answer = self._line(START_SECONDS)
        except TooMuch:
            raise WorkerFailed(f"a worker did not start within {START_SECONDS:g} s") from None
        if "failed" in answer:
            raise WorkerFailed(f"a worker did not start ({answer['failed']})")

    def ask(self, job: _Job) -> dict[str, Any]:
        """The answer to a job: a value or an error."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([job.seconds, job.argument]).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:  # nobody reads at the other end
            raise _Gone(type(error).__name__) from error
        answer = self._line(job.seconds)
        if "memory" in answer:
            raise TooMuch("no answer within the memory allowed")
        return answer

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.process.wait()

    def let_go(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()

    def _line(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        left = seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if left <= 0:
                    raise TooMuch(f"no answer within {seconds:g} s")
                began, patience = time.monotonic(), min(left, _GLANCE)
                ready = selector.select(patience)
                left -= min(time.monotonic() - began, 2 * patience)
                if not ready:
                    continue
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(timeout=1.0)  # for its own exit code
                    self.kill()
                    raise _Gone(f"exit code {self.process.returncode}")
                self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: dict[str, Pool] = {}
_LOCK = threading.Lock()


def shared_pool(target: str) -> Pool:
    """The process's one pool for `target`; its workers start when the first job comes."""
    with _LOCK:
        if target not in _shared:
            _shared[target] = Pool(target, size=default_size())
        return _shared[target]


def default_size() -> int:
    """A worker per core that this process may use, at most eight; ranks of one machine share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _forget_all() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    _shared.clear()
    for pool in list(_pools):
        pool.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
