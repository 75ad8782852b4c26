"""The C library's allocator, set for training: freed memory is used again instead of being handed back and cleared."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def reuse_freed_memory() -> bool:
    """Keep freed memory in the process, and return whether that could be asked for (Linux with glibc).

    By default glibc returns tensors of more than 32 MiB to the kernel when they are freed and gets cleared pages for
    the next ones, which costs about a tenth of a training step on a processor. The process then holds what its largest
    moment needed until it ends. Whoever sets MALLOC_… or GLIBC_TUNABLES in the environment is left alone.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if not sys.platform.startswith("linux") or chosen:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
