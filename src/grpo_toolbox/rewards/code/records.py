"""What is judged, within which limits, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.errors import ConfigError, ToolboxError

MOST_PATIENCE = 3.0
"""Most time waited for a busy machine, in multiples of the candidate's own time."""

LAST_SECONDS = 10.0
"""Between the latest end that a judge sets and the one that a sandbox sets itself."""


class SandboxError(ToolboxError):
    """A sandbox, or test code, that could not do its work: no verdict on any candidate."""


@dataclass(frozen=True)
class Limits:
    """What one candidate may use."""

    timeout: float = 10.0
    """Seconds from sending the program to the last answer."""
    cpu_seconds: int = 10
    """Of each process."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all together."""
    processes: int = 16
    """Processes and threads at once."""
    file_mb: int = 16
    """Of each file; the private /tmp holds four times as much."""
    output_kb: int = 64
    """Of what is printed; of each program's output where that is what is tested."""
    files: int = 64
    """Open files of each process."""

    @property
    def life_seconds(self) -> int:
        """After which a sandbox ends itself, though the process that has the timeout in hand is stopped or gone."""
        return math.ceil(self.timeout * (1.0 + MOST_PATIENCE) + LAST_SECONDS)

    def check(self) -> None:
        """Raise ConfigError for a limit under which nothing can run."""
        least = {"timeout": 0.1, "cpu_seconds": 1, "memory_mb": 64, "processes": 4, "file_mb": 1, "output_kb": 1}
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) < float("inf"):
                raise ConfigError(f"reward.{name}={getattr(self, name)} must be a number of at least {lowest}.")


@dataclass(frozen=True)
class Suite:
    """Test code: asserts, test functions, test classes, or a `check(candidate)`."""

    source: str
    entry_point: str | None
    size: int


@dataclass(frozen=True)
class Call:
    """One row of a function table."""

    function: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    expected: Any


@dataclass(frozen=True)
class Program:
    """One input of a program, and what it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Table:
    """Calls, and what each returns."""

    calls: tuple[Call, ...]

    @property
    def size(self) -> int:
        """How many tests there are."""
        return len(self.calls)


@dataclass(frozen=True)
class Programs:
    """Inputs, and what is printed for each."""

    programs: tuple[Program, ...]

    @property
    def size(self) -> int:
        """How many tests there are."""
        return len(self.programs)


Tests = Suite | Table | Programs


@dataclass(frozen=True)
class Problem:
    """What a candidate is judged by."""

    tests: Tests
    setup: str = ""
    """Code that the candidate builds on: it runs before the candidate's, in its sandbox."""

    @property
    def size(self) -> int:
        """How many tests there are."""
        return self.tests.size


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate."""

    status: str
    """`passed`, `failed`, `raised` (while it was loaded), `timeout`, `memory`, `output`, `died` or `no_code`."""
    passed: int
    size: int
    reason: str = ""
    """What was wrong first, in a line."""
    output: str = ""
    """What the candidate printed, as far as `output_kb` goes."""
    seconds: float = 0.0
