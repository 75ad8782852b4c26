"""Programs that go for the grader instead of the task, found in their syntax tree.

Each rule looks for an act, not for a word: an exit that reports success from inside a function, a comparison that is
always true, a library function that is replaced, a test file that is read. What honest programs do for other reasons
(a main that exits, `input = sys.stdin.readline`, `sys.stdout` redirected, a `check` of their own) is left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_toolbox.rewards.code.extraction import parse
from grpo_toolbox.rewards.code.hack_rules import RULES
from grpo_toolbox.rewards.code.intent import find_intent
from grpo_toolbox.rewards.code.syntax import Program, text_of

KINDS = ("exit", "grader", "reads_tests", "equality", "builtins", "hidden_code", "intent")
"""What is told apart: leaving with success, tampering with the grader or looking into it, reading test files,
comparisons that please, replaced builtins or library functions, code that hides, intent stated in words."""

DEEPEST_EXEC = 3


@dataclass(frozen=True)
class Hack:
    """One act against the grader."""

    kind: str
    """One of KINDS."""
    line: int
    """In the program, from 1; 0 where it stands in the reasoning."""
    evidence: str
    """The source or the words, shortened."""


def detect_hacks(code: str, reasoning: str = "") -> list[Hack]:
    """The acts against a grader that a program commits, and the intent that it or its reasoning states, by line.

    What is no Python commits none, and can still state intent in its comments.
    """
    found = [Hack("intent", 0, words) for words in find_intent(reasoning)]
    for number, line in enumerate(code.split("\n"), 1):
        found += [Hack("intent", number, words) for words in find_intent(line.partition("#")[2])]
    try:
        found += _acts(code, DEEPEST_EXEC)
    except RecursionError:  # it parses, but is nested too deeply to be looked at
        found.append(Hack("hidden_code", 1, "nested without end"))
    return sorted(dict.fromkeys(found), key=lambda one: one.line)


def _acts(code: str, depth: int) -> Iterator[Hack]:
    tree = parse(code)
    if tree is None:
        return
    program = Program(tree)
    for node in program.nodes:
        line = getattr(node, "lineno", 0)
        for kind in {kind for rule in RULES if (kind := rule(program, node))}:
            yield Hack(kind, line, " ".join(ast.unparse(node).split())[:120])
        if depth and isinstance(node, ast.Call) and program.meaning(node.func) in ("exec", "eval", "compile"):
            inner = text_of(node.args[0]) if node.args else ""
            yield from (Hack(one.kind, line, one.evidence) for one in _acts(inner, depth - 1))
