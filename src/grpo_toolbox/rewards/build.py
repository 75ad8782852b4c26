"""From a name and options to a reward; torch and httpx are loaded only by the members that use them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest, unknown_option
from grpo_toolbox.plugins import plug_in
from grpo_toolbox.rewards.code import code, hack_monitor
from grpo_toolbox.rewards.component import ON_ERROR, Component, RewardFunction
from grpo_toolbox.rewards.contract import Reward, combine
from grpo_toolbox.rewards.duplicates import duplicate_penalty
from grpo_toolbox.rewards.exact import exact_match
from grpo_toolbox.rewards.formats import format_reward
from grpo_toolbox.rewards.heldout import ON_HACKING, HeldOut
from grpo_toolbox.rewards.judge import llm_judge
from grpo_toolbox.rewards.language import language_consistency
from grpo_toolbox.rewards.length import cosine_length, length_penalty, soft_overlong, token_cost
from grpo_toolbox.rewards.maths import math_reward
from grpo_toolbox.rewards.model import reward_model
from grpo_toolbox.rewards.numeric import numeric
from grpo_toolbox.rewards.repetition import repetition_penalty
from grpo_toolbox.rewards.schema import json_schema
from grpo_toolbox.rewards.signatures import CONTRACT, function_name
from grpo_toolbox.rewards.weights import read_weight


def weighted_sum(components: Sequence[Mapping[str, Any]]) -> Reward:
    """The weighted sum of other rewards: each component is `{name: ..., weight: 1.0, **options}`."""
    rewards = []
    for index, component in enumerate(components):
        options = {key: value for key, value in component.items() if key != "weight"}
        rewards.append(build_reward(where=f"reward.components[{index}]", **options))
    return combine(rewards, [component.get("weight", 1.0) for component in components], name="weighted_sum")


REWARDS: dict[str, Callable[..., RewardFunction | Reward]] = {
    "exact_match": exact_match,
    "math": math_reward,
    "numeric": numeric,
    "format": format_reward,
    "json_schema": json_schema,
    "length_penalty": length_penalty,
    "soft_overlong": soft_overlong,
    "token_cost": token_cost,
    "cosine_length": cosine_length,
    "repetition_penalty": repetition_penalty,
    "duplicate_penalty": duplicate_penalty,
    "language_consistency": language_consistency,
    "code": code,
    "hack_monitor": hack_monitor,
    "weighted_sum": weighted_sum,
    "reward_model": reward_model,
    "llm_judge": llm_judge,
}
"""Builders by name: a builder's signature is the list of its options."""


FAILURES = ("on_error", "timeout_s", "max_error_rate", "error_window")
"""Settings of every reward, and of every part of a sum: how long a call may take, what becomes of failures."""
HELD_OUT = ("heldout", "heldout_share", "heldout_window", "on_hacking")
"""Settings of a run's reward alone: what it is checked against."""
COMMON = (*FAILURES, *HELD_OUT)


def build_reward(name: str, *, where: str = "reward", **options: Any) -> Reward:
    """Build the reward `name` of REWARDS, or the user's own function `my_module:my_fn`, with its options.

    Beside its own options every reward takes those of COMMON. `on_error` says what a failure of the function does:
    `stop` the run, or `skip` (and count) the rows; None: as the function itself has it. `timeout_s` says how long a
    call may take, `max_error_rate` on which share of `error_window` completions a tolerant function may fail.
    `heldout` is a second reward (a name, or a mapping with `name`) that is never trained on. `where` is how error
    messages call this part of the configuration.
    ConfigError for an unknown name, an unknown or missing option, or a function that cannot be imported.
    """
    target = check_options(name, where=where, **options)
    own = {key: value for key, value in options.items() if key not in COMMON}
    if ":" in name and not inspect.isclass(target):
        built: RewardFunction | Reward = functools.partial(target, **own) if own else target
    else:
        built = target(**own)
    if not isinstance(built, Reward):
        label = function_name(target) if ":" in name else name
        one = combine([built])
        built = Reward(label, (replace(one.components[0], name=label),))
    failures = {key: value for key, value in options.items() if key in FAILURES}
    return replace(with_failures(built, failures), heldout=_heldout(options, where))


def with_failures(reward: Reward, settings: Mapping[str, Any]) -> Reward:
    """Return a reward whose parts do with failures what `settings` (keys of FAILURES) say, where they do not."""
    return replace(reward, components=tuple(_with_settings(part, settings) for part in reward.components))


def _with_settings(part: Component, settings: Mapping[str, Any]) -> Component:
    """Give a component what it has not set for itself."""
    return replace(part, **{key: value for key, value in settings.items() if getattr(part, key) is None})


