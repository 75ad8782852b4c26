"""Options that come from a function's signature: `advantage.eps=1e-6` binds the keyword argument `eps`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest, unknown_option


def resolve(group: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that `<group>.name` means: a name of `registry`, or `my_module:my_fn`."""
    if ":" not in name:
        if name not in registry:
            raise unknown_option(f"{group}.name", name, registry)
        return registry[name]
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{group}.name={name!r}: cannot import {module_name!r} ({error}). It must be importable from where you "
            "run `toolbox`: install it, or put its folder on PYTHONPATH."
        ) from error
    if not callable(getattr(module, attribute, None)):
        raise ConfigError(f"{group}.name={name!r}: module {module_name!r} has no function {attribute!r}.")
    function: Callable[..., Any] = getattr(module, attribute)
    return function


def bind(group: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with `options` bound; an option it does not take is an error that lists the real ones."""
    parameters = inspect.signature(function).parameters.values()
    allowed = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    for key in options:
        if key not in allowed and not anything:
            known = ", ".join(allowed) or "none"
            raise ConfigError(f"{group}.{key} is not an option of {group}; it takes: {known}.{suggest(key, allowed)}")
    return partial(function, **options)
