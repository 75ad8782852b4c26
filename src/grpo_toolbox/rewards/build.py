"""From a name and options to a reward; torch and httpx are loaded only by the members that use them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest, unknown_option
from grpo_toolbox.plugins import plug_in
from grpo_toolbox.rewards.contract import ON_ERROR, Component, Reward, RewardFunction, combine
from grpo_toolbox.rewards.exact import exact_match
from grpo_toolbox.rewards.formats import format_reward
from grpo_toolbox.rewards.judge import llm_judge
from grpo_toolbox.rewards.length import length_penalty
from grpo_toolbox.rewards.model import reward_model
from grpo_toolbox.rewards.signatures import CONTRACT, function_name


def weighted_sum(components: Sequence[Mapping[str, Any]]) -> Reward:
    """The weighted sum of other rewards: each component is `{name: ..., weight: 1.0, on_error: stop, **options}`."""
    rewards = []
    for index, component in enumerate(components):
        options = {key: value for key, value in component.items() if key != "weight"}
        rewards.append(build_reward(where=f"reward.components[{index}]", **options))
    return combine(rewards, [component.get("weight", 1.0) for component in components], name="weighted_sum")


REWARDS: dict[str, Callable[..., RewardFunction | Reward]] = {
    "exact_match": exact_match,
    "format": format_reward,
    "length_penalty": length_penalty,
    "weighted_sum": weighted_sum,
    "reward_model": reward_model,
    "llm_judge": llm_judge,
}
"""Builders by name: a builder's signature is the list of its options."""


def build_reward(name: str, *, on_error: str = "stop", where: str = "reward", **options: Any) -> Reward:
    """Build the reward `name` of REWARDS, or the user's own function `my_module:my_fn`, with its options.

    `on_error` says what an exception of the function does: `stop` the run, or `skip` (and count) the rows on which it
    raises. `where` is how error messages call this part of the configuration. ConfigError for an unknown name, an
    unknown or missing option, or a function that cannot be imported.
    """
    target = check_options(name, on_error=on_error, where=where, **options)
    if ":" in name and not inspect.isclass(target):
        built: RewardFunction | Reward = functools.partial(target, **options) if options else target
    else:
        built = target(**options)
    if not isinstance(built, Reward):
        label = function_name(target) if ":" in name else name
        built = Reward(label, (Component(label, 1.0, built, on_error),))
        _ = built.columns_needed()  # an unreadable signature is an error here, not at the first step
    elif on_error == "skip":
        built = replace(built, components=tuple(replace(part, on_error="skip") for part in built.components))
    return built


def check_options(name: str, *, on_error: str = "stop", where: str = "reward", **options: Any) -> Callable[..., Any]:
    """Check name and options without building anything, and return what would be called with them."""
    if on_error not in ON_ERROR:
        raise unknown_option(f"{where}.on_error", on_error, ON_ERROR)
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
        options = {key: value for key, value in component.items() if key != "weight"}
        check_options(where=part, **options)
