"""What both sides are measured with: clocks per stage, peak memory, versions, and a process for each side.

Each side runs in a process of its own: peak memory, threads and allocator are then its own. The parent only waits.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_MARK = "RESULT "


class SideFailed(Exception):
    """A measurement that did not come to its end; the message holds the end of what its process printed."""


class Stages:
    """Seconds per stage; a stage that is entered again adds up. On a GPU a stage ends when its work is done."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block."""
        finish(self._device)
        started = time.perf_counter()
        try:
            yield
        finally:
            finish(self._device)
            self.seconds[stage] += time.perf_counter() - started

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, counted."""

        def counted(*args: Any, **options: Any) -> Any:
            with self(stage):
                return function(*args, **options)

        return counted

    def taken(self) -> dict[str, float]:
        """Return the seconds so far and start again."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


def finish(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def count_backward(stages: Stages) -> None:
    """Count every `loss.backward()` of this process from now on."""
    import torch

    torch.Tensor.backward = stages.timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_gib(device: str = "cpu") -> float:
    """Return the most memory so far in GiB: of this process, or allocated on the device."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    status = _status("VmHWM")
    return (status or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20


def resident_gib(device: str = "cpu") -> float:
    """Return the memory of this process, or allocated on the device, now, in GiB; 0 where the system does not tell."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated() / 2**30
    return _status("VmRSS") / 2**20


def forget_peak(device: str = "cpu") -> None:
    """Let `peak_gib` count from now on; only on Linux and CUDA."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(name: str) -> int:
    path = Path("/proc/self/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


# ---- a process per side ----------------------------------------------------------------------------------------------


def in_child(script: str, job: Mapping[str, Any], threads: int, timeout: float = 3600) -> dict[str, Any]:
    """Run `benchmarks/<script>` on a job in a fresh process and return what it hands to `answer`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, str(HERE / script), json.dumps({**job, "threads": threads})]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise SideFailed(f"{script} took more than {timeout:.0f} s on {json.dumps(job)}") from late
    found = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not found:
        raise SideFailed(f"{script} failed on {json.dumps(job)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[-1].removeprefix(_MARK))


def job_of(argv: list[str]) -> dict[str, Any]:
    """Read the job that `in_child` passed, and take over its number of threads."""
    import torch

    job = json.loads(argv[0])
    torch.set_num_threads(job["threads"])
    return job


def answer(value: Mapping[str, Any]) -> None:
    """Hand a result to the parent."""
    print(_MARK + json.dumps(value), flush=True)


# ---- where it ran ----------------------------------------------------------------------------------------------------


def versions(*names: str) -> dict[str, str]:
    """Return the installed versions of packages, those of them that are there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a package that only the other side needs
            continue
    return found


def machine() -> str:
    """Return the processor in words."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
