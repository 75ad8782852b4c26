"""Hidden tests as data sets hold them: test code, a table of calls, or inputs and outputs of a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_toolbox.errors import DataError
from grpo_toolbox.rewards.code.inside.suite import names_wanted, read_suite
from grpo_toolbox.rewards.code.records import Call, Problem, Program, Programs, Suite, Table, Tests

FORMS = (
    "test code as text or a list of texts; a list of {call, args, expected}; a list of {input, output}; or"
    " {inputs, outputs} with fn_name where a function is called"
)


def read_problem(tests: Any, setup: Any = None, entry_point: Any = None) -> Problem | None:
    """What the columns of one row hold; None where there are no tests. DataError for what cannot be tests."""
    if entry_point is not None and not isinstance(entry_point, str):
        raise DataError(f"entry_point={entry_point!r:.60} must be the name of a function.")
    if setup is not None and not isinstance(setup, str):
        raise DataError(f"setup={setup!r:.60} must be Python code as text.")
    found = _tests(_from_json(tests), entry_point)
    return None if found is None else Problem(found, setup or "")


def _from_json(tests: Any) -> Any:
    """Tests that a data set keeps as JSON text, read; anything else as it is."""
    if not isinstance(tests, str) or not tests.lstrip().startswith(("[", "{")):
        return tests
    try:
        return json.loads(tests)
    except ValueError:  # Python that begins with a bracket
        return tests


def _tests(tests: Any, entry_point: str | None) -> Tests | None:
    if (
        tests is None
        or (hasattr(tests, "__len__") and len(tests) == 0)
        or (isinstance(tests, str) and not tests.strip())
    ):
        return None
    if isinstance(tests, str):
        return _suite(tests, entry_point)
    if isinstance(tests, Mapping):
        return _columns(tests)
    if not isinstance(tests, Sequence):
        raise DataError(f"tests={tests!r:.60} are of no known form: {FORMS}.")
    if all(isinstance(one, str) for one in tests):
        return _suite("\n".join(tests), entry_point)
    if not all(isinstance(one, Mapping) for one in tests):
        raise DataError(f"tests={tests!r:.60} are of no known form: {FORMS}.")
    if all(one.keys() >= {"input", "output"} for one in tests):
        return Programs(tuple(Program(_text(one["input"]), _text(one["output"])) for one in tests))
    return Table(tuple(_call(one, entry_point) for one in tests))


def _suite(source: str, entry_point: str | None) -> Suite:
    try:
        size = read_suite(source).size
        wanted = names_wanted(source)
    except (SyntaxError, ValueError, RecursionError) as error:  # the data's code
        raise DataError(f"tests {source!r:.60} are no Python: {error}.") from error
    if size == 0:
        raise DataError(f"tests {source!r:.60} hold no test: write asserts, functions test_... or check(candidate).")
    if not wanted and entry_point is None and "solution" not in source:
        raise DataError(
            f"tests {source!r:.60} use nothing of the candidate's: name its function in column entry_point."
        )
    return Suite(source, entry_point, size)


def _columns(tests: Mapping[str, Any]) -> Tests:
    """`{inputs: [...], outputs: [...]}`, where `fn_name` says that each input is a list of arguments."""
    if not tests.keys() >= {"inputs", "outputs"}:
        raise DataError(f"tests have the keys {', '.join(map(str, tests)) or 'none'}; known forms: {FORMS}.")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise DataError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs: there must be one for one.")
    pairs = zip(inputs, outputs, strict=True)
    if tests.get("fn_name"):
        return Table(tuple(_call({"call": tests["fn_name"], "args": one, "expected": out}, None) for one, out in pairs))
    return Programs(tuple(Program(_text(one), _text(out)) for one, out in pairs))


def _call(row: Mapping[str, Any], entry_point: str | None) -> Call:
    name = row.get("call", entry_point)
    if not isinstance(name, str) or "expected" not in row:
        raise DataError(f"a test {dict(row)!r:.80} is of no known form: {FORMS}.")
    arguments, keywords = row.get("args", []), row.get("kwargs", {})
    if not isinstance(arguments, list | tuple) or not isinstance(keywords, Mapping):
        raise DataError(f"a test of {name} has args={arguments!r:.60}: it must be a list of arguments.")
    return Call(name, tuple(arguments), dict(keywords), row["expected"])


def _text(value: Any) -> str:
    """An input or output as text; a list of lines is one text."""
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    if isinstance(value, str):
        return value
    raise DataError(f"input or output {value!r:.60} of a program must be text.")
