"""Hydra's errors in our words: what was set, what is allowed, the nearest name."""

from __future__ import annotations

import re

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from grpo_toolbox.cli.help import CONF, SCHEMA_GROUPS, option_names, schema_keys
from grpo_toolbox.errors import ConfigError, suggest

_TOP = ("name", "run_dir", "resume")


def explain(error: Exception) -> ConfigError | None:
    """Return the error to show instead, or None for one that is not about composing the config."""
    causes = list(_chain(error))
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(f"cannot read the override {error.override!r}: write key=value; quote values with spaces.")
    if not any(isinstance(one, (ConfigCompositionException, OmegaConfBaseException)) for one in causes):
        return None
    text = "\n".join(map(str, causes))
    unknown = re.search(r"Key '[^']*' (?:is not in struct|not in '\w+')\s+full_key: ([\w.]+)", text)
    if unknown:
        return _unknown_key(unknown.group(1))
    wrong = re.search(
        r"Value '([^']*)' (?:of type '[^']*' )?(could not be converted to|is not a valid) [^\n]*\s+full_key: ([\w.]+)",
        text,
    )
    if wrong:
        return _wrong_type(wrong.group(3), wrong.group(1))
    group = re.search(r"Could not override '([\w/.@]+)'.*?No match in the defaults list", text, flags=re.DOTALL)
    if group:
        return _unknown_key(group.group(1).replace("/", "."))
    return ConfigError(" ".join(text.split()))


def known_keys() -> list[str]:
    """Return every key that an override can name, in dotted form."""
    keys = [*_TOP, *(folder.name for folder in CONF.iterdir() if folder.is_dir())]
    for group, class_name in SCHEMA_GROUPS.items():
        keys += [key for key, _ in _typed(group, class_name)]
    for group in ("reward", "advantage", "objective", "callbacks"):
        for option in option_names(group):
            text = (CONF / group / f"{option}.yaml").read_text()
            keys += [f"{group}.{name}" for name in re.findall(r"^(\w+):", text, flags=re.MULTILINE)]
    return sorted(set(keys))


def _unknown_key(key: str) -> ConfigError:
    siblings = [one for one in known_keys() if one.rpartition(".")[0] == key.rpartition(".")[0]]
    near = suggest(key, known_keys())
    listed = f" It has: {', '.join(one.rpartition('.')[2] for one in siblings)}." if siblings and "." in key else ""
    return ConfigError(
        f"{key} is not a setting.{near}{listed} "
        f"(`toolbox train --help` lists groups; +{key}=… passes a new key to a plug-in of yours.)"
    )


def _wrong_type(key: str, value: str) -> ConfigError:
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    group = key.partition(".")[0]
    kind = dict(_typed(group, SCHEMA_GROUPS.get(group, ""))).get(key, "").replace(" | None", "")
    return ConfigError(f"{key}={value!r} is not {kinds.get(kind, kind or 'of the right type')}.")


def _typed(prefix: str, class_name: str) -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for name, kind, _, _ in schema_keys(class_name) if class_name else []:
        keys += _typed(f"{prefix}.{name}", kind) if kind.endswith("Config") else [(f"{prefix}.{name}", kind)]
    return keys


def _missing_option(error: MissingConfigException) -> ConfigError:
    missing = str(error.missing_cfg_file or "")
    group, _, option = missing.rpartition("/")
    options = list(error.options or [])
    if not group:
        return ConfigError(" ".join(str(error).split()))
    return ConfigError(f"{group}={option} is not an option: {', '.join(options)}.{suggest(option, options)}")


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
