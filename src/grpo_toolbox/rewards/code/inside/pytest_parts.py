"""What test code most often takes from pytest, for sandboxes in which it is not installed: raises, approx, mark."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def raises(expected: Any, match: str | None = None) -> Iterator[SimpleNamespace]:
    """A block that must raise `expected`, with a message in which the pattern `match` is found."""
    seen = SimpleNamespace(value=None, type=None)
    try:
        yield seen
    except expected as error:
        seen.value, seen.type = error, type(error)
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{match!r} is not in {str(error)!r}") from error
    else:
        raise AssertionError(f"{expected} was not raised")


def approx(expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> Any:
    """What equals numbers near `expected`, or containers of them."""
    if isinstance(expected, dict):
        return {key: approx(one, rel, abs) for key, one in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(approx(one, rel, abs) for one in expected)
    return _Near(expected, rel, abs)


class _Near:
    def __init__(self, expected: float, rel: float, abs: float) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and math.isclose(other, self.expected, rel_tol=self.rel, abs_tol=self.abs)

    def __repr__(self) -> str:
        return f"about {self.expected!r}"


def fail(reason: str = "") -> None:
    """Fail the test."""
    raise AssertionError(reason)


class _Mark:
    def parametrize(self, names: str | Sequence[str], values: Sequence[Any], **_: Any) -> Callable[[Any], Any]:
        """Have the test called once for each of `values`."""
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(listed, value if len(listed) > 1 else [value], strict=True)) for value in values]

        def mark(function: Any) -> Any:
            before = getattr(function, "parameters", [{}])
            function.parameters = [{**one, **row} for one in before for row in rows]
            return function

        return mark

    def __getattr__(self, name: str) -> Any:
        def mark(*arguments: Any, **_: Any) -> Any:
            return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else mark

        return mark


mark = _Mark()
