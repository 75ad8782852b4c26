"""The house style as far as a machine can see it: small functions, small files, shallow nesting, a docstring each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_toolbox
from grpo_toolbox.callbacks import Callback

ROOT = Path(grpo_toolbox.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
LINES_OF_THE_LOOP = 80
NESTING = 3

files = pytest.mark.parametrize("name", FILES)


def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def functions(name: str) -> Iterator[Function]:
    return (node for node in ast.walk(tree(name)) if isinstance(node, Function))


def nesting(node: ast.AST) -> int:
    """How deep branches, loops and tries stand inside each other; `with` and `elif` add nothing."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        adds = isinstance(child, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.Match) and not is_elif
        deepest = max(deepest, adds + nesting(child))
    return deepest


def public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    return (one for one in body if isinstance(one, Function | ast.ClassDef) and not one.name.startswith("_"))


@files
def test_files_and_functions_are_small(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= LINES_OF_A_FILE
    for function in functions(name):
        limit = LINES_OF_THE_LOOP if (name, function.name) == ("trainer.py", "train") else LINES_OF_A_FUNCTION
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= limit, f"{function.name} has {length} lines"
        assert nesting(function) <= NESTING, f"{function.name} is nested {nesting(function)} deep"


@files
def test_every_module_and_every_public_name_is_documented(name: str) -> None:
    module = tree(name)
    assert ast.get_docstring(module), "the module has no docstring"
    for one in public(module.body):
        assert ast.get_docstring(one), f"{one.name} has no docstring"
        if not isinstance(one, ast.ClassDef):
            continue
        inherited = set(vars(Callback)) if "Callback" in map(ast.unparse, one.bases) else set()
        for method in public(one.body):
            assert ast.get_docstring(method) or method.name in inherited, f"{one.name}.{method.name} has no docstring"


@files
def test_every_argument_and_result_has_a_type(name: str) -> None:
    for function in functions(name):
        assert function.returns is not None, function.name
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            assert argument.annotation is not None or argument.arg in ("self", "cls", "ctx"), function.name


@files
def test_annotations_are_not_evaluated(name: str) -> None:
    body = tree(name).body
    if any(isinstance(one, Function | ast.ClassDef | ast.Assign | ast.AnnAssign) for one in body[1:]):
        assert ast.unparse(body[1]) == "from __future__ import annotations" or name.endswith("__init__.py")


@files
def test_nothing_is_caught_blindly(name: str) -> None:
    """Catching everything is for code from outside, and a comment on the line says whose."""
    for line in FILES[name].read_text().splitlines():
        if re.match(r"\s*except( (Base)?Exception\b.*)?:", line):
            assert re.search(r":  # \w+", line), line.strip()


@files
def test_nothing_is_left_for_later(name: str) -> None:
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", FILES[name].read_text())
    assert Path(name).stem not in ("utils", "util", "helpers", "common", "misc")
