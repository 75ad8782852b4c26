"""A limit on the time of one call of a plain function."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_AGAIN = 1.0
"""Seconds until a function that swallowed the first alarm gets another."""


class _TimeIsUp(BaseException):
    """No Exception, so that `except Exception` inside the function does not take it for a failure of one row."""


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return what `call` returns; TimeoutError where it takes longer than `seconds` (None: any time).

    In Python's main thread, on systems with SIGALRM, the call is cut off then: code in C that looks for signals (a
    regular expression, arithmetic with large numbers, a socket) is, too. In other threads Python code is cut off, and
    code in C runs to its end first and counts as timed out afterwards.
    """
    if seconds is None:
        return call()
    began = time.perf_counter()
    try:
        answer = _alarmed(seconds, call) if _alarms_ring() else _watched(seconds, call)
    except _TimeIsUp:
        raise late(seconds) from None
    if time.perf_counter() - began > seconds:
        raise late(seconds)
    return answer


def late(seconds: float) -> TimeoutError:
    """Build the error of a call that took longer than `seconds`."""
    return TimeoutError(f"no answer within {seconds:g} s")


def _alarms_ring() -> bool:
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")


def _watched(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns; another thread raises _TimeIsUp in this one, between bytecodes, when time is up."""
    here, over, lock = threading.get_ident(), threading.Event(), threading.Lock()

    def ring() -> None:
        waits = seconds
        while not over.wait(waits):
            with lock:
                if not over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(_TimeIsUp))
            waits = _AGAIN

    clock = threading.Thread(target=ring, name="time limit", daemon=True)
    try:
        try:
            clock.start()
            return call()
        finally:
            over.set()
    finally:  # also where it rang inside the line above; it rings no more once the lock is ours
        with lock:
            over.set()


def _alarmed(seconds: float, call: Callable[[], T]) -> T:
    with _alarm(seconds):
        return call()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _TimeIsUp

    began = time.perf_counter()
    handler = signal.signal(signal.SIGALRM, ring)
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        try:
            yield
        finally:
            armed = False
    finally:  # also where the alarm rang inside the line above
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        # None stands for a handler that was not set from Python and cannot be put back.
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if delay:  # somebody else's clock goes on
            left = delay - (time.perf_counter() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
