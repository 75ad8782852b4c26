"""From what Hydra composed to a checked `RunConfig`; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_toolbox.config.check import check_config
from grpo_toolbox.config.keys import unknown_key
from grpo_toolbox.config.options import check_named, without_foreign
from grpo_toolbox.config.schema import RunConfig, from_composed
from grpo_toolbox.config.source import CONF
from grpo_toolbox.errors import ConfigError

NAMED_GROUPS = ("reward", "advantage", "objective")


def typed_config(
    composed: Any,
    choices: Mapping[str, str],
    given: Collection[str] = (),
    written: Collection[str] = (),
    method: Collection[str] = (),
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the config as records and as plain values (what config.yaml holds), or raise the first ConfigError.

    `choices` says which option of each group was composed; `given`, `written` and `method` are the keys that the
    command line, the experiment's own file and the method's set. Where the method names a group's option, what the
    experiment wrote for another gives way; where the command line names it, the method's numbers do.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(
                f"{missing[0]} has no default: set {missing[0]}=… on the command line or in the experiment."
            )
        with open_dict(composed):
            for group in NAMED_GROUPS:
                values: Any = OmegaConf.to_container(composed[group], resolve=True)
                chosen = chosen_option(group, choices.get(group))
                if group in given:
                    taken_back = {f"{group}.{key}": key for key in chosen if f"{group}.{key}" not in given}
                    values |= {key: chosen[key] for place, key in taken_back.items() if place in method}
                explicit = method if group in method else written
                composed[group] = without_foreign(group, values, chosen, given, explicit)
        config = from_composed(composed)
        plain: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    _check_keys(config, "")
    for group in NAMED_GROUPS:
        check_named(group, getattr(config, group))
    check_config(config)
    return config, plain


def chosen_option(group: str, option: str | None) -> dict[str, Any]:
    """Return what the package's own option of a group sets, with what it builds on; nothing for one of the user's."""
    path = CONF / group / f"{option}.yaml"
    if not path.is_file():
        return {}
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    below = [chosen_option(group, name) for name in values.pop("defaults", []) if name != "_self_"]
    return {key: value for part in (*below, values) for key, value in part.items()}


def _check_keys(record: Any, prefix: str) -> None:
    """Refuse keys that a `+` forced into a part of the config that has a fixed set of them."""
    known = [field.name for field in dataclasses.fields(record)]
    for key, value in vars(record).items():
        if key not in known:
            raise unknown_key(f"{prefix}{key}", known)
        if dataclasses.is_dataclass(value):
            _check_keys(value, f"{prefix}{key}.")
