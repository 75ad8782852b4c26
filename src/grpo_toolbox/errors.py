"""The error types. Every message says what was set, what is allowed, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolboxError(Exception):
    """Anything the toolbox refuses or cannot go on with; the command line prints it without a traceback."""


class ConfigError(ToolboxError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(ToolboxError, ValueError):
    """A data file, row or column that cannot be trained on."""


class RewardError(ToolboxError):
    """A reward that raised, or returned something that is not one number or None per completion."""


class EngineError(ToolboxError):
    """A rollout engine that is not there, not the one the trainer needs, or does not keep its contract."""


class Cancelled(ToolboxError):
    """`Engine.cancel` ended a generation before its time; what had finished was handed out."""


class TrainingError(ToolboxError):
    """A training step that must not reach the parameters (a non-finite loss or gradient)."""


def suggest(name: str, options: Iterable[str]) -> str:
    """Return ` Did you mean x?` for the nearest of `options`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def unknown_option(what: str, value: object, options: Iterable[str]) -> ConfigError:
    """Build the error for a value that is not among `options`: names it, lists them, suggests the nearest."""
    names = sorted(options)
    return ConfigError(f"{what}={value!r} is not an option: {', '.join(names)}.{suggest(str(value), names)}")
