"""The reward as the run sees it: named, weighted functions that are called by keyword.

A reward function is any callable `f(prompts, completions, completion_ids, **columns)`, plain or async, that returns
one float or None per completion. It is passed only what its signature asks for; see docs/rewards.md.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from grpo_toolbox.errors import ConfigError, RewardError, suggest, unknown_option
from grpo_toolbox.rewards.calling import Outcome, Rows, call_components
from grpo_toolbox.rewards.signatures import CONTRACT, Signature, function_name, read_signature, unwrapped
from grpo_toolbox.rewards.values import FLOAT32_MAX

RewardFunction = Callable[..., Any]
ON_ERROR = ("stop", "skip")


@dataclass(frozen=True)
class TrainerState:
    """Where the run stands, for rewards that change with time."""

    step: int
    """The step that the completions belong to, counted from 1."""
    max_steps: int

    @property
    def global_step(self) -> int:
        """Optimizer steps finished so far, by the name that transformers uses."""
        return self.step - 1


@dataclass(frozen=True)
class Component:
    """One function of a reward."""

    name: str
    weight: float
    function: RewardFunction
    on_error: str = "stop"
    """What an exception does: `stop` the run, or `skip` (score None) the rows on which the function raises."""

    @cached_property
    def signature(self) -> Signature:
        """Which keyword arguments the function takes."""
        return read_signature(self.function)


@dataclass(frozen=True)
class Reward:
    """One or several weighted reward functions; itself a callable of the reward contract."""

    name: str
    components: tuple[Component, ...]

    def columns_needed(self) -> tuple[str, ...]:
        """The data columns without which some function cannot be called."""
        needed = (column for component in self.components for column in component.signature.columns)
        return tuple(dict.fromkeys(needed))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ConfigError where the data, which has `columns`, lacks one that a function needs."""
        for column in columns:
            if column in CONTRACT:
                raise ConfigError(f"data column {column!r} bears a name that rewards are passed anyway: rename it.")
        present = ", ".join(sorted(columns)) or "none"
        for component in self.components:
            for column in component.signature.columns:
                if column == "prompt":
                    raise ConfigError(f"reward {component.name!r} asks for 'prompt': rewards are passed 'prompts'.")
                if column not in columns:
                    advice = "Set data.columns.answer=<one>" if column == "answer" else "Name the parameter like one"
                    raise ConfigError(
                        f"reward {component.name!r} needs column {column!r}; the data has: {present}."
                        f"{suggest(column, columns)} {advice}."
                    )

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Let each function that has a `check_rows` refuse data it cannot score; called before a model is loaded."""
        for component in self.components:
            check = getattr(unwrapped(component.function), "check_rows", None)
            if check is not None:
                check(rows)

    def __call__(
        self,
        *,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], Any] | None = None,
        log_metric: Callable[[str, float], Any] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Score completions given as plain lists: the weighted sum per completion, None where no component applies.

        Only what the functions ask for has to be passed. Raises RewardError as `score_rollouts` does.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        rows = rows_from_lists({name: values for name, values in given.items() if values is not None}, trainer_state)
        outcomes = call_components(self.components, rows)
        if log_extra is not None:
            for name, column in self.extras(outcomes).items():
                log_extra(name, list(column))
        if log_metric is not None:
            for name, value in self.metrics(outcomes).items():
                log_metric(name, value)
        per_row = zip(*(outcome.scores for outcome in outcomes), strict=True)
        return [self.total(scores, rows.place(index)) for index, scores in enumerate(per_row)]

    def total(self, scores: Sequence[float | None], place: str) -> float | None:
        """Weighted sum over the components that apply to one completion; None where none does."""
        applicable = [
            component.weight * score
            for component, score in zip(self.components, scores, strict=True)
            if score is not None
        ]
        total = sum(applicable) if applicable else None
        if total is not None and not abs(total) <= FLOAT32_MAX:
            raise RewardError(
                f"the weighted sum of reward {self.name!r} for {place} is {total}, which overflows float32:"
                " lower the weights."
            )
        return total

    def extras(self, outcomes: Sequence[Outcome]) -> dict[str, Sequence[Any]]:
        """The extra columns of all components; a name that two logged is prefixed with the later one's name."""
        merged: dict[str, Sequence[Any]] = {}
        for component, outcome in zip(self.components, outcomes, strict=True):
            for name, column in outcome.extras.items():
                merged[f"{component.name}/{name}" if name in merged else name] = column
        return merged

    def metrics(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """The mean of what was logged under each name, by the functions that own the name where some do."""
        logged: dict[str, list[float]] = {}
        owned: dict[str, list[float]] = {}
        for component, outcome in zip(self.components, outcomes, strict=True):
            owns = getattr(unwrapped(component.function), "owned_metrics", ())
            for name, values in outcome.metrics.items():
                logged.setdefault(name, []).extend(values)
                if name in owns:
                    owned.setdefault(name, []).extend(values)
        return {name: sum(values) / len(values) for name, values in {**logged, **owned}.items()}


def combine(
    functions: Sequence[RewardFunction],
    weights: Sequence[float] | None = None,
    on_error: str = "stop",
    name: str = "",
) -> Reward:
    """Make one reward of several functions (or rewards, whose components are taken over); every weight defaults to 1.

    A name that comes twice gets the suffix `_2`. ConfigError where weights and functions differ in number.
    """
    functions = list(functions)
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if not functions:
        raise ConfigError("a reward needs at least one function, and was given none.")
    if on_error not in ON_ERROR:
        raise unknown_option("reward.on_error", on_error, ON_ERROR)
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"reward function {function!r} is not callable: pass a function or use build_reward(name)."
            )
    if len(weights) != len(functions):
        names = ", ".join(_name(function) for function in functions)
        raise ConfigError(
            f"{len(functions)} reward functions but {len(weights)} weights: give one weight per function ({names})."
        )
    components: list[Component] = []
    for function, weight in zip(functions, weights, strict=True):
        for component in _components(function, _weight(function, weight), on_error):
            taken = {other.name for other in components}
            components.append(replace(component, name=_free_name(component.name, taken)))
    for component in components:
        component.signature  # noqa: B018 - an unreadable signature is an error here, not at the first step
    return Reward(name or "+".join(component.name for component in components), tuple(components))


def rows_from_lists(inputs: dict[str, Sequence[Any]], trainer_state: Any = None) -> Rows:
    """Wrap equally long lists; RewardError names the list whose length differs from the others'."""
    if not inputs:
        raise RewardError(
            "a reward was called without prompts, completions or columns: pass at least completions=[...]."
        )
    leading = "completions" if "completions" in inputs else next(iter(inputs))
    size = len(inputs[leading])
    for name, values in inputs.items():
        if isinstance(values, str) or len(values) != size:
            raise RewardError(f"{name} must be a list of one entry per completion ({size}), but is {values!r:.80}.")
    return Rows(inputs, size, trainer_state)


def _components(function: RewardFunction, weight: float, on_error: str) -> tuple[Component, ...]:
    if isinstance(function, Reward):
        return tuple(replace(component, weight=weight * component.weight) for component in function.components)
    return (Component(function_name(function), weight, function, on_error),)


def _name(function: RewardFunction) -> str:
    return function.name if isinstance(function, Reward) else function_name(function)


def _weight(function: RewardFunction, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ConfigError(f"weight {weight!r} of reward {_name(function)!r} is not a finite number, such as 0.5.")
    return float(weight)


def _free_name(name: str, taken: Collection[str]) -> str:
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
