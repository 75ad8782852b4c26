"""`trainer.stages`: several runs one after the other, each with what it changes; torch-free.

    trainer.stages: [{name: form, reward: format, trainer.max_steps: 100}, {name: answer, reward: {name: numeric}}]

A stage's folder is `<run_dir>/<its name>`. It begins with the model that the stage before has left, and so does its
reference; an adapter is added into the weights first, and a fresh one trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_toolbox.config.keys import known_keys
from grpo_toolbox.config.schema import RewardConfig, RunConfig, schema_node
from grpo_toolbox.config.source import OPEN_GROUPS, groups
from grpo_toolbox.config.typed import NAMED_GROUPS, chosen_option, typed_config
from grpo_toolbox.errors import ConfigError, suggest


@dataclass(frozen=True)
class Stage:
    """One of the runs: its name, its config, and the config as plain values."""

    name: str
    config: RunConfig
    plain: dict[str, Any]


def stages_of(plain: Mapping[str, Any], run_dir: Path) -> list[Stage]:
    """Return the checked stages of a composed config, which run in folders of `run_dir`."""
    listed = plain["trainer"]["stages"]
    if not isinstance(listed, list) or not listed or not all(isinstance(one, Mapping) for one in listed):
        raise ConfigError(
            f"trainer.stages={listed!r:.60} must be a list of mappings, such as "
            "[{name: form, reward: format, trainer.max_steps: 100}, {name: answer, reward: numeric}]."
        )
    names = [str(one.get("name") or f"stage-{number}") for number, one in enumerate(listed, start=1)]
    for name in names:
        if names.count(name) > 1 or not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ConfigError(f"trainer.stages: {name!r} must be a name of its own, of letters, digits, . - _.")
    return [
        _stage(plain, name, {key: value for key, value in one.items() if key != "name"}, run_dir)
        for name, one in zip(names, listed, strict=True)
    ]


def starting_from(stage: Stage, model: Path) -> Stage:
    """Return the stage with the model that it begins with."""
    changed = OmegaConf.create(stage.plain)
    OmegaConf.update(changed, "model.path", str(model))
    return _checked(stage.name, changed)


def _stage(plain: Mapping[str, Any], name: str, changes: Mapping[str, Any], run_dir: Path) -> Stage:
    composed: Any = OmegaConf.create(dict(plain))
    for key, value in _flat(changes).items():
        group = key.partition(".")[0]
        if key in NAMED_GROUPS and (isinstance(value, str) or (isinstance(value, Mapping) and "name" in value)):
            composed[key] = _replaced(key, value)
            continue
        if key not in known_keys() and group not in OPEN_GROUPS:
            raise ConfigError(f"trainer.stages, {name}: {key} is not a key.{suggest(key, known_keys())}")
        OmegaConf.update(composed, key, value, force_add=True)
    composed.trainer.stages = None
    composed.run_dir, composed.resume, composed.name = str(run_dir / name), None, f"{plain['name']}-{name}"
    return _checked(name, composed)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return changes by dotted keys; what is open to options of any name stays a mapping."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        whole = f"{prefix}{key}"
        inner = isinstance(value, Mapping) and whole not in NAMED_GROUPS and not whole.startswith("callbacks")
        flat |= _flat(value, f"{whole}.") if inner else {whole: value}
    return flat


def _replaced(group: str, value: Any) -> dict[str, Any]:
    """Return the options of another function of a group: those of its file, or the ones written down."""
    common = vars(RewardConfig()) if group == "reward" else {}
    if not isinstance(value, str):
        return {**common, **value}
    found = chosen_option(group, value)
    if not found:
        options = [one for one in groups() if one == group]
        raise ConfigError(f"trainer.stages: {group}={value!r} is not an option of {', '.join(options)}.")
    return {**common, **found}


def _checked(name: str, composed: Any) -> Stage:
    try:
        merged = OmegaConf.merge(schema_node(), composed)
        config, plain = typed_config(merged, {})
    except (ConfigError, OmegaConfBaseException) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"trainer.stages, {name}: {reason}") from error
    return Stage(name, config, plain)
