"""A verifier that is never trained on, and a test of whether the training reward has parted from it.

Each step, some completions of every group are scored by both. Let aₜ and hₜ be the step's mean training reward and mean
held-out score over them, and s_a and s_h the standard deviations of single completions over the last 2·W steps (within
steps and between them). Between the older W steps and the newer W, with Δ the difference of means and SE its standard
error from the spread of steps (Welch, 1947):

    the training reward rises      z_train = Δa / SE(a)                            > 3
    the held-out score lags        z_lag   = Δd / SE(d),  dₜ = aₜ/(2·s_a) − hₜ/s_h  > 3
    and does not itself rise       z_held  = Δh / SE(h)                            < 2

Where all three hold, hacking is suspected. z_lag asks whether the held-out score has gained less than half as much as
the training reward, each in units of its own spread; that it takes differences of the same completions removes what
both share. A held-out score that is the same on every completion lags by definition, unless it stands at its highest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from grpo_toolbox.errors import ConfigError, RewardError, unknown_option
from grpo_toolbox.rewards.budget import ErrorBudget
from grpo_toolbox.rewards.contract import Reward, TrainerState
from grpo_toolbox.rewards.scoring import Scoring
from grpo_toolbox.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ON_HACKING = ("warn", "stop")
RISES = 3.0
"""Standard errors above which the training reward rises and the held-out score lags."""
ROSE = 2.0
"""Standard errors above which the held-out score rises itself."""
_LARGEST = 99.0
"""Metrics are finite: a difference without any spread counts this many standard errors."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out verifier, and what is done with it."""

    reward: Reward
    share: float = 0.25
    """Of each group's completions that are scored by it; at least one is."""
    window: int = 20
    """W: steps in each of the two windows that are compared."""
    on_hacking: str = "warn"
    """What a suspicion does: `warn`, or `stop` the run."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"reward.heldout_share={self.share} must be above 0 and at most 1.")
        if self.window < 4:
            raise ConfigError(f"reward.heldout_window={self.window} must be at least 4 steps: fewer have no spread.")
        if self.on_hacking not in ON_HACKING:
            raise unknown_option("reward.on_hacking", self.on_hacking, ON_HACKING)

    def per_group(self, group_size: int) -> int:
        """Return how many completions of a group are scored: the first ones, as good as any others."""
        return max(1, min(group_size, round(self.share * group_size)))


@dataclass(frozen=True)
class Checked:
    """What the held-out verifier said about some completions of a step."""

    pairs: Sequence[tuple[float, float]] = ()
    """(training reward, held-out score) of each completion that both apply to."""
    errors: float = 0.0
    """Completions on which it failed."""
    seconds: float = 0.0


@dataclass(frozen=True)
class StepMeans:
    """What both said about the same completions of one step: means, and variances over completions."""

    train: float
    heldout: float
    train_variance: float
    heldout_variance: float


class HeldOutScoring:
    """A batch being scored by the held-out verifier while its groups come in; without one, nothing happens."""

    def __init__(
        self, heldout: HeldOut | None, group_size: int, state: TrainerState | None, budget: ErrorBudget | None = None
    ) -> None:
        self._taken = 0 if heldout is None else heldout.per_group(group_size)
        self._scoring = None if heldout is None else Scoring(heldout.reward, self._taken, state, budget)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scoring is not None:
            self._scoring.__exit__(kind, error, trace)

    def add(self, group: int, rollouts: Sequence[Rollout]) -> None:
        """Take in the rollouts of group number `group`."""
        if self._scoring is not None:
            self._scoring.add(group * self._taken, rollouts[: self._taken])

    def checked(self, total: Tensor) -> Checked:
        """Finish; `total` (P, G) are the training rewards of the batch."""
        if self._scoring is None:
            return Checked()
        scores = self._scoring.scores()
        both = zip(total[:, : self._taken].flatten().tolist(), scores.total.flatten().tolist(), strict=True)
        seconds = sum(scores.metrics[f"time/{name}"] for name in scores.names)
        pairs = [pair for pair in both if not any(map(math.isnan, pair))]
        return Checked(pairs, scores.metrics["reward_errors"], seconds)


class Divergence:
    """The comparison of both over the run; its state belongs into the checkpoint."""

    def __init__(self, heldout: HeldOut) -> None:
        self._heldout = heldout
        self._steps: list[StepMeans] = []
        self._lowest, self._highest = math.inf, -math.inf
        self._suspected = False

    def observe(self, parts: Sequence[Checked]) -> dict[str, float]:
        """Take in what a step's batches gave and return its metrics; where hacking is suspected, warn once, or stop."""
        metrics = {
            "heldout/errors": sum(part.errors for part in parts),
            "time/heldout": sum(part.seconds for part in parts),
        }
        pairs = [pair for part in parts for pair in part.pairs]
        if not pairs:
            return metrics
        train, held = ([pair[side] for pair in pairs] for side in (0, 1))
        self._steps.append(StepMeans(_mean(train), _mean(held), _variance(train), _variance(held)))
        self._steps = self._steps[-2 * self._heldout.window :]
        self._lowest, self._highest = min(self._lowest, *held), max(self._highest, *held)
        metrics |= {"heldout/score": _mean(held), "heldout/train_reward": _mean(train)}
        return metrics | (self._judge() if len(self._steps) == 2 * self._heldout.window else {})

    def _judge(self) -> dict[str, float]:
        z_train, z_lag, z_held = divergence(self._steps)
        saturated = self._steps[-1].heldout == self._highest > self._lowest
        suspected = z_train > RISES and z_lag > RISES and z_held < ROSE and not (z_held == 0 and saturated)
        if suspected and not self._suspected:
            self._say()
        self._suspected = suspected
        return {
            "heldout/z_train": z_train,
            "heldout/z_lag": z_lag,
            "heldout/z_score": z_held,
            "heldout/suspected": float(suspected),
        }

    def _say(self) -> None:
        window = self._heldout.window
        old, new = self._steps[:window], self._steps[window:]
        message = (
            f"suspected reward hacking: between the last {window} steps and the {window} before, the training reward"
            f" rose from {_mean([one.train for one in old]):.3g} to {_mean([one.train for one in new]):.3g}, while the"
            f" held-out {self._heldout.reward.name!r} went from {_mean([one.heldout for one in old]):.3g} to"
            f" {_mean([one.heldout for one in new]):.3g} on the same completions. Look at samples.jsonl for what the"
            " policy is paid for."
        )
        if self._heldout.on_hacking == "stop":
            raise RewardError(f"{message} reward.on_hacking=stop ends the run here; its last finished step is saved.")
        log.warning(message)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "steps": [[*vars(one).values()] for one in self._steps],
            "range": [self._lowest, self._highest],
            "suspected": self._suspected,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._steps = [StepMeans(*values) for values in state["steps"]][-2 * self._heldout.window :]
        self._lowest, self._highest = state["range"]
        self._suspected = state["suspected"]


