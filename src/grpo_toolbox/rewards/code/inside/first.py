"""The first process of a sandbox's tree: with its end the kernel ends all others, whoever else is stopped or gone."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
OUT_OF_TIME = 124
"""The exit status of a tree that its first process ended."""


def lead() -> int:
    """Return in a child what `begin` is to be told; this process stays behind, reaps, and leaves with the child."""
    reading, writing = os.pipe()
    open_ = _shield()
    child = os.fork()
    if child:
        os.close(writing)
        _limit_life(reading)
        wait_for(child)
    os.close(reading)
    if open_ is not None:  # the child's own memory is its own
        open_()
    return writing


def begin(writing: int, seconds: int) -> None:
    """Have the tree end in `seconds`, whatever becomes of it; 0 for a tree that may live on. It cannot be undone."""
    os.write(writing, str(seconds).encode("ascii"))
    os.close(writing)


def _shield() -> Callable[[], object] | None:
    """Close this process's memory to others of its user; what opens that of a child again, None where nothing did.

    Root's candidates become somebody else, and need not be shut out.
    """
    if os.geteuid() == 0:
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return lambda: prctl(_PR_SET_DUMPABLE, before, 0, 0, 0)


def _limit_life(reading: int) -> None:
    """Wait for `begin`, or for the child's end, and set the alarm."""
    seconds = int(os.read(reading, 16) or b"0")
    os.close(reading)
    signal.signal(signal.SIGALRM, _leave)  # the default does nothing to the first process of a tree
    signal.alarm(seconds)


def _leave(number: int, frame: object) -> NoReturn:
    os._exit(OUT_OF_TIME)


def wait_for(child: int) -> NoReturn:
    """Wait for a child, reaping whatever else is left to this process, and leave as it left."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