def _heldout(options: Mapping[str, Any], where: str) -> HeldOut | None:
    named = named_reward(options.get("heldout"), f"{where}.heldout")
    if named is None:
        return None
    settings = {"share": "heldout_share", "window": "heldout_window", "on_hacking": "on_hacking"}
    given = {field: options[key] for field, key in settings.items() if key in options}
    reward = build_reward(where=f"{where}.heldout", **named)
    # told apart from the parts of the training reward in counts and messages
    parts = tuple(replace(part, name=f"heldout/{part.name}") for part in reward.components)
    return HeldOut(replace(reward, components=parts), **given)


def named_reward(heldout: Any, where: str) -> dict[str, Any] | None:
    """Read what a held-out reward is called and its options, from a name or a mapping with one; None for none."""
    if heldout is None:
        return None
    named = {"name": heldout} if isinstance(heldout, str) else heldout
    if not isinstance(named, Mapping) or named.get("name") is None:
        raise ConfigError(f"{where}={heldout!r} names no reward: write a name, or {{name: exact_match, ...}}.")
    return {str(key): value for key, value in named.items()}


def check_options(name: str, *, where: str = "reward", **options: Any) -> Callable[..., Any]:
    """Check name and options without building anything, and return what would be called with them."""
    _check_common(where, {key: value for key, value in options.items() if key in COMMON})
    options = {key: value for key, value in options.items() if key not in COMMON}
    if not isinstance(name, str) or (name not in REWARDS and ":" not in name):
        raise unknown_option(f"{where}.name", name, [*REWARDS, "my_module:my_fn"])
    target = plug_in(where, name) if ":" in name else REWARDS[name]
    is_function = ":" in name and not inspect.isclass(target)
    parameters = [
        parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and not (is_function and parameter.name in CONTRACT)
    ]
    known = [parameter.name for parameter in parameters]
    for key in options:
        if key not in known:
            listed = ", ".join(known) or "it has none"
            raise ConfigError(f"{where}.{key} is not an option of {name}: {listed}.{suggest(key, known)}")
    if not is_function:  # a plug-in's parameters without default are data columns
        missing = [p.name for p in parameters if p.default is p.empty and options.get(p.name) in (None, "???")]
        if missing:
            raise ConfigError(f"{where}.name={name} needs {where}.{missing[0]}: set {where}.{missing[0]}=...")
    if name == "weighted_sum":
        _check_parts(options["components"], where)
    return target


def _check_parts(components: Any, where: str) -> None:
    if isinstance(components, str) or not isinstance(components, Sequence) or not components:
        raise ConfigError(f"{where}.components must be a list such as [{{name: exact_match, weight: 1.0}}].")
    for index, component in enumerate(components):
        part = f"{where}.components[{index}]"
        if not isinstance(component, Mapping) or "name" not in component:
            raise ConfigError(f"{part} has no name: write {{name: exact_match, weight: 1.0}}.")
        for key in HELD_OUT:
            if key in component:
                raise ConfigError(f"{part}.{key} is a setting of the whole reward: set reward.{key}.")
        options = {key: value for key, value in component.items() if key != "weight"}
        check_options(where=part, **options)
        read_weight(component.get("weight", 1.0), component["name"], f"{part}.weight")


def _check_common(where: str, settings: Mapping[str, Any]) -> None:
    on_error = settings.get("on_error")
    if on_error not in (None, *ON_ERROR):
        raise unknown_option(f"{where}.on_error", on_error, ON_ERROR)
    limits = {
        "timeout_s": (lambda value: value > 0, "seconds above 0, or null for any time"),
        "max_error_rate": (lambda value: 0 <= value <= 1, "a share from 0 to 1"),
        "error_window": (lambda value: value >= 1 and value == int(value), "a whole number from 1 on"),
        "heldout_share": (lambda value: 0 < value <= 1, "a share above 0 and at most 1"),
        "heldout_window": (lambda value: value >= 4 and value == int(value), "a whole number from 4 on"),
    }
    for key, (fits, words) in limits.items():
        value = settings.get(key)
        if value is None and (key not in settings or key == "timeout_s"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
            raise ConfigError(f"{where}.{key}={value!r} is not {words}.")
    on_hacking = settings.get("on_hacking", "warn")
    if on_hacking not in ON_HACKING:
        raise unknown_option(f"{where}.on_hacking", on_hacking, ON_HACKING)
    named = named_reward(settings.get("heldout"), f"{where}.heldout")
    if named is not None:
        for key in HELD_OUT:
            if key in named:
                raise ConfigError(f"{where}.heldout.{key} has no place inside: set {where}.{key}.")
        check_options(where=f"{where}.heldout", **named)
