"""Options that come from a function's signature: `advantage.eps=1e-6` binds the keyword argument `eps`; torch-free."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from grpo_toolbox.config.source import HANDED_IN, class_fields, keyword_options, registry, schema_keys
from grpo_toolbox.errors import ConfigError, suggest, unknown_option
from grpo_toolbox.plugins import plug_in
from grpo_toolbox.rewards import COMMON, REWARDS, check_options
from grpo_toolbox.rewards.signatures import CONTRACT

REGISTRIES = {"advantage": ("advantages.py", "ADVANTAGES"), "objective": ("surrogates.py", "OBJECTIVES")}
"""Groups whose functions are pure maths, and where they are listed."""

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def resolve(group: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that `<group>.name` means: a name of `registry`, or `my_module:my_fn`."""
    return plug_in(group, name) if ":" in name else registry[_known(group, name, registry)]


def bind(group: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with `options` bound; an option it does not take is an error that lists the real ones."""
    _check_names(group, getattr(function, "__name__", "it"), options, _keyword_only(function))
    return partial(function, **options)


def check_named(group: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is not there, an option it does not take, or a value of the wrong type."""
    options = dict(values)
    name = options.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{group}.name={name!r}: set it to the name of a function, or to my_module:my_fn.")
    if group == "reward":
        _check_reward("reward", name, options)
        return
    takes = taken_options(group, name)
    _check_names(group, name, options, takes)
    _check_types(group, options, takes or {})


def taken_options(group: str, name: str) -> dict[str, str] | None:
    """Return the options of a group's function with their types as text; None where it takes any."""
    if group == "reward":
        return _reward_options(name)
    own = {}
    if group == "objective":  # beside its surrogate's
        own = {key: kind for key, kind, _, _ in class_fields("objectives.py", "Objective") if key != "surrogate"}
    if ":" in name:
        taken = _keyword_only(plug_in(group, name))
        return None if taken is None else own | taken
    file, listed = REGISTRIES[group]
    functions = registry(file, listed)
    return own | keyword_options(file, functions[_known(group, name, functions)])


def without_foreign(
    group: str, values: Mapping[str, Any], chosen: Collection[str], given: Collection[str], written: Collection[str]
) -> dict[str, Any]:
    """Return the options of a group without those that came along for another function than the one named.

    `chosen` are the keys that the group's option sets, `given` those of the command line, `written` those of the
    experiment's own file. Where the command line names the function (`reward=format`, `reward.name=my_module:my_fn`),
    whatever files set for another gives way. Elsewhere it is only what was neither given nor written and is an option
    of another function of the group. What is left and not taken is an error, later.
    """
    name = values.get("name")
    if not isinstance(name, str) or not name:
        return dict(values)
    takes = taken_options(group, name)
    renamed = f"{group}.name" in given or group in given
    explicit = given if renamed else {*given, *written}
    always = {"name", *(COMMON if group == "reward" else ())}
    others = {*chosen, *(key for other in _names(group) for key in taken_options(group, other) or ())}

    def stays(key: str) -> bool:
        if key in always or takes is None or key in takes or f"{group}.{key}" in explicit:
            return True
        return not renamed and key not in others

    return {key: value for key, value in values.items() if stays(key)}


def _names(group: str) -> Collection[str]:
    return REWARDS if group == "reward" else registry(*REGISTRIES[group])


def _known(group: str, name: str, names: Collection[str]) -> str:
    if name not in names:
        raise unknown_option(f"{group}.name", name, [*names, "my_module:my_fn"])
    return name


def _keyword_only(function: Callable[..., Any]) -> dict[str, str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {
        one.name: _annotation(one) for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in HANDED_IN
    }


def _reward_options(name: str) -> dict[str, str]:
    target = REWARDS[_known("reward", name, REWARDS)] if ":" not in name else check_options(name)
    plain_function = ":" in name and not inspect.isclass(target)
    return {
        one.name: _annotation(one)
        for one in inspect.signature(target).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        # what a plug-in asks for without a default is a data column
        and not (plain_function and (one.name in CONTRACT or one.default is one.empty))
    }


def _check_reward(where: str, name: str, options: dict[str, Any]) -> None:
    check_options(name, where=where, **options)
    common = {key: kind for key, kind, _, _ in schema_keys("RewardConfig")}
    _check_types(where, options, common | _reward_options(name))
    for index, part in enumerate(options["components"] if name == "weighted_sum" else ()):
        inner = {key: value for key, value in part.items() if key not in ("name", "weight")}
        _check_reward(f"{where}.components[{index}]", part["name"], inner)


def _annotation(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _check_names(group: str, name: str, options: Mapping[str, Any], takes: Mapping[str, str] | None) -> None:
    for key in options:
        if takes is not None and key not in takes:
            known = ", ".join(takes) or "none"
            raise ConfigError(f"{group}.{key} is not an option of {name}, which takes: {known}.{suggest(key, takes)}")


def _check_types(where: str, options: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for key, value in options.items():
        kind = kinds.get(key, "")
        literal = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", kind)
        if literal:
            choices = [word.strip().strip("'\"") for word in literal.group(1).split(",")]
            if value not in choices:
                raise unknown_option(f"{where}.{key}", value, choices)
        elif not _fits(value, kind.replace(" ", "").split("|")):
            words = " or ".join(_WORDS.get(part, part) for part in kind.split(" | ")).replace("None", "null")
            quote = " Quote it, as in key='\"5\"'." if "str" in kind else ""
            raise ConfigError(f"{where}.{key}={value!r} is not {words}.{quote}")


def _fits(value: object, kinds: Collection[str]) -> bool:
    """Whether a value from YAML is of one of the plain types; any other type is for the function to judge."""
    if not set(kinds) <= {"int", "float", "bool", "str", "None"}:
        return True
    if isinstance(value, bool) or value is None:
        return ("bool" if isinstance(value, bool) else "None") in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    return type(value).__name__ in kinds
