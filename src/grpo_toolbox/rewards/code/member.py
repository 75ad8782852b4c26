"""code: hidden tests decide, in a sandbox, what a program in the completion is worth."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError, DataError, ToolboxError, unknown_option
from grpo_toolbox.rewards.code.canary import open_pool
from grpo_toolbox.rewards.code.extraction import POLICIES, find_code
from grpo_toolbox.rewards.code.golds import code_golds
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.monitor import HackWatch
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Limits, Problem, Verdict
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens

CREDIT = ("all", "share")
STATUSES = ("raised", "timeout", "memory", "processes", "output", "died")
"""How a program can end before its tests do; each is counted in a metric `code/<status>_rate`."""


def code(
    column: str = "tests",
    block: str = "last",
    credit: str = "all",
    sandbox: str = "auto",
    timeout: float = 10.0,
    cpu_seconds: int = 10,
    memory_mb: int = 512,
    processes: int = 16,
    file_mb: int = 16,
    output_kb: int = 64,
    concurrency: int | None = None,
    site_packages: bool = False,
) -> Callable[..., Coroutine[Any, Any, list[float | Exception | None]]]:
    """1.0 where the completion's program passes the hidden tests of data column `column`, 0.0 where not.

    `block` says which program of a completion counts (last, first, all, whole), `credit=share` pays the share of tests
    passed. Limits hold for each candidate: `timeout` in seconds of wall time, `cpu_seconds` of each process, and so on
    (`records.Limits`). `concurrency` programs (None: one per CPU) run at a time. Optional columns: `setup`, code that
    the candidate builds on, and `entry_point`, the function under test. Programs that go for the grader are counted
    (`monitor.py`), whatever they earn. A row without tests is None; a sandbox or test
    code that fails is an error of its row, never a 0. ConfigError where no sandbox works here.
    """
    if block not in POLICIES:
        raise unknown_option("reward.block", block, POLICIES)
    if credit not in CREDIT:
        raise unknown_option("reward.credit", credit, CREDIT)
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"reward.concurrency={concurrency} must be at least 1, or null for one per CPU.")
    limits = Limits(timeout, cpu_seconds, memory_mb, processes, file_mb, output_kb)
    watch = HackWatch()
    pool = open_pool(sandbox, limits, concurrency or cpus(), site_packages)

    async def score(
        completions: Sequence[Any],
        setup: Sequence[Any] | None = None,
        entry_point: Sequence[Any] | None = None,
        log_extra: Any = None,
        log_metric: Any = None,
        **columns: Any,
    ) -> list[float | Exception | None]:
        nothing = [None] * len(completions)
        texts = [without_stop_tokens(completion_text(completion)) for completion in completions]
        programs = [find_code(text, block) for text in texts]
        watch(list(zip(texts, programs, strict=True)), log_extra, log_metric)
        rows = zip(programs, columns[column], setup or nothing, entry_point or nothing, strict=True)
        verdicts = await asyncio.gather(*(_verdict(pool, *row) for row in rows))
        log_verdicts(verdicts, log_extra, log_metric)
        return [_value(verdict, credit) for verdict in verdicts]

    _declare(score, column)
    score.check_rows = lambda rows: check_rows(column, rows)  # type: ignore[attr-defined]
    score.golds = code_golds(column)  # type: ignore[attr-defined]
    score.pool = pool  # type: ignore[attr-defined]
    return score


def cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def _verdict(
    pool: Pool, program: str | None, tests: Any, setup: Any, entry_point: Any
) -> Verdict | Exception | None:
    """The verdict on one program; None where its row has no tests, an exception where there can be no verdict."""
    try:
        problem = read_problem(tests, setup, entry_point)
        if problem is None:
            return None
        if program is None:
            return Verdict("no_code", 0, problem.size, "there is no Python in the completion")
        return await asyncio.wrap_future(pool.submit(judge(pool, program, problem)))
    except ToolboxError as error:  # the sandbox's or the data's failure must not lose the other rows
        return error


def _value(verdict: Verdict | Exception | None, credit: str) -> float | Exception | None:
    if not isinstance(verdict, Verdict):
        return verdict
    return verdict.passed / verdict.size if credit == "share" else float(verdict.status == "passed")


def log_verdicts(verdicts: Sequence[Verdict | Exception | None], log_extra: Any, log_metric: Any) -> None:
    """Log what became of each program, and how often each way of ending came."""
    judged = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    if log_extra is not None:
        held = [verdict if isinstance(verdict, Verdict) else None for verdict in verdicts]
        log_extra("code_status", [one and one.status for one in held])
        log_extra("code_passed", [one and f"{one.passed}/{one.size}" for one in held])
        log_extra("code_reason", [one and one.reason for one in held])
    if log_metric is not None and judged:
        ended = Counter(verdict.status for verdict in judged)
        log_metric("invalid_format_rate", ended["no_code"] / len(judged))
        for status in STATUSES:
            log_metric(f"code/{status}_rate", ended[status] / len(judged))


def check_rows(column: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for a row whose tests cannot be read, and where no row has any."""
    found: list[Problem] = []
    for row in rows:
        try:
            problem = read_problem(row.get(column), row.get("setup"), row.get("entry_point"))
        except DataError as error:
            raise DataError(f"prompt {row.get('prompt')!r:.60}: {error}") from error
        found += [problem] if problem else []
    if not found:
        raise DataError(f"no row has tests in column '{column}': set reward.column to the column of the hidden tests.")


def _declare(function: Any, column: str) -> None:
    """Give the function the signature that its options decide: a needed column, optional ones, the two logs."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    needed = [inspect.Parameter(name, keyword) for name in ("completions", column)]
    optional = ("setup", "entry_point", "log_extra", "log_metric")
    function.__name__ = "code"
    function.__signature__ = inspect.Signature(
        [*needed, *(inspect.Parameter(one, keyword, default=None) for one in optional)]
    )
