"""A filter of system calls for sandboxes: what no program under test needs, and a kernel's mistakes often lie in.

The filter is classic BPF as `prctl(2)` and bubblewrap's `--seccomp` take it: instructions of 8 bytes (code, jump if
true, jump if false, constant).
"""

from __future__ import annotations

import errno
import platform
import struct

# from the kernel's syscall tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)
_REFUSED = {
    "x86_64": {
        **{
            "ptrace": 101,
            "personality": 135,
            "pivot_root": 155,
            "chroot": 161,
            "acct": 163,
            "mount": 165,
            "umount2": 166,
        },
        **{"swapon": 167, "reboot": 169, "init_module": 175, "quotactl": 179, "add_key": 248, "request_key": 249},
        **{"keyctl": 250, "migrate_pages": 256, "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303},
        **{"open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
        **{"finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323},
        **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429},
        **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442},
        **{"memfd_secret": 447, "shmget": 29, "syslog": 103, "kexec_load": 246, "iopl": 172, "ioperm": 173},
    },
    "aarch64": {
        **{"umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92},
        **{"unshare": 97, "kexec_load": 104, "init_module": 105, "syslog": 116, "ptrace": 117, "reboot": 142},
        **{"shmget": 194, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "migrate_pages": 238},
        **{"perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279},
        **{"bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425, "io_uring_enter": 426},
        **{"io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431},
        **{"fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447},
    },
}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_X32 = 0x40000000

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16


def system_call_filter(machine: str | None = None) -> bytes | None:
    """The filter for this kind of machine; None for one whose system calls are not known here."""
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        return None
    refused = sorted(_REFUSED[machine].values())
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_IF_EQUAL, 0, 1, _CLONE3),  # its flags lie where a filter cannot look: the C library falls back to clone
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_IF_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES & 0xFFFFFF00),  # the lowest byte is the signal at exit
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in refused:
        program += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
