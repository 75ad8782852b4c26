"""The reward as the run sees it: named, weighted functions that are called by keyword.

A reward function is any callable `f(prompts, completions, completion_ids, **columns)`, plain or async, that returns
one float or None per completion. It is passed only what its signature asks for; see docs/rewards.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, RewardError, suggest, unknown_option
from grpo_toolbox.rewards.adaptive import AdaptiveReward, AdaptiveWeight
from grpo_toolbox.rewards.calling import Batch, Rows, check_given
from grpo_toolbox.rewards.component import ON_ERROR, Component, RewardFunction
from grpo_toolbox.rewards.outcomes import Outcome
from grpo_toolbox.rewards.signatures import CONTRACT, function_name, unwrapped
from grpo_toolbox.rewards.values import FLOAT32_MAX
from grpo_toolbox.rewards.weights import TrainerState, read_weight

if TYPE_CHECKING:
    from grpo_toolbox.rewards.heldout import HeldOut

TOTAL = "_total"
"""How the names of metrics end that add up over calls, components and the parts of a step."""


@dataclass(frozen=True)
class Reward:
    """One or several weighted reward functions; itself a callable of the reward contract."""

    name: str
    components: tuple[Component, ...]
    heldout: HeldOut | None = None
    """A verifier that a sample of the rollouts is scored with beside, and that is never trained on."""

    def at(self, state: TrainerState | None) -> Reward:
        """This reward with the weights of one step, as fixed numbers."""
        return self._with_weights([part.weight_at(state) for part in self.components])

    def settled(self, max_steps: int) -> Reward:
        """This reward with the weights of evaluations: those of the last step, and the initial adaptive ones."""
        return self._with_weights([part.settled_weight(max_steps) for part in self.components])

    def _with_weights(self, weights: Sequence[float]) -> Reward:
        parts = [
            replace(part, weight=weight, factors=()) for part, weight in zip(self.components, weights, strict=True)
        ]
        return replace(self, components=tuple(parts))

    def moving_weights(self, state: TrainerState | None) -> dict[str, float]:
        """The metrics `rewards/<name>/weight` of the components whose weight moves."""
        return {f"rewards/{part.name}/weight": part.weight_at(state) for part in self.components if part.factors}

    def observe(self, scores: Sequence[Sequence[float]]) -> None:
        """Let adaptive weights see a step's scores (R lists, NaN where a component does not apply)."""
        for part, own in zip(self.components, scores, strict=True):
            for factor in part.factors:
                if isinstance(factor, AdaptiveWeight):
                    factor.observe(own)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: adaptive weights, and the state of functions that have a `state_dict`."""
        return {part.name: part.state_dict() for part in self._all_components()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; a component that is new with the resume starts afresh."""
        for part in self._all_components():
            if part.name in state:
                part.load_state_dict(state[part.name])

    def columns_needed(self) -> tuple[str, ...]:
        """The data columns without which some function cannot be called."""
        needed = (column for component in self._all_components() for column in component.signature.columns)
        return tuple(dict.fromkeys(needed))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ConfigError where the data, which has `columns`, lacks one that a function needs."""
        for column in columns:
            if column in CONTRACT:
                raise ConfigError(f"data column {column!r} bears a name that rewards are passed anyway: rename it.")
        present = ", ".join(sorted(columns)) or "none"
        for component in self._all_components():
            if "environments" in component.signature.required:
                raise ConfigError(
                    f"reward {component.name!r} asks for 'environments', and this run has none: give the parameter a"
                    " default, environments=None."
                )
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
        for component in self._all_components():
            check = getattr(unwrapped(component.function), "check_rows", None)
            if check is not None:
                check(rows)

    def _all_components(self) -> tuple[Component, ...]:
        return self.components if self.heldout is None else (*self.components, *self.heldout.reward.components)

    def __call__(
        self,
        *,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], Any] | None = None,
        log_metric: Callable[[str, float], Any] | None = None,
        environments: Sequence[Any] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Score completions given as plain lists: the weighted sum per completion, None where no component applies.

        Only what the functions ask for has to be passed. Raises RewardError as `score_rollouts` does.
        """
        logs: dict[str, Any] = {"log_extra": log_extra, "log_metric": log_metric, "trainer_state": trainer_state}
        given: dict[str, Any] = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        given |= columns
        verdicts = self.verdicts(**given, environments=environments, **logs)
        return [None if isinstance(one, Exception) else one for one in verdicts]

    def verdicts(
        self,
        *,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], Any] | None = None,
        log_metric: Callable[[str, float], Any] | None = None,
        **given: Sequence[Any] | None,
    ) -> list[float | Exception | None]:
        """As a call, but where no component applies because one failed, its failure stands in the row's place."""
        rows = rows_from_lists({name: values for name, values in given.items() if values is not None}, trainer_state)
        check_given(self.components, rows)
        with Batch(self.components) as batch:
            batch.add(rows)
            outcomes = batch.outcomes(rows)
        if log_extra is not None:
            for name, column in self.extras(outcomes).items():
                log_extra(name, list(column))
        if log_metric is not None:
            for name, value in self.metrics(outcomes).items():
                log_metric(name, value)
        per_row = zip(*(outcome.scores for outcome in outcomes), strict=True)
        weighted = self.at(trainer_state)
        totals = [weighted.total(scores, rows.place(index)) for index, scores in enumerate(per_row)]
        failed = {row: error for outcome in outcomes for row, error in outcome.failures.items()}
        return [failed.get(row) if total is None else total for row, total in enumerate(totals)]

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
        """The mean (of names in `_total` the sum) of what was logged, by functions that own a name where some do."""
        logged: dict[str, list[float]] = {}
        owned: dict[str, list[float]] = {}
        for component, outcome in zip(self.components, outcomes, strict=True):
            owns = getattr(unwrapped(component.function), "owned_metrics", ())
            for name, values in outcome.metrics.items():
                logged.setdefault(name, []).extend(values)
                if name in owns:
                    owned.setdefault(name, []).extend(values)
        return {
            name: sum(values) / (1 if name.endswith(TOTAL) else len(values))
            for name, values in {**logged, **owned}.items()
        }


