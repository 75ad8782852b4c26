"""The tests' process: it runs test code, in which the candidate's names stand for the candidate's process.

It lives in a sandbox of its own, out of the candidate's reach, and outlives a candidate: each suite runs in a fork.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import math
import os
import reprlib
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from grpo_toolbox.rewards.code.inside.objects import MODULE
from grpo_toolbox.rewards.code.inside.proxies import CandidateLost, CannotSend, Proxy, Remote
from grpo_toolbox.rewards.code.inside.suite import library_modules, names_wanted, read_suite
from grpo_toolbox.rewards.code.inside.wire import Channel, decode

REASON_CHARACTERS = 300
TOLERANCE = 1e-9
"""Relative and absolute, between a float and the number that a table of calls expects."""


class CannotRun(Exception):
    """The tests cannot be run, whatever the candidate is."""


def serve_suites(channel: Channel) -> NoReturn:
    """Run one suite after the other, each in a process of its own; what it left running ends with it."""
    while True:
        order = channel.receive()
        child = os.fork()
        if child == 0:
            os.setsid()
            _judge(channel, order)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):  # there is nothing left of it
            os.killpg(child, signal.SIGKILL)
        channel.send({"over": os.waitstatus_to_exitcode(status)})


def _judge(channel: Channel, order: dict[str, Any]) -> NoReturn:
    """Say of each test whether it passed, and leave."""
    try:
        tests = (
            run_calls(channel, order["calls"])
            if "calls" in order
            else run_suite(channel, order["tests"], order["entry_point"])
        )
        for passed, reason in tests:
            channel.send({"passed": passed, "reason": reason[:REASON_CHARACTERS]})
    except (CannotRun, CannotSend, SyntaxError) as error:
        channel.send({"unusable": f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]})
    except (EOFError, BrokenPipeError):  # the judge is gone
        os._exit(1)
    os._exit(0)


def run_suite(channel: Channel, source: str, entry_point: str | None) -> Iterator[tuple[bool, str]]:
    """Run the tests of `source` against the candidate behind `channel`: (passed, what was wrong) of each in turn."""
    suite = read_suite(source)
    names = names_wanted(source)
    remote = Remote(channel, frozenset(names))
    tests = types.ModuleType("tests")
    sys.modules["tests"] = tests
    _install_stand_ins(remote)
    tests.__dict__.update({name: importlib.import_module(name) for name in library_modules(source)})
    _fetch(remote, [*names, entry_point] if entry_point else names, tests.__dict__)
    namespace = tests.__dict__
    for statement, is_test in suite.statements:
        reason = _outcome(remote, _execute, statement, namespace)
        if is_test or (reason and not remote.lost):  # an assignment that fails is a test that fails
            yield not reason, reason
    for name in suite.functions:
        reason = _outcome(remote, _run_function, namespace, name)
        yield not reason, reason
    for owner, method in suite.methods:
        reason = _outcome(remote, _run_method, namespace, owner, method)
        yield not reason, reason
    if suite.check is not None:
        reason = _outcome(remote, lambda: namespace[str(suite.check)](namespace.get(entry_point or "")))
        yield not reason, reason


def run_calls(channel: Channel, calls: list[list[Any]]) -> Iterator[tuple[bool, str]]:
    """Make calls of the candidate behind `channel`, and compare what they return with what is expected."""
    remote = Remote(channel, frozenset())
    functions: dict[str, Any] = {}
    _fetch(remote, sorted({name for name, *_ in calls}), functions)
    for name, arguments, keywords, expected in calls:
        reason = _outcome(remote, _compare, functions, name, arguments, keywords, expected)
        yield not reason, reason


def _compare(
    functions: dict[str, Any], name: str, arguments: list[Any], keywords: dict[str, Any], expected: Any
) -> None:
    if not callable(functions.get(name)):
        raise NameError(f"there is no function {name}")
    given = [decode(one, _no_handle) for one in arguments]
    value = functions[name](*given, **{key: decode(one, _no_handle) for key, one in keywords.items()})
    wanted = decode(expected, _no_handle)
    if not same(value, wanted):
        raise AssertionError(f"{name}(...) is {reprlib.repr(value)}, not {reprlib.repr(wanted)}")


def same(value: Any, expected: Any) -> bool:
    """Whether a value is the expected one: floats within TOLERANCE, tuples like lists, all else exactly."""
    if isinstance(value, Proxy):
        return False
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(one, expected[key]) for key, one in value.items())
    if isinstance(value, int | float) and isinstance(expected, int | float) and float in (type(value), type(expected)):
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(value) is type(expected) and bool(value == expected)


def _no_handle(data: Any) -> Any:
    raise CannotRun(f"{data!r} in a table of calls is no plain data")


def _outcome(remote: Remote, action: Callable[..., Any], *arguments: Any) -> str:
    """What is wrong with what `action` did; nothing where it came to its end."""
    reason = ""
    try:
        action(*arguments)
    except (CannotRun, CannotSend, EOFError, BrokenPipeError):
        raise
    except BaseException as error:  # tests and candidate may raise anything; CandidateLost and SystemExit among it
        reason = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    return f"{type(remote.lost).__name__}: {remote.lost}" if remote.lost else reason


def _fetch(remote: Remote, names: list[str], namespace: dict[str, Any]) -> None:
    """Take what the candidate has of `names`, and nothing else that it may offer."""
    found: dict[str, Any] = {}
    reason = _outcome(remote, lambda: found.update(remote.ask({"names": names})))
    if reason and not remote.lost:
        remote.lost = CandidateLost(reason)
    namespace.update({name: found[name] for name in names if name in found})


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:  # an exception class of the tests' or the candidate's
        return f"({type(another).__name__})"


def _execute(statement: ast.stmt, namespace: dict[str, Any]) -> None:
    module = ast.Module([statement], [])
    try:
        exec(compile(module, "tests.py", "exec", dont_inherit=True), namespace)
    except ImportError as error:
        if isinstance(statement, ast.Import | ast.ImportFrom) and error.name != MODULE:
            raise CannotRun(f"the tests' own import fails: {error}") from error
        raise


def _run_function(namespace: dict[str, Any], name: str) -> None:
    """Call a test function, with each set of arguments that it is parametrised with."""
    _call_all(namespace[name])


def _call_all(function: Callable[..., Any]) -> None:
    for arguments in getattr(function, "parameters", [{}]):
        result = function(**arguments)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def _run_method(namespace: dict[str, Any], class_name: str, name: str) -> None:
    """Run one test method in an instance of its own, as unittest or pytest would."""
    owner = namespace[class_name]
    if not hasattr(owner, "run"):
        instance = owner()
        for step in ("setup_method", name, "teardown_method"):
            _call_all(getattr(instance, step, _nothing))
        return
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([owner(name)]).run(result)
    problems = [*result.failures, *result.errors, *((test, "expected to fail") for test in result.unexpectedSuccesses)]
    if problems:
        raise AssertionError(problems[0][1].strip().rpartition("\n")[2])
    if result.skipped:
        raise AssertionError("skipped")


def _nothing() -> None:
    """The fixture of a class that has none."""


def _install_stand_ins(remote: Remote) -> None:
    """Make the candidate importable as a module, and what tests use of pytest where that is not installed."""

    class Solution(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return remote.word("getattr", Proxy(remote, 0, "module"), name)

    solution = Solution(MODULE)
    sys.modules[MODULE] = solution
    if importlib.util.find_spec("pytest") is None:
        from grpo_toolbox.rewards.code.inside import pytest_parts

        sys.modules["pytest"] = pytest_parts
