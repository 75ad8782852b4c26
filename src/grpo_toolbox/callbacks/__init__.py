"""What happens beside training: files, displays and loggers, each seeing finished steps only."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest, unknown_option
from grpo_toolbox.types import RunInfo, Step


@dataclass
class Due:
    """What the loop does once a step is finished, as the settings have it until a callback changes it."""

    evaluate: bool = False
    save: bool = False
    stop: bool = False
    """Whether this step is the last one."""


class Callback:
    """A listener of the loop; override what you need. It reads records and never changes them."""

    def on_start(self, run: RunInfo) -> None:
        """Called once before the first step."""

    def on_begin(self, number: int) -> None:
        """Called before step `number` begins."""

    def on_update(self, step: Step, due: Due) -> None:
        """Called when the optimizer has moved, before what is `due` is done: change it to evaluate, save or stop."""

    def on_step(self, step: Step) -> None:
        """Called after each finished optimizer step, and once with `number=0` after the evaluation before training."""

    def on_save(self, number: int, folder: Path) -> None:
        """Called when the checkpoint of step `number` stands in `folder`."""

    def on_end(self, summary: Mapping[str, float]) -> None:
        """Called once after the last finished step, also when the run was interrupted or failed."""


CALLBACKS: Mapping[str, str] = {
    "metrics_file": "grpo_toolbox.callbacks.metrics_file:MetricsFile",
    "sample_logger": "grpo_toolbox.callbacks.sample_logger:SampleLogger",
    "trace_rollouts": "grpo_toolbox.callbacks.trace_rollouts:TraceRollouts",
    "memory_writer": "grpo_toolbox.callbacks.memory_writer:MemoryWriter",
    "tensorboard": "grpo_toolbox.callbacks.tensorboard:TensorBoard",
    "trackio": "grpo_toolbox.callbacks.trackio:Trackio",
    "wandb": "grpo_toolbox.callbacks.wandb:Wandb",
    "display": "grpo_toolbox.callbacks.display:Display",
}
"""Name in the config -> `module:Class`. A file is imported only when a run asks for it."""


def build_callbacks(specs: Mapping[str, Mapping[str, Any] | None]) -> list[Callback]:
    """Build the callbacks of a run from `{name: options}`, where options of None switch a callback off.

    `metrics_file` always comes first, so that what follows finds its file; `display` comes last, so that nothing
    prints into it. A name with a colon, `my_pkg.my_module:MyCallback`, is the user's own class.
    Raises ConfigError on an unknown name, an unknown option or a refused value, before anything is opened.
    """
    if "metrics_file" in specs and specs["metrics_file"] is None:
        raise ConfigError("callbacks.metrics_file cannot be switched off: resuming reads metrics.jsonl. Drop the line.")
    wanted = {"metrics_file": {}, **{name: options for name, options in specs.items() if options is not None}}
    ordered = sorted(wanted, key=lambda name: name == "display")
    return [_build(name, wanted[name]) for name in ordered]


def whole_number(option: str, value: object, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise the ConfigError that names `option`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}={value!r} is not an option: it takes a whole number of at least {least}.")
    return value


def _build(name: str, options: object) -> Callback:
    cls = _load(name)
    if not isinstance(options, Mapping):
        raise ConfigError(f"callbacks.{name}={options!r} is not an option: give a mapping of options, {{}} or null.")
    allowed = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in allowed.values())
    for option in options:
        if option not in allowed and not takes_any:
            known = ", ".join(allowed) or "none"
            raise ConfigError(
                f"callbacks.{name}.{option} is not an option of {name}, which has: {known}.{suggest(option, allowed)}"
            )
    missing = [p.name for p in allowed.values() if _is_required(p) and p.name not in options]
    if missing:
        raise ConfigError(f"callbacks.{name} needs {', '.join(missing)}: set callbacks.{name}.{missing[0]}=...")
    return cls(**options)


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _load(name: str) -> type[Callback]:
    if name not in CALLBACKS and ":" not in name:
        raise unknown_option("callbacks", name, CALLBACKS)
    module_name, _, class_name = CALLBACKS.get(name, name).partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"callbacks.{name!r} cannot be imported ({error}): write it as package.module:Class."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise ConfigError(f"callbacks.{name!r} is not a callback: derive it from grpo_toolbox.callbacks.Callback.")
    return cls