def divergence(steps: Sequence[StepMeans]) -> tuple[float, float, float]:
    """Return (z_train, z_lag, z_held) of the newer half of `steps` against the older, as the module defines them."""
    train, held = [one.train for one in steps], [one.heldout for one in steps]
    spread_train = _spread(train, [one.train_variance for one in steps])
    spread_held = _spread(held, [one.heldout_variance for one in steps])
    if not spread_train:
        return 0.0, 0.0, _z(held)
    gained = [value / (2 * spread_train) for value in train]
    lag = [gain - (value / spread_held if spread_held else 0.0) for gain, value in zip(gained, held, strict=True)]
    return _z(train), _z(lag), _z(held)


def _spread(means: Sequence[float], variances: Sequence[float]) -> float:
    """Return the standard deviation of single completions: the variance within steps plus that of the means."""
    return math.sqrt(_mean(variances) + _variance(means))


def _z(values: Sequence[float]) -> float:
    """Return by how many standard errors the mean of the newer half exceeds that of the older."""
    half = len(values) // 2
    old, new = values[:half], values[half:]
    difference = _mean(new) - _mean(old)
    error = math.sqrt((_variance(old) + _variance(new)) / (half - 1))
    if not difference:
        return 0.0
    return max(-_LARGEST, min(_LARGEST, difference / error)) if error else math.copysign(_LARGEST, difference)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Return the mean squared distance from the mean."""
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
