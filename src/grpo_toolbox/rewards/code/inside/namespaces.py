"""A sandbox of the kernel's own parts, for machines without bubblewrap: namespaces, a root of its own, no privileges.

This process gives itself what bubblewrap gives its child: empty network, own process tree, a read-only root of a few
folders, private /tmp. See namespaces(7), pivot_root(2), capabilities(7), seccomp(2).
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import os
import struct

from grpo_toolbox.rewards.code.inside.first import wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_KEPT_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""statvfs(3) flags and the mount(2) flags of the same meaning: what a mount has, its remount must keep."""
_NAMESPACES = (
    0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
)  # mount pid net ipc uts cgroup
_NEW_USER = 0x10000000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 22, 24, 38, 47
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SIGKILL = 9
_HOLDERS = ("/tmp", "/mnt", "/media", "/srv", "/run", "/opt")

_libc = ctypes.CDLL(None, use_errno=True)


def confine(plan: dict[str, Any]) -> None:
    """Return in the first process of a tree, confined as `plan` says; OSError where the kernel does not allow it.

    The plan: `binds` (folders shown read-only), `links` ((target, place) of symbolic links), `tmp_bytes`, `filter`
    (of system calls), `user` (number to become; None where a user namespace is needed), `environment`.
    """
    os.environ.clear()
    os.environ.update(plan["environment"])
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    _unshare(new_user=plan["user"] is None)
    child = os.fork()  # the first process of the new process tree
    if child:
        wait_for(child)
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    _raise_loopback()
    _check(_libc.sethostname(b"sandbox", 7), "sethostname")
    _build_root(plan)
    if plan["user"] is not None:
        os.setgroups([])
        os.setresgid(*[plan["user"]] * 3)
        os.setresuid(*[plan["user"]] * 3)
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # the kernel forgets it where a process becomes another user
    _drop_privileges(plan["filter"])


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *values), f"prctl {option}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if one is None else one.encode() for one in (source, target, kind, data)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _unshare(new_user: bool) -> None:
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NAMESPACES | (_NEW_USER if new_user else 0)), "unshare")
    if new_user:
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(content)


def _raise_loopback() -> None:
    """Switch the empty network's loopback on: programs may talk to themselves."""
    plug = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(plug.fileno(), 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    plug.close()


def _build_root(plan: dict[str, Any]) -> None:
    """Make a root that holds what the plan shows, and turn this process's root into it."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    shown = [os.path.realpath(one) for one in plan["binds"].values()]
    root = next(one for one in _HOLDERS if os.path.isdir(one) and not any(_within(path, one) for path in shown))
    _mount("root", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for place, source in plan["binds"].items():
        _show(source, root + place)
    for target, place in plan["links"]:
        os.symlink(target, root + place)
    for name in ("dev", "tmp", "proc", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in _DEVICES:
        _show(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for target, name in (("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")):
        os.symlink(target, f"{root}/dev/{name}")
    for name, size in (("tmp", plan["tmp_bytes"]), ("dev/shm", plan["tmp_bytes"] // 4)):
        _mount("tmp", f"{root}/{name}", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=65536,mode=1777")
    _show_processes(f"{root}/proc")
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", 2), "umount")  # MNT_DETACH: the old root, which lies on top
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/tmp")


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _show(source: str, place: str, read_only: bool = True) -> None:
    """Bind `source` to `place`, with whatever is mounted below it."""
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    _mount(source, place, None, _MS_BIND | _MS_REC)
    if not read_only:
        return
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        points = [line.split()[4].encode().decode("unicode_escape") for line in mounts]
    for point in points:
        if _within(point, place):
            has = os.statvfs(point).f_flag
            kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if has & bit)
            _mount(None, point, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


def _show_processes(place: str) -> None:
    """Mount the new process tree's /proc, the host's switches in it read-only; go without where a container forbids."""
    try:
        _mount("proc", place, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        return
    for name in ("sys", "sysrq-trigger", "irq", "bus"):
        if os.path.exists(f"{place}/{name}"):
            _show(f"{place}/{name}", f"{place}/{name}")


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _drop_privileges(system_call_filter: bytes) -> None:
    """Give up every capability for good, then the system calls of the filter."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3) != 0:
            break  # the kernel knows no more of them, or they were given up with root
    _prctl(_PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    header, none = struct.pack("=II", 0x20080522, 0), bytes(24)  # version 3, this process; no capability at all
    _check(_libc.capset(header, none), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    held = _Filter(len(system_call_filter) // 8, system_call_filter)
    _check(
        _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(held), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        "seccomp",
    )
