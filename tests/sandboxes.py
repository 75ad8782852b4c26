"""Sandboxes for tests: every kind that works here, opened once; a kind that does not is said in the summary."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.code.canary import BUILT_IN, open_pool
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Limits, Verdict

KINDS = tuple(BUILT_IN)


@functools.cache
def _opened(kind: str, limits: Limits) -> Pool | str:
    try:
        return open_pool(kind, limits, at_once=2)
    except ConfigError as error:
        return str(error)


def sandboxes(kind: str, **limits: Any) -> Pool:
    """The pool of one kind under `limits`; the test is skipped, loudly, where that kind does not work."""
    pool = _opened(kind, Limits(**{"timeout": 5.0, **limits}))
    if isinstance(pool, str):
        warnings.warn(pytest.PytestWarning(f"NOT TESTED, sandbox {kind} does not work here: {pool}"), stacklevel=2)
        pytest.skip(f"sandbox {kind} does not work here")
    return pool


def verdict(pool: Pool, code: str, tests: Any, setup: str | None = None, entry_point: str | None = None) -> Verdict:
    """What is made of a program."""
    problem = read_problem(tests, setup, entry_point)
    assert problem is not None
    return pool.submit(judge(pool, code, problem)).result()
