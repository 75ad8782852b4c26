"""The sandbox's end of the judge's wire: limits on itself, then the candidate's program, at the judge's bidding.

The judge asks for one thing at a time and compares the answers on its own side. So there is nothing to forge here:
whoever takes this process over can answer questions, and right answers are what was asked for.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys

from grpo_toolbox.rewards.code.inside.first import begin, lead
from grpo_toolbox.rewards.code.inside.wire import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def main() -> None:
    """Obey the judge: first its limits, then its one order (`objects`, `programs` or `referee`)."""
    leader = lead() if os.getpid() == 1 else None  # in a container of the user's own somebody else may be the first
    channel = take_channel()
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # which `site` would do, and programs expect
    try:
        limits = channel.receive()
        set_limits(limits)
        channel.send({"ready": sys.version})
        order = channel.receive()
        if leader is not None:
            begin(leader, 0 if order["role"] == "referee" else limits["life_seconds"])
        program = _serve(channel, order)
    except (EOFError, BrokenPipeError):  # the judge has what it wants, or is gone
        os._exit(0)
    program()


def _serve(channel: Channel, order: dict[str, Any]) -> Callable[[], None]:
    """Do what is asked until the judge is gone; returns in processes that are to run a program."""
    if order["role"] == "programs":
        from grpo_toolbox.rewards.code.inside.programs import serve_programs

        return serve_programs(channel, order)
    if order["role"] == "referee":
        from grpo_toolbox.rewards.code.inside.referee import serve_suites

        serve_suites(channel)
    from grpo_toolbox.rewards.code.inside.objects import serve_objects

    serve_objects(channel, order)


def take_channel() -> Channel:
    """Move the wire off descriptors 0 and 1: the program finds its input empty, and its output goes where errors go."""
    channel = Channel(os.dup(0), os.dup(1))  # dup: no program started from here inherits them
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return channel


def set_limits(wanted: dict[str, Any]) -> None:
    """Give up root, where this is root's sandbox, and whatever `wanted` does not grant; nothing of it comes back."""
    user = wanted.get("user")
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    megabyte = 1 << 20
    limits = {
        resource.RLIMIT_CPU: wanted["cpu_seconds"],
        resource.RLIMIT_AS: wanted["memory_mb"] * megabyte,
        resource.RLIMIT_FSIZE: wanted["file_mb"] * megabyte,
        resource.RLIMIT_NOFILE: wanted["files"],
        resource.RLIMIT_CORE: 0,
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        limits[resource.RLIMIT_NPROC] = wanted["processes"]
    for name, value in limits.items():
        _, highest = resource.getrlimit(name)
        if highest != resource.RLIM_INFINITY:  # what the host allows less of stays at that
            value = min(value, highest)
        resource.setrlimit(name, (value, value))
    sys.path += wanted["paths"]
