"""Right and wrong programs for a row of hidden tests: the data's own solution, or what a table of calls says."""

from __future__ import annotations

import ast
from typing import Any

from grpo_toolbox.rewards.code.extraction import find_code
from grpo_toolbox.rewards.code.inside.suite import names_wanted
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Problem, Programs, Suite, Table
from grpo_toolbox.rewards.golds import Golds, Row

SOLUTIONS = ("solution", "canonical_solution", "reference_solution", "code", "answer")
"""Columns in which data sets keep a program that passes the tests."""


def code_golds(column: str) -> Golds:
    """Programs for the tests of data column `column`; a row whose tests are code needs a solution in SOLUTIONS."""

    def problem_of(row: Row) -> Problem | None:
        return read_problem(row.get(column), row.get("setup"), row.get("entry_point"))

    def write(row: Row) -> str | None:
        problem = problem_of(row)
        if problem is None:
            return None
        return _fenced(_solution(row) or _looked_up(problem.tests))

    def wrong(row: Row) -> dict[str, str]:
        problem = problem_of(row)
        text = None if problem is None else _fenced(_idle(problem.tests))
        return {"a program that does nothing": text} if text else {}

    return Golds(write, wrong)


def _solution(row: Row) -> str | None:
    """The row's own program; one that is only a function's body goes behind the prompt, which has the head."""
    found = next((row[name] for name in SOLUTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
    if found is None:
        return None
    program = find_code(found) or found
    name, prompt = row.get("entry_point"), row.get("prompt")
    if name and isinstance(prompt, str) and f"def {name}" not in program and f"def {name}" in prompt:
        program = prompt + program
    return program if _is_python(program) else None


def _is_python(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError):  # a column of prose
        return False
    return True


def _looked_up(tests: Any) -> str | None:
    """A program that holds the expected results; None for test code, which does not say them."""
    if isinstance(tests, Programs):
        table = {one.stdin.strip(): one.stdout for one in tests.programs}
        return f"import sys\nprint({table!r}[sys.stdin.read().strip()])"
    if not isinstance(tests, Table):
        return None
    functions = []
    for name in dict.fromkeys(call.function for call in tests.calls):
        rows = [(list(one.arguments), one.keywords, one.expected) for one in tests.calls if one.function == name]
        functions.append(
            f"def {name}(*args, **kwargs):\n"
            f"    for own, keywords, expected in {rows!r}:\n"
            "        if own == list(args) and keywords == kwargs:\n"
            "            return expected"
        )
    return "\n\n".join(functions)


def _idle(tests: Any) -> str | None:
    """A program that has the functions asked for and computes nothing."""
    if isinstance(tests, Programs):
        return "x = 1"
    if isinstance(tests, Suite):
        wanted = {*names_wanted(tests.source), *((tests.entry_point,) if tests.entry_point else ())}
    else:
        wanted = {call.function for call in tests.calls if call.expected is not None}
    return "\n\n".join(f"def {name}(*args, **kwargs):\n    return None" for name in sorted(wanted)) or None


def _fenced(program: str | None) -> str | None:
    return None if program is None else f"```python\n{program}\n```"
