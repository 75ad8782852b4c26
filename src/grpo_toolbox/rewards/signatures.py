"""What a reward function asks for, read from its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.errors import ConfigError

CONTRACT = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""The names that the contract itself passes; no data column may bear one of them."""


@dataclass(frozen=True)
class Signature:
    """The keyword arguments of one reward function."""

    required: tuple[str, ...]
    """Parameters without default."""
    optional: tuple[str, ...]
    everything: bool
    """Whether it takes `**kwargs`, and with them all there is."""
    bound: frozenset[str]
    """Options already bound by a `functools.partial`: a data column of the same name must not overwrite them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The data columns without which the function cannot be called."""
        return tuple(name for name in self.required if name not in CONTRACT)

    def select(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `available` that the function is to be called with."""
        asked = {*self.required, *self.optional}
        return {
            name: value
            for name, value in available.items()
            if name not in self.bound and (self.everything or name in asked)
        }


def read_signature(function: Callable[..., Any]) -> Signature:
    """Read which keyword arguments `function` takes; ConfigError where it cannot be called by keyword."""
    name = function_name(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some C functions have no signature
        raise ConfigError(
            f"reward {name!r} has no readable signature: wrap it in a def with named parameters."
        ) from error
    bound = frozenset(function.keywords) if isinstance(function, functools.partial) else frozenset()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise ConfigError(
            f"reward {name!r} takes {', '.join(positional)} by position only, but rewards are called by keyword:"
            " remove the / from its signature."
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in bound]
    return Signature(
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
        bound=bound,
    )


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, of the function inside a partial, or of a callable object's class."""
    function = unwrapped(function)
    name = getattr(function, "__name__", type(function).__name__)
    return name.strip("<>")  # "<lambda>" would not make a metric's name


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a partial; any other callable itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def declare(function: Callable[..., Any], name: str, needed: Sequence[str]) -> None:
    """Give a reward function its name and a signature that only its options decide: `needed`, and the two logs."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(one, keyword) for one in needed]
    parameters += [inspect.Parameter(one, keyword, default=None) for one in ("log_extra", "log_metric")]
    function.__name__ = name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` is known beforehand to return a coroutine at once."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
