"""The candidate's program as a program: fed with one input after the other, a fresh process each time."""

from __future__ import annotations

import builtins
import os
import sys
import types

from grpo_toolbox.rewards.code.inside.wire import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXCERPT = 2000
"""Characters of an error's last line that are reported."""


def serve_programs(channel: Channel, order: dict[str, Any]) -> Callable[[], None]:
    """Have the program of `order` run on each input that comes; returns, in the process that is to run it, how."""
    while True:
        request = channel.receive()
        stdin = _file(request["input"].encode("utf-8", "surrogateescape"))
        output = os.open(".", os.O_TMPFILE | os.O_RDWR)
        complaint = os.open(".", os.O_TMPFILE | os.O_RDWR)
        child = os.fork()
        if child == 0:
            for descriptor, place in ((stdin, 0), (output, 1)):
                os.dup2(descriptor, place)
            for descriptor in (stdin, output, channel.incoming, channel.outgoing):
                os.close(descriptor)
            return lambda: _run(order, complaint)
        _, status = os.waitpid(child, 0)
        answer = {
            "output": _contents(output, order["output_bytes"]),
            "status": os.waitstatus_to_exitcode(status),
            "complaint": _contents(complaint, EXCERPT),
        }
        for descriptor in (stdin, output, complaint):
            os.close(descriptor)
        channel.send(answer)


def _file(content: bytes) -> int:
    """A file without a name that holds `content`, at its beginning."""
    descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR)
    rest = content
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _contents(descriptor: int, most: int) -> str:
    """The beginning of a file, and one character more than `most` where it is longer."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    pieces = []
    left = most + 1
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces).decode("utf-8", "replace")


def _run(order: dict[str, Any], complaint: int) -> None:
    """Run the program as `__main__`, to leave with the exit status that the interpreter gives it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = ["solution.py"]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - open until the interpreter ends
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    try:
        for source in (order["setup"], order["code"]):
            exec(compile(source, "solution.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # the candidate's program may raise anything
        os.write(complaint, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:EXCERPT])
        raise
