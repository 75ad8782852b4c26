"""Test code taken apart into the tests that it holds."""

from __future__ import annotations

import ast
import builtins
import sys
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PREPARATION = (
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Pass),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global),
)


@dataclass(frozen=True)
class Suite:
    """The tests of one source text."""

    statements: tuple[tuple[ast.stmt, bool], ...]
    """What stands at the top, in order, and whether it is a test: whatever is neither a definition, an assignment nor
    an import nor a text standing alone."""
    functions: tuple[str, ...]
    """`test_...` functions, each of which is a test."""
    methods: tuple[tuple[str, str], ...]
    """(class, `test...` method), each of which is a test."""
    check: str | None
    """A function `check(candidate)` that nothing at the top calls; calling it is a test."""

    @property
    def size(self) -> int:
        """How many tests there are."""
        return (
            sum(is_test for _, is_test in self.statements) + len(self.functions) + len(self.methods) + bool(self.check)
        )


def read_suite(source: str) -> Suite:
    """Take test code apart; SyntaxError or ValueError where it is no Python."""
    body = ast.parse(source).body
    functions = [one for one in body if isinstance(one, Function)]
    calls = {node.id for one in body if _is_test(one) for node in ast.walk(one) if isinstance(node, ast.Name)}
    checks = [one.name for one in functions if one.name == "check" and _required(one) == 1 and "check" not in calls]
    return Suite(
        statements=tuple((one, _is_test(one)) for one in body),
        functions=tuple(one.name for one in functions if one.name.startswith("test") and one.name not in calls),
        methods=tuple(
            (one.name, method.name)
            for one in body
            if isinstance(one, ast.ClassDef)
            for method in one.body
            if isinstance(method, Function) and method.name.startswith("test")
        ),
        check=checks[0] if checks else None,
    )


def names_wanted(source: str) -> list[str]:
    """The names that test code takes from the candidate where it does not define them itself, sorted.

    Names of the language are its own, and so are modules of its library: `abs(f(2) - 1)` and `math.isclose(...)` never
    ask the candidate what `abs` and `math` are.
    """
    names = {node.id for node in _names(ast.parse(source))}
    return sorted(name for name in names.difference(library_modules(source)) if not hasattr(builtins, name))


def library_modules(source: str) -> set[str]:
    """The modules of Python's library that test code uses as modules only, and perhaps leaves to others to import."""
    tree = ast.parse(source)
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    alone = {node.id for node in _names(tree) if id(node) not in bases}
    return {node.id for node in _names(tree) if node.id in sys.stdlib_module_names} - alone


def _names(tree: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def _is_test(statement: ast.stmt) -> bool:
    if isinstance(statement, _PREPARATION) or _is_main_guard(statement):
        return False
    return not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _is_main_guard(statement: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`, under which tests usually call their runner."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _required(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
