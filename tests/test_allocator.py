"""Freed memory stays with the process and is used again: measured in page faults, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from grpo_toolbox.allocator import reuse_freed_memory
import torch
asked = reuse_freed_memory()
def layers():
    return [torch.ones(5_000_000) for _ in range(12)]  # 20 MB each, 58 600 pages together
layers()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layers()
print(int(asked), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    asked, count = out.stdout.split()
    return asked == "1", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_large_tensors_take_the_place_of_freed_ones_unless_the_user_chose_otherwise():
    """Twelve tensors that live together, ten times: at least every second page that was cleared anew is so no more."""
    asked, reused = faults()
    assert asked
    asked, cleared = faults(MALLOC_ARENA_MAX="2")
    assert not asked
    assert reused < 0.6 * cleared


HOLES = """
from pathlib import Path
from grpo_toolbox.allocator import hand_back_freed_memory, reuse_freed_memory
import torch
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
reuse_freed_memory()
small, large = zip(*((torch.ones(100), torch.ones(1_000_000)) for _ in range(100)))  # 4 MB each, with pins between
del large
before = resident()
hand_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_holes_between_tensors_that_live_on_are_handed_back():
    """A hundred tensors of 3.8 MiB are freed, and small ones behind each stay."""
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(out.stdout) > 300
