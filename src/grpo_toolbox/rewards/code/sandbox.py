"""Sandboxes: where a fresh interpreter comes from that nothing can be reached from.

A sandbox is an async function that starts a command somewhere isolated and returns its process, stdin, stdout and
stderr as pipes. The two here wrap the command in bubblewrap, or in the kernel's namespaces; `reward.sandbox=
my_module:my_sandbox` names one of the user's own, on another machine if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import secrets
import shutil
import signal
import site
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_toolbox.rewards.code.inside.wire import MESSAGE_BYTES
from grpo_toolbox.rewards.code.records import Limits, SandboxError
from grpo_toolbox.rewards.code.seccomp import system_call_filter

INSIDE = Path(__file__).parent / "inside"
PYTHON_OPTIONS = ("-S", "-s", "-P", "-B")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program has the same verdict whenever it is asked for
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Process(Protocol):
    """A process started by a sandbox; `asyncio.subprocess.Process` is one."""

    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None
    stderr: asyncio.StreamReader | None

    def kill(self) -> None:
        """End it and everything it started, at once."""

    async def wait(self) -> int:
        """Return when nothing of it is left."""


Sandbox = Callable[[Sequence[str]], Awaitable[Process]]
"""Starts a command, Python with its arguments, in isolation."""


def boot_command(python: str = "python3") -> list[str]:
    """What is to be started in a sandbox; it then expects `harness()` on its standard input."""
    return [python, *PYTHON_OPTIONS, "-c", (INSIDE / "boot.py").read_text(encoding="utf-8")]


def harness(compiled: bool) -> bytes:
    """The harness as its boot program reads it: compiled for this interpreter, or source for any."""
    modules: dict[str, bytes | str] = {}
    for path in INSIDE.glob("[!_]*.py"):
        source = path.read_text(encoding="utf-8")
        code = compile(source, f"{path.stem}.py", "exec", dont_inherit=True)
        modules[path.stem] = marshal.dumps(code) if compiled else source
    held = marshal.dumps(modules, 2)
    return f"{len(held):010d}".encode("ascii") + held


class Confined:
    """A process in one of this machine's sandboxes, and the first process of its tree."""

    def __init__(self, process: asyncio.subprocess.Process, user: int | None) -> None:
        self.process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.user = user
        """The number that the harness is to become, where it starts as root."""
        self.born = birth(process.pid)

    @property
    def pid(self) -> int:
        """The process that was started; everything else descends from it."""
        return self.process.pid

    def kill(self) -> None:
        """Kill the first process of the tree, with which the kernel ends the others, then what is left."""
        if self.process.returncode is not None or birth(self.pid) != self.born:  # its number may be another's by now
            return
        for child in children(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not children(self.pid):
            self._kill_group()

    async def wait(self) -> int:
        """Return when the tree is gone."""
        try:
            async with asyncio.timeout(5.0):
                return await self.process.wait()
        except TimeoutError:
            self._kill_group()
            return await self.process.wait()

    def _kill_group(self) -> None:
        if birth(self.pid) != self.born:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def birth(pid: int) -> str:
    """When a process began, in the kernel's ticks: two processes that bear one number after another differ in it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # it has ended
        return ""


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are not reaped yet."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # it may end while it is looked at
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


@dataclass(frozen=True)
class View:
    """What a sandbox shows of this machine, read-only."""

    python: str
    binds: dict[str, str]
    """Place inside → folder outside."""
    links: tuple[tuple[str, str], ...]
    """(target, place) of symbolic links."""
    packages: tuple[str, ...]
    """Folders that are appended to the module path."""
    compiled: bool = True
    """Whether `python` is this very interpreter."""


def view(site_packages: bool) -> View:
    """This interpreter, its library and the system's; installed packages where asked for."""
    python = os.path.realpath(sys.executable)
    packages = tuple(one for one in _package_folders() if os.path.isdir(one)) if site_packages else ()
    folders = ["/usr", sys.base_prefix, sys.base_exec_prefix, *packages]
    for name in _SYSTEM_FOLDERS:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            folders.append(f"/{name}")
    kept = list(dict.fromkeys(map(os.path.realpath, folders)))
    outer = [one for one in kept if not any(one != other and one.startswith(other + "/") for other in kept)]
    links = [(os.readlink(f"/{name}"), f"/{name}") for name in _SYSTEM_FOLDERS if os.path.islink(f"/{name}")]
    binds = {one: one for one in outer}
    if os.path.exists("/etc/ld.so.cache"):
        binds["/etc/ld.so.cache"] = "/etc/ld.so.cache"
    return View(python, binds, tuple(links), tuple(map(os.path.realpath, packages)))


def _package_folders() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


def bubblewrap(limits: Limits, shown: View) -> Sandbox:
    """The sandbox of the `bwrap` program; SandboxError where it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    blocked = _filter()
    root = may_become_others()

    async def start(command: Sequence[str]) -> Confined:
        held = os.memfd_create("filter")
        try:
            os.write(held, blocked)
            os.lseek(held, 0, os.SEEK_SET)
            arguments = [program, *_bubblewrap_arguments(limits, shown, root), "--seccomp", str(held), "--", *command]
            return Confined(await _spawn(arguments, (held,)), _free_user() if root else None)
        finally:
            os.close(held)

    return start


def _bubblewrap_arguments(limits: Limits, shown: View, root: bool) -> list[str]:
    size = limits.file_mb << 22
    arguments = [f"--unshare-{one}" for one in ("pid", "net", "ipc", "uts", "cgroup-try")]
    # root needs no user namespace, and without one its sandboxes have numbers of their own, which limits hold for
    arguments += ["--cap-drop", "ALL", *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")[: 4 * root]]
    arguments += [] if root else ["--unshare-user"]
    arguments += ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox"]
    for place, source in shown.binds.items():
        for parent in reversed(Path(place).parents[:-1]):
            arguments += ["--dir", str(parent)]
        arguments += ["--ro-bind", source, place]
    for target, place in shown.links:
        arguments += ["--symlink", target, place]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    arguments += ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
    arguments += ["--perms", "1777", "--size", str(size // 4), "--tmpfs", "/dev/shm"]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return arguments


def namespaces(limits: Limits, shown: View) -> Sandbox:
    """The sandbox of this package's own, of the kernel's namespaces; SandboxError where this is no Linux."""
    blocked = _filter()
    if not sys.platform.startswith("linux"):
        raise SandboxError("namespaces are Linux's")
    root = may_become_others()

    async def start(command: Sequence[str]) -> Confined:
        plan = {
            "binds": shown.binds,
            "links": shown.links,
            "tmp_bytes": limits.file_mb << 22,
            "filter": blocked,
            "user": _free_user() if root else None,
            "environment": ENVIRONMENT,
        }
        return Confined(await _spawn([*command, repr(plan)], ()), None)

    return start


async def _spawn(arguments: Sequence[str], descriptors: Sequence[int]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *arguments,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        limit=MESSAGE_BYTES,
        pass_fds=tuple(descriptors),
        start_new_session=True,
        cwd="/",
        env=ENVIRONMENT,
    )


def _filter() -> bytes:
    found = system_call_filter()
    if found is None:
        raise SandboxError(
            f"there is no system call filter for machine {os.uname().machine!r}, only x86_64 and aarch64"
        )
    return found


def may_become_others() -> bool:
    """Whether this process may mount and change its user number, as root may where there are other numbers."""
    needed = 1 << 21 | 1 << 6 | 1 << 7  # CAP_SYS_ADMIN, CAP_SETGID, CAP_SETUID
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/status", encoding="ascii") as status:
            held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
        return os.geteuid() == 0 and held & needed == needed and all(_numbers(kind)[1] > 1 for kind in ("uid", "gid"))
    return False


def _numbers(kind: str) -> tuple[int, int]:
    """The first of this namespace's user or group numbers, and how many there are."""
    with open(f"/proc/self/{kind}_map", encoding="ascii") as known:
        first, _, count = map(int, known.readline().split())
    return first, count


def _free_user() -> int:
    """A user number that nobody else has: the kernel counts processes by it."""
    first, count = _numbers("uid")
    lowest = min(count // 2, 1 << 30)  # above the numbers that are given to people
    return first + lowest + secrets.randbelow(min(count - lowest, 1 << 24))
