"""The C library's allocator, set for training: freed memory is used again, and handed back where a phase ends."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


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

    Tensors of the next phase are of other sizes and do not fit into the holes of the last one. Clearing the pages anew
    costs about half a second per GiB.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
