"""Weights that change with the step: points of a line or of a staircase, or a function of the step."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from grpo_toolbox.errors import ConfigError, RewardError, unknown_option
from grpo_toolbox.plugins import plug_in
from grpo_toolbox.rewards.adaptive import AdaptiveWeight

SHAPES = ("linear", "step")


@dataclass(frozen=True)
class TrainerState:
    """Where the run stands, for rewards that change with time."""

    step: int
    """The step that the completions belong to, counted from 1; in an evaluation the one that comes next."""
    max_steps: int
    evaluating: bool = False
    """Whether the completions are of an evaluation, and not trained on."""

    @property
    def global_step(self) -> int:
        """Optimizer steps finished so far, by the name that transformers uses."""
        return self.step - 1


class Factor(Protocol):
    """What a component's weight is multiplied with."""

    def at(self, state: TrainerState | None) -> float:
        """Return the factor for the completions of a step; without a state, as it is at last, or now."""
        ...

    def settled(self, max_steps: int) -> float:
        """Return the factor for evaluations: one number for the whole run, so that they can be compared."""
        ...


@dataclass(frozen=True)
class WeightSchedule:
    """A weight by points (step, weight): straight lines between them, or stairs; constant outside of them."""

    points: tuple[tuple[float, float], ...]
    """Sorted by step."""
    shape: str = "linear"
    """`linear`, or `step`: from each point on its weight."""

    def at(self, state: TrainerState | None) -> float:
        """Return the weight at a step; without a state the last one."""
        if state is None:
            return self.points[-1][1]
        steps = [step for step, _ in self.points]
        after = bisect_right(steps, state.step)
        if after == 0:
            return self.points[0][1]
        (start, low) = self.points[after - 1]
        if after == len(self.points) or self.shape == "step":
            return low
        (end, high) = self.points[after]
        return low + (high - low) * (state.step - start) / (end - start)

    def settled(self, max_steps: int) -> float:
        """Return the weight of the last step."""
        return self.at(_last(max_steps))


@dataclass(frozen=True)
class WeightFunction:
    """A weight by a function of the step (from 1); one that names its parameter `trainer_state` is passed that."""

    function: Callable[..., float]

    def at(self, state: TrainerState | None) -> float:
        """Return the weight at a step; RewardError where it is no finite number."""
        if state is None:
            raise RewardError(f"the weight {self.name} is a function of the step: pass trainer_state=.")
        wants_state = "trainer_state" in inspect.signature(self.function).parameters
        weight = self.function(trainer_state=state) if wants_state else self.function(state.step)
        if not _is_number(weight):
            raise RewardError(f"the weight {self.name} is {weight!r} at step {state.step}, which is no finite number.")
        return float(weight)

    def settled(self, max_steps: int) -> float:
        """Return the weight of the last step."""
        return self.at(_last(max_steps))

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return repr(getattr(self.function, "__name__", type(self.function).__name__))


def read_weight(weight: Any, whose: str, where: str = "weight") -> tuple[float, tuple[Factor, ...]]:
    """Read a weight as a fixed number and factors that move.

    Taken are a number; `{0: 1.0, 200: 0.2}`, weights by step, with `shape: step` for stairs; `{name: adaptive,
    **options}`; a function of the step, also as `my_module:my_fn`. ConfigError for anything else.
    """
    if _is_number(weight):
        return float(weight), ()
    if isinstance(weight, Mapping):
        return 1.0, (_adaptive(weight, where) if "name" in weight else _schedule(weight, where),)
    if isinstance(weight, str) and ":" in weight:
        return 1.0, (WeightFunction(plug_in(where, weight)),)
    if hasattr(weight, "at") and hasattr(weight, "settled"):
        return 1.0, (weight,)
    if callable(weight):
        return 1.0, (WeightFunction(weight),)
    raise ConfigError(
        f"weight {weight!r} of reward {whose!r} is not a finite number, such as 0.5, nor weights by step, such as"
        " {0: 1.0, 200: 0.2}, nor a function of the step."
    )


def _schedule(weight: Mapping[Any, Any], where: str) -> WeightSchedule:
    shape = weight.get("shape", "linear")
    if shape not in SHAPES:
        raise unknown_option(f"{where}.shape", shape, SHAPES)
    points = {step: value for step, value in weight.items() if step != "shape"}
    for step, value in points.items():
        if not _is_number(step) or step < 0 or not _is_number(value):
            raise ConfigError(
                f"{where} has {step!r}: {value!r}, which is no weight at a step: write steps from 0 on and finite"
                " numbers, as in {0: 1.0, 200: 0.2}."
            )
    if not points:
        raise ConfigError(f"{where} has no points: write weights by step, as in {{0: 1.0, 200: 0.2}}.")
    return WeightSchedule(tuple(sorted((float(step), float(value)) for step, value in points.items())), shape)


def _adaptive(weight: Mapping[Any, Any], where: str) -> AdaptiveWeight:
    options = {str(key): value for key, value in weight.items() if key != "name"}
    if weight["name"] != "adaptive":
        raise unknown_option(f"{where}.name", weight["name"], ["adaptive"])
    known = list(inspect.signature(AdaptiveWeight).parameters)
    for key, value in options.items():
        if key not in known:
            raise unknown_option(f"{where}: {key}", value, known)
    return AdaptiveWeight(**options)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _last(max_steps: int) -> TrainerState:
    return TrainerState(max_steps, max_steps, evaluating=True)
