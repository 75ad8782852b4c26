"""Hydra's errors in our words: what was set, what is allowed, the nearest name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from grpo_toolbox.config.keys import typed_keys, unknown_key
from grpo_toolbox.config.source import SCHEMA_GROUPS, groups
from grpo_toolbox.errors import ConfigError, suggest

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def explain(error: Exception) -> ConfigError:
    """Return the error to show for one that was raised while the config was composed."""
    causes = list(_chain(error))
    text = "\n".join(str(cause) for cause in causes)
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read the override {error.override!r}: write key=value, a list as [a,b], a mapping as {{a: 1}}."
        )
    ambiguous = re.search(r"Ambiguous value for argument '([^']*)'", text)
    if ambiguous:
        key, _, values = ambiguous.group(1).partition("=")
        return ConfigError(f"{key}={values} is a sweep: add --multirun, or write {key}=[{values}] for a list.")
    group = re.search(r"Could not override '([\w/.@]+)'.*?No match in the defaults list", text, flags=re.DOTALL)
    if group:
        return unknown_key(group.group(1).replace("/", "."), [])
    about = [cause for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key]
    where = re.search(r"In '([\w/.-]+)': \w+ raised while composing config", text)
    file = f"{where.group(1)}.yaml: " if where else ""
    message = str(_about_key(about[-1], text, file)) if about else " ".join(str(causes[0]).split())
    return ConfigError(message if isinstance(causes[0], YAMLError) else f"{file}{message}")


def _about_key(error: OmegaConfBaseException, text: str, file: str) -> ConfigError:
    key = str(error.full_key)
    if "does not support deletion" in text:
        return ConfigError(f"~{key}: a setting cannot be taken out, only set: {key}=….")
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        group = file.partition("/")[0]
        if file and key == group and group in groups():
            return ConfigError("it must begin with the line `# @package _global_`.")
        return unknown_key(key, _siblings(error))
    if isinstance(error, ValidationError):
        value = re.search(r"Value '([^']*)'", text)
        return _wrong_type(key, value.group(1) if value else "null")
    return ConfigError(f"{key}: {str(error).splitlines()[0]}")


def _siblings(error: OmegaConfBaseException) -> Sequence[str]:
    return [str(key) for key in error.parent_node] if isinstance(error.parent_node, DictConfig) else []


def _wrong_type(key: str, value: str) -> ConfigError:
    group = key.partition(".")[0]
    kinds = typed_keys(group, SCHEMA_GROUPS[group]) if group in SCHEMA_GROUPS else typed_keys("", "RunConfig")
    kind = kinds.get(key, kinds.get(f".{key}", ""))
    words = [_KINDS.get(part, part) for part in kind.split(" | ") if part != "None"]
    return ConfigError(f"{key}={value!r} is not {' or '.join(words) or 'of the right type'}.")


def _missing_option(error: MissingConfigException) -> ConfigError:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = [name for name in error.options or [] if not name.startswith("_")]
    if not group:
        return ConfigError(" ".join(str(error).split()))
    return ConfigError(f"{group}={option} is not an option: {', '.join(options)}.{suggest(option, options)}")


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
