"""Functions of the user's own, named `my_module:my_fn`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest


def plug_in(where: str, name: str) -> Callable[..., Any]:
    """Import the function that `<where>.name=my_module:my_fn` means, also from the working directory."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # an installed command does not look there by itself
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{where}.name={name!r}: importing {module_name!r} failed ({type(error).__name__}: {error}). It must be "
            "installed, or lie in the working directory."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{where}.name={name!r}: {module_name} has no function {attribute!r}; it has: "
            f"{', '.join(sorted(names)) or 'none'}.{suggest(attribute, names)}"
        )
    return function
