"""A program's syntax tree with what a reader knows of it: what names mean, where a node stands, what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCRIPTS = ("input", "sys.stdin", "sys.argv", "argparse.ArgumentParser", "fileinput.input")
_TESTING = ("doctest.testmod", "unittest.main", "unittest.TestCase")


class Program:
    """A syntax tree, and questions about its nodes."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names: dict[str, str] = {}
        """Local name → what it stands for, where it was imported (`os`, `os._exit`) or is another name for that."""
        for node in self.nodes:
            self._learn_import(node)
        for node in self.nodes:
            self._learn_assignment(node)
        self.defined = {node.name for node in self.nodes if isinstance(node, Function | ast.ClassDef)}

    def _learn_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                self.names[one.asname or top] = one.name if one.asname else top
        elif isinstance(node, ast.ImportFrom):
            self.names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}

    def _learn_assignment(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            meaning = self.meaning(node.value)
            if meaning.partition(".")[0] in self.modules and meaning != node.targets[0].id:
                self.names.setdefault(node.targets[0].id, meaning)

    @cached_property
    def modules(self) -> set[str]:
        """The top-level packages that are imported, and `builtins` by its other name."""
        return {name.partition(".")[0] for name in self.names.values()} | {"__builtins__"}

    @cached_property
    def meanings(self) -> set[str]:
        """Everything that some expression stands for."""
        return {self.meaning(node) for node in self.nodes}

    @property
    def is_script(self) -> bool:
        """Whether it reads its input or its command line: then leaving is a thing that it may do anywhere."""
        return any(name in self.meanings for name in _SCRIPTS)

    @property
    def forks(self) -> bool:
        """Whether it starts processes of its own, which end in their own ways."""
        return "os.fork" in self.meanings

    @property
    def tests_itself(self) -> bool:
        """Whether it compares something, asserts something or runs tests of its own."""
        return any(isinstance(node, ast.Assert | ast.Compare) for node in self.nodes) or bool(
            self.meanings.intersection(_TESTING)
        )

    def meaning(self, node: ast.AST) -> str:
        """The dotted name that an expression stands for, imports resolved; empty where it is none."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.meaning(node.value) or '?'}.{node.attr}"
        if not isinstance(node, ast.Call) or not node.args:
            return ""
        function = self.meaning(node.func)
        if function in ("__import__", "importlib.import_module"):
            return text_of(node.args[0])
        if function == "getattr" and len(node.args) > 1:
            return f"{self.meaning(node.args[0])}.{text_of(node.args[1])}"
        return f"{self.meaning(node.args[0])}.__dict__" if function == "vars" else ""

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node stands in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def at_top(self, node: ast.AST) -> bool:
        """Whether a node is a statement of the module's own."""
        return isinstance(self.parents.get(node), ast.Module)

    def texts(self, node: ast.AST) -> Iterator[str]:
        """The texts that stand in a node, and those that names in it are set to somewhere."""
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        yield from _texts(node)
        for one in self.nodes:
            if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id in names for to in one.targets):
                yield from _texts(one.value)
            elif isinstance(one, ast.For) and isinstance(one.target, ast.Name) and one.target.id in names:
                yield from _texts(one.iter)


def _texts(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str | bytes):
            yield one.value if isinstance(one.value, str) else one.value.decode("utf-8", "replace")


def text_of(node: ast.AST) -> str:
    """The text that a node is; empty where it is none."""
    value = getattr(node, "value", "")
    return value if isinstance(node, ast.Constant) and isinstance(value, str) else ""


def always(function: ast.AST) -> bool | None:
    """The one truth value that a function or lambda has, whatever it is called with; None where it depends."""
    if isinstance(function, ast.Lambda):
        return truth(function.body)
    if not isinstance(function, Function):
        return None
    returns = [one for one in ast.walk(function) if isinstance(one, ast.Return)]
    values = {truth(one.value) for one in returns}
    return values.pop() if len(values) == 1 else None


def truth(value: ast.expr | None) -> bool | None:
    """The truth of an expression that does not depend on anything; None where it may."""
    if isinstance(value, ast.Constant):
        return bool(value.value)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        inner = truth(value.operand)
        return None if inner is None else not inner
    if isinstance(value, ast.BoolOp):
        wanted = isinstance(value.op, ast.Or)
        return wanted if any(truth(one) is wanted for one in value.values) else None
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], ast.Eq | ast.Is | ast.LtE):
        return True if ast.dump(value.left) == ast.dump(value.comparators[0]) else None
    if isinstance(value, ast.Call) and len(value.args) == 2 and ast.unparse(value.func) in ("isinstance", "issubclass"):
        return True if ast.unparse(value.args[1]) == "object" else None
    return None
