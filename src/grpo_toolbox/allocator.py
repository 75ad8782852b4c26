"""The C library's allocator, set for training: freed memory is used again, and handed back where a phase ends."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
MADV_HUGEPAGE = 14
"""Advice of Linux's `madvise`."""


def reuse_freed_memory() -> bool:
    """Keep freed memory in the process, and return whether that could be asked for (Linux with glibc).

    By default glibc returns what is free at the end of its heap to the kernel and gets cleared pages for the next
    tensors, which costs some percent of a training step on a processor. Tensors above 32 MiB still come and go exactly
    as they are needed, so that they leave no holes. Whoever sets MALLOC_… or GLIBC_TUNABLES is left alone.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if not sys.platform.startswith("linux") or chosen:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 32 * 2**20)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def hand_back_freed_memory() -> None:
    """Give the kernel every page that only freed memory lies on, holes included (Linux with glibc).

    Tensors of the next phase are of other sizes and do not fit into the holes of the last one. What is filled again may
    come in pages of 2 MiB, where the system allows it: clearing small ones costs some tenths of a second per GiB.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    trim = getattr(libc, "malloc_trim", None)
    if trim is None:
        return
    trim(0)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith("[heap]"):
            start, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)