def combine(
    functions: Sequence[RewardFunction],
    weights: Sequence[Any] | None = None,
    on_error: str | None = None,
    name: str = "",
) -> Reward:
    """Make one reward of several functions (or rewards, whose components are taken over); every weight defaults to 1.

    A weight is a number, or moves: `{0: 1.0, 200: 0.2}`, a function of the step, an `AdaptiveWeight`. `on_error` holds
    for the functions that have none of their own; None leaves it to each. A name that comes twice gets the suffix `_2`.
    ConfigError where weights and functions differ in number.
    """
    functions = list(functions)
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if not functions:
        raise ConfigError("a reward needs at least one function, and was given none.")
    if on_error not in (None, *ON_ERROR):
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
        for component in _components(function, weight, on_error):
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


def _components(function: RewardFunction, weight: Any, on_error: str | None) -> tuple[Component, ...]:
    fixed, factors = read_weight(weight, _name(function))
    inner = unwrapped(function)
    if isinstance(inner, AdaptiveReward):  # here its weight is the component's, so that the scores stay as they are
        bound = function.keywords if isinstance(function, functools.partial) else {}
        function = functools.partial(inner.func, **bound) if bound else inner.func
        factors = (*factors, inner.adaptive)
    if isinstance(function, Reward):
        return tuple(
            replace(
                part,
                weight=fixed * part.weight,
                factors=(*factors, *part.factors),
                on_error=on_error if part.on_error is None else part.on_error,
            )
            for part in function.components
        )
    return (Component(function_name(function), fixed, function, on_error, factors=factors),)


def _name(function: RewardFunction) -> str:
    return function.name if isinstance(function, Reward) else function_name(function)


def _free_name(name: str, taken: Collection[str]) -> str:
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
