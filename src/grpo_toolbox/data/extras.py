"""Packages that only some data needs."""

from __future__ import annotations

import importlib
from typing import Any

from grpo_toolbox.errors import DataError


def import_extra(module: str, *, extra: str, needed_for: str) -> Any:
    """Import `module`, or raise a DataError that says which extra of the distribution brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{needed_for} needs the package {package} ({error}). Run: pip install 'grpo-toolbox[{extra}]'"
        ) from error
