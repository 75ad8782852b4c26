"""The program in a completion: a fenced block of Python, or the whole text where there is no fence."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

POLICIES = ("last", "first", "all", "whole")
_FENCE = re.compile(r"[ \t]*(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`\r\n]*)\Z")
_PYTHON = ("python", "python3", "py", "py3")


@dataclass(frozen=True)
class Block:
    """A fenced block: the first word behind its opening fence in lower case, its text, whether it was closed."""

    language: str
    text: str
    closed: bool


def find_code(text: str, policy: str = "last") -> str | None:
    """The program in `text`; None where there is none.

    Text before `</think>` is not looked at, nor reasoning that never ends. A block counts where its fence says python,
    python3 or py; where none does, one whose fence says nothing. `policy` takes the last of these, the first, or all
    of them one after the other; a last block that was never closed counts. Text without any fence counts where it is
    Python that does something; under `whole` any text does.
    """
    before, ended, answer = text.replace("\ufeff", "").rpartition("</think>")  # a byte order mark is no Python
    text = answer if ended else before + answer
    if "<think>" in text:  # the reasoning never ended
        return None
    blocks = fenced_blocks(text)
    if policy == "whole" or not blocks:
        return text if text.strip() and (policy == "whole" or _does_something(text)) else None
    found = [one for one in blocks if one.language in _PYTHON] or [one for one in blocks if not one.language]
    texts = [one.text for one in found if one.text.strip()]
    if not texts:
        return None
    return {"last": texts[-1], "first": texts[0], "all": "\n\n".join(texts)}[policy]


def parse(source: str) -> ast.Module | None:
    """The syntax tree of text from a model, None where it is no Python; nothing is printed about odd escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):  # the last for nesting without end
            return None


def _does_something(text: str) -> bool:
    """Whether text is a program, and not a word or a number that happens to be an expression."""
    tree = parse(text)
    idle = ast.Name | ast.Constant | ast.Tuple | ast.Attribute | ast.BinOp | ast.UnaryOp | ast.Compare
    return tree is not None and any(
        not (isinstance(one, ast.Expr) and isinstance(one.value, idle)) for one in tree.body
    )


def fenced_blocks(text: str) -> list[Block]:
    """The fenced blocks of Markdown text in order; one inside another is part of it."""
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    held: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.match(line)
        if opening is None:
            opening, held = fence, []
        elif fence is not None and not fence["info"].strip() and fence["marks"].startswith(opening["marks"]):
            blocks.append(_block(opening, held, closed=True))
            opening = None
        else:
            held.append(line)
    if opening is not None:
        held = "\n".join(held).rstrip().removesuffix(opening["marks"]).split("\n")  # closed within its last line
        blocks.append(_block(opening, held, closed=False))
    return blocks


def _block(opening: re.Match[str], lines: list[str], closed: bool) -> Block:
    words = re.findall(r"\w+", opening["info"])
    text = "\n".join(lines)
    indented = opening[0][:1] in (" ", "\t")  # as inside a list
    return Block(words[0].lower() if words else "", textwrap.dedent(text) if indented else text, closed)
