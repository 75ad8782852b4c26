"""Weights that follow the success rate: raised while few completions succeed, lowered once most do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.signatures import function_name

if TYPE_CHECKING:
    from grpo_toolbox.rewards.weights import TrainerState


class AdaptiveWeight:
    """A weight that is multiplied with `up` after a step of little success, and with `down` after one of much.

    w ← w · up where the share of completions that score at least `success` is below `low`, w · down where it is above
    `high`, kept within [`lowest`, `highest`]. A step's weight depends on the steps before it alone.
    """

    def __init__(
        self,
        initial: float = 1.0,
        low: float = 0.3,
        high: float = 0.8,
        up: float = 1.2,
        down: float = 0.9,
        lowest: float = 0.1,
        highest: float = 10.0,
        success: float = 1.0,
    ) -> None:
        numbers = {"initial": initial, "low": low, "high": high, "up": up, "down": down}
        numbers |= {"lowest": lowest, "highest": highest, "success": success}
        for name, value in numbers.items():
            if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfigError(f"an adaptive weight's {name}={value!r} is not a finite number.")
        if not 0 <= low <= high <= 1 or not 0 < down <= 1 <= up or not 0 <= lowest <= initial <= highest:
            raise ConfigError(
                f"an adaptive weight needs 0 ≤ low={low} ≤ high={high} ≤ 1, 0 < down={down} ≤ 1 ≤ up={up} and"
                f" 0 ≤ lowest={lowest} ≤ initial={initial} ≤ highest={highest}."
            )
        self.initial, self.value = float(initial), float(initial)
        self.low, self.high, self.up, self.down = low, high, up, down
        self.lowest, self.highest, self.success = lowest, highest, success

    def adjust(self, success_rate: float) -> None:
        """Take in the share of completions that succeeded."""
        factor = self.up if success_rate < self.low else self.down if success_rate > self.high else 1.0
        self.value = min(max(self.value * factor, self.lowest), self.highest)

    def observe(self, scores: Iterable[float]) -> None:
        """Take in a step's scores; those that are NaN (not applicable) say nothing."""
        scored = [score for score in scores if not math.isnan(score)]
        if scored:
            self.adjust(sum(score >= self.success for score in scored) / len(scored))

    def at(self, state: TrainerState | None) -> float:
        """Return the weight as it is now."""
        return self.value

    def settled(self, max_steps: int) -> float:
        """Return the initial weight, which evaluations are made with."""
        return self.initial

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state."""
        self.value = state["value"]


class AdaptiveReward:
    """A reward function with an adaptive weight: it pays what `base_reward_func` pays, times `weight`.

    As a part of a run's reward its weight follows the success rate by itself, after every step, and is kept in the
    checkpoint; elsewhere call `adjust_weight(success_rate)`. `options` are those of `AdaptiveWeight`.
    """

    def __init__(self, base_reward_func: Callable[..., Any], initial_weight: float = 1.0, **options: float) -> None:
        bounds = {"lowest": min(0.1, initial_weight), "highest": max(10.0, initial_weight)}
        self.func = base_reward_func
        self.adaptive = AdaptiveWeight(initial_weight, **{**bounds, **options})
        self.__name__ = function_name(base_reward_func)
        self.__wrapped__ = base_reward_func  # whose signature this has

    @property
    def weight(self) -> float:
        """The weight as it is now."""
        return self.adaptive.value

    @weight.setter
    def weight(self, value: float) -> None:
        """Set the weight."""
        self.adaptive.value = float(value)

    def adjust_weight(self, success_rate: float) -> None:
        """Raise the weight where few completions succeed, lower it where most do."""
        self.adaptive.adjust(success_rate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's rewards times the weight; None stays None, a dict keeps its other keys."""
        rewards = self.func(*args, **kwargs)
        return self._awaited(rewards) if inspect.isawaitable(rewards) else [self._paid(one) for one in rewards]

    async def _awaited(self, rewards: Awaitable[Any]) -> list[Any]:
        return [self._paid(one) for one in await rewards]

    def _paid(self, reward: Any) -> Any:
        if isinstance(reward, Mapping):
            return {**reward, "score": self._paid(reward["score"])}
        return reward if reward is None or isinstance(reward, Exception) else reward * self.weight
