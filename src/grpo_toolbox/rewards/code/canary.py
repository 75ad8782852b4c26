"""A sandbox on trial before it is used: right and wrong programs, and one that looks for holes in the walls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.plugins import plug_in
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.records import Call, Limits, Problem, Program, Programs, SandboxError, Suite, Table
from grpo_toolbox.rewards.code.sandbox import Sandbox, View, bubblewrap, namespaces, view

BUILT_IN: dict[str, Callable[[Limits, View], Sandbox]] = {"bubblewrap": bubblewrap, "namespaces": namespaces}
"""Sandboxes of this machine, the better one first."""

INSTALL = (
    "Install bubblewrap (apt-get install bubblewrap), allow unprivileged user namespaces (sysctl"
    " kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined, or --cap-add"
    " SYS_ADMIN; root needs CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID), or set reward.sandbox=my_module:my_sandbox."
    " Code is never run without a sandbox."
)

_DOUBLE = Suite("assert double(4) == 8\nassert double('a') == 'aa'", None, 2)
_TABLE = Table((Call("double", (4,), {}, 8),))
_PRINTED = Programs((Program("4\n", "8\n"),))

TRIALS: tuple[tuple[str, Problem, bool], ...] = (
    ("def double(n):\n    return 2 * n", Problem(_DOUBLE), True),
    ("def double(n):\n    return n + 4", Problem(_DOUBLE), False),
    ("import os\nos._exit(0)", Problem(_DOUBLE), False),
    ("def double(n):\n    return 2 * n", Problem(_TABLE), True),
    ("def double(n):\n    return 2 + n", Problem(_TABLE), False),
    ("print(2 * int(input()))", Problem(_PRINTED), True),
    ("print('4')", Problem(_PRINTED), False),
    (
        "import threading\nfound = []\nthread = threading.Thread(target=found.append, args=(1,))\n"
        "thread.start()\nthread.join()\ndef double(n):\n    return n * (len(found) + 1)",
        Problem(_DOUBLE),
        True,
    ),
)
"""Programs, what they are judged by, and whether they are right."""


def look_for_holes(processes: int) -> list[str]:
    """What a program can do in here that it must not; this function's source runs in the sandbox."""
    import os
    import socket
    import sys

    holes = []
    reading, writing = os.pipe()
    started = 0
    try:
        while started <= processes:
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until the parent lets go
                os._exit(0)
            started += 1
        holes.append(f"start more than {processes} processes")
    except OSError:
        pass
    os.close(writing)
    for _ in range(started):
        os.wait()
    for place in ("/", "/usr", "/dev", "/etc", "/proc/sys/kernel", os.path.dirname(os.__file__)):
        try:
            os.close(os.open(os.path.join(place, "hole"), os.O_CREAT | os.O_WRONLY))
            holes.append(f"write to {place}")
            os.unlink(os.path.join(place, "hole"))
        except OSError:
            pass
    networks = [name for _, name in socket.if_nameindex() if name != "lo"]
    holes += [f"reach network {name}" for name in networks]
    seen_processes = [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    if len(seen_processes) > 8:
        holes.append("see other processes")
    for folder in ("/home", "/var", "/root", "/etc"):
        seen = os.listdir(folder) if os.access(folder, os.R_OK) and os.path.isdir(folder) else []
        allowed = {part for path in (os.__file__, "/etc/ld.so.cache", *sys.path) for part in path.split("/")}
        holes += [f"see {folder}/{name}" for name in seen if name not in allowed]
    holes += [f"see {name} in its environment" for name in os.environ if "TOKEN" in name or "KEY" in name]
    if os.read(0, 1):
        holes.append("read standard input")
    return holes


def open_pool(sandbox: str, limits: Limits, at_once: int, site_packages: bool = False) -> Pool:
    """Sandboxes of the kind that is asked for, each kind of program judged once: no run starts on a bad grader.

    `sandbox` is `auto` (bubblewrap where it works, else namespaces), one of BUILT_IN, or `my_module:my_sandbox`.
    ConfigError says what each of them lacks where none works.
    """
    limits.check()
    if ":" in sandbox:
        return _plugged_in(sandbox, limits, at_once)
    if sandbox not in ("auto", *BUILT_IN):
        raise unknown_option("reward.sandbox", sandbox, ["auto", *BUILT_IN, "my_module:my_sandbox"])
    names: Sequence[str] = tuple(BUILT_IN) if sandbox == "auto" else (sandbox,)
    problems = []
    shown = view(site_packages)
    for name in names:
        try:
            return _tried(Pool(BUILT_IN[name](limits, shown), shown, limits, at_once), walls=True)
        except SandboxError as error:
            problems.append(f"{name}: {error}")
    raise ConfigError(f"reward.sandbox={sandbox} does not work here ({'; '.join(problems)}). {INSTALL}")


def _plugged_in(sandbox: str, limits: Limits, at_once: int) -> Pool:
    start = plug_in("reward.sandbox", sandbox)
    if not inspect.iscoroutinefunction(start) and not inspect.iscoroutinefunction(type(start).__call__):
        raise ConfigError(
            f"reward.sandbox={sandbox} is no async function: it takes a command and returns its started process."
        )
    shown = View("python3", {}, (), (), compiled=False)
    try:
        return _tried(Pool(start, shown, limits, at_once), walls=False)
    except SandboxError as error:
        raise ConfigError(f"reward.sandbox={sandbox} does not work: {error}.") from error


def _tried(pool: Pool, walls: bool) -> Pool:
    """The pool, when it has judged what is known and no hole has been found; it is closed where not."""
    try:
        pool.submit(try_pool(pool, walls)).result()
    except BaseException:  # whatever it is, no sandbox may be left behind
        pool.close()
        raise
    return pool


async def try_pool(pool: Pool, walls: bool) -> None:
    """Judge the programs of TRIALS; SandboxError where a verdict is not the known one, or a wall has a hole."""
    verdicts = await asyncio.gather(*(judge(pool, code, problem) for code, problem, _ in TRIALS))
    for (code, problem, right), verdict in zip(TRIALS, verdicts, strict=True):
        if right != (verdict.status == "passed"):
            known = "right" if right else "wrong"
            said = (
                f"{verdict.status}, {verdict.passed} of {problem.size} tests, {verdict.reason or verdict.output[-200:]}"
            )
            raise SandboxError(f"a {known} program was judged {said} (it is {code!r:.60})")
    if not walls:
        return
    code = "def look_for_holes(processes):\n" + inspect.getsource(look_for_holes).partition("\n")[2]
    question = Call("look_for_holes", (pool.limits.processes,), {}, [])
    verdict = await judge(pool, code, Problem(Table((question,))))
    if verdict.status != "passed":
        raise SandboxError(f"a program in it can do what it must not: {verdict.reason}")
