"""`python -m grpo_toolbox.cli.measured FILE <command> …`: a toolbox command, and into FILE what its process took."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from grpo_toolbox.cli.main import main

MIB = 2**20


def measured(file: Path, arguments: list[str]) -> int:
    """Run a command; write its seconds and its peak memory, as JSON; return its exit code."""
    started = time.perf_counter()
    code = main(arguments)
    took = {"seconds": time.perf_counter() - started, "memory_mib": peak_memory() / MIB, "gpu_mib": _peak_gpu_memory()}
    file.write_text(json.dumps(took), encoding="utf-8")
    return code


def peak_memory() -> float:
    """Return the most bytes that this process has held."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage counts what the parent held before it became this program
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in fields:
            return float(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _peak_gpu_memory() -> float | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return float(torch.cuda.max_memory_allocated()) / MIB


if __name__ == "__main__":
    sys.exit(measured(Path(sys.argv[1]), sys.argv[2:]))
