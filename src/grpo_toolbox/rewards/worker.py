"""The child side of `workers`: a process that answers one job after the other, within limits it cannot lift.

Run as `python -m grpo_toolbox.rewards.worker module:function megabytes`. Each line of standard input is a job,
`[seconds, argument]` in JSON; each line of standard output an answer: `{"value": ...}`, or what went wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

MEGABYTE = 2**20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends, which it does when the parent is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    target, megabytes = sys.argv[1], int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not look like an answer
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, megabytes * MEGABYTE)
    try:
        function = _load(target)
    except Exception as error:  # whatever importing the module raises is the answer to the parent
        _say(replies, json.dumps({"failed": f"{type(error).__name__}: {error}"}))
        return
    _say(replies, json.dumps({"ready": True}))
    for line in sys.stdin.buffer:
        seconds, argument = json.loads(line)
        _allow_cpu(seconds)
        _say(replies, _answer(function, argument))
        if _peak_megabytes() > megabytes / 2:  # caches have grown: a fresh process is smaller
            return


def _load(target: str) -> Callable[[Any], Any]:
    """Import the function, and let its module's `warm_up` do what would make the first job slower than the others."""
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    function: Callable[[Any], Any] = getattr(module, attribute)
    getattr(module, "warm_up", bool)()
    return function


def _answer(function: Callable[[Any], Any], argument: Any) -> str:
    try:
        return json.dumps({"value": function(argument)})
    except MemoryError:
        return json.dumps({"memory": True})
    except Exception as error:  # code at the mercy of what a model wrote
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})


def _say(replies: IO[bytes], answer: str) -> None:
    replies.write(answer.encode() + b"\n")
    replies.flush()


def _die_with_parent() -> None:
    """Have Linux end this process with the thread that started it, however that ends; elsewhere see `_allow_cpu`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _allow_cpu(seconds: float) -> None:
    """Let the kernel end this process when the parent, which would have, is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + 2 * seconds + 1))


def _limit(what: int, amount: int) -> None:
    hard = resource.getrlimit(what)[1]
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space
        resource.setrlimit(what, (soft, hard))


def _peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MEGABYTE if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
