"""One named, weighted function of a reward, and what becomes of its failures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from grpo_toolbox.rewards.adaptive import AdaptiveWeight
from grpo_toolbox.rewards.signatures import Signature, is_async, read_signature, unwrapped
from grpo_toolbox.rewards.weights import Factor, TrainerState

RewardFunction = Callable[..., Any]
ON_ERROR = ("stop", "skip")
MAX_ERROR_RATE = 0.05
ERROR_WINDOW = 500


@dataclass
class Nature:
    """What calling a function has shown of it."""

    waits: bool = False
    """Whether it returned a coroutine."""


@dataclass(frozen=True)
class Component:
    """One function of a reward."""

    name: str
    weight: float
    function: RewardFunction
    on_error: str | None = None
    """What an exception does: `stop` the run, or `skip` (score None) the rows on which the function raises.

    None: skip where the function has the attribute `tolerant`, else stop.
    """
    timeout_s: float | None = None
    """Seconds that one call may take; one that takes longer has failed. None: any time."""
    max_error_rate: float | None = None
    """Share of a window of completions on which a tolerant function may fail before the run stops; None: 5%."""
    error_window: int | None = None
    """Completions in that window; None: 500."""
    factors: tuple[Factor, ...] = ()
    """What the weight is multiplied with where it moves: schedules, adaptive weights."""
    nature: Nature = field(default_factory=Nature, repr=False, compare=False)

    @functools.cached_property
    def signature(self) -> Signature:
        """Which keyword arguments the function takes."""
        return read_signature(self.function)

    @property
    def tolerant(self) -> bool:
        """Whether rows on which the function raises are left out and counted, and do not stop the run."""
        if self.on_error is not None:
            return self.on_error == "skip"
        return bool(getattr(unwrapped(self.function), "tolerant", False))

    @property
    def waits(self) -> bool:
        """Whether the function is known to return a coroutine."""
        return is_async(self.function) or self.nature.waits

    @property
    def window(self) -> int:
        """Completions in the window that failures are counted in."""
        return ERROR_WINDOW if self.error_window is None else self.error_window

    @property
    def error_rate(self) -> float:
        """Share of the window that may fail."""
        return MAX_ERROR_RATE if self.max_error_rate is None else self.max_error_rate

    @property
    def most_failures(self) -> int:
        """Failures that a window may hold."""
        return int(self.error_rate * self.window + 1e-9)

    def weight_at(self, state: TrainerState | None) -> float:
        """The weight for the completions of a step."""
        weight = self.weight
        for factor in self.factors:
            weight *= factor.at(state)
        return weight

    def settled_weight(self, max_steps: int) -> float:
        """The weight for evaluations."""
        weight = self.weight
        for factor in self.factors:
            weight *= factor.settled(max_steps)
        return weight

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: adaptive weights, the state of a function that has a `state_dict`."""
        weights = [factor.state_dict() if isinstance(factor, AdaptiveWeight) else None for factor in self.factors]
        keeper = _keeper(self.function)
        own = None if keeper is None else deepcopy(keeper.state_dict())
        return {"waits": self.nature.waits, "weights": weights, "function": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.nature.waits = state["waits"]
        saved = state["weights"] if len(state["weights"]) == len(self.factors) else [None] * len(self.factors)
        for factor, own in zip(self.factors, saved, strict=True):
            if isinstance(factor, AdaptiveWeight) and own is not None:
                factor.load_state_dict(own)
        keeper = _keeper(self.function)
        if keeper is not None and state["function"] is not None:
            keeper.load_state_dict(state["function"])


def asks_elsewhere(part: Component) -> bool:
    """Whether a component waits for something that is not known to be of this process, as judges do."""
    function = unwrapped(part.function)
    local = getattr(function, "offline", False) or getattr(function, "golds", None) is not None
    return getattr(function, "remote", is_async(part.function) and not local)


def _keeper(function: RewardFunction) -> Any:
    """Return the object, a function's own or the one it is a method of, that keeps a state for the checkpoint."""
    inner = unwrapped(function)
    for one in (inner, getattr(inner, "__self__", None)):
        own = all(hasattr(one, name) for name in ("state_dict", "load_state_dict"))
        if own and not hasattr(one, "named_parameters"):  # a torch module's weights are no state of the run
            return one
    return None
