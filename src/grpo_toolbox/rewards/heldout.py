"""A verifier that is never trained on, and a test of whether the training reward has parted from it.

Each step, some completions of every group are scored by both. Let aₜ and hₜ be the step's mean training reward, with
the weights that evaluations have, and mean held-out score over them. The newer half of the last 2·w steps is compared
with the older half, for w = W, 2·W and 4·W. With s_a and s_h the standard deviations of single completions over those
steps (within steps and between them), Δ the difference of the halves' means and SE its standard error from the spread
of steps (Welch, 1947):

    the training reward rises      z_train = Δa / SE(a)                            > 3.5
    the held-out score lags        z_lag   = Δd / SE(d),  dₜ = aₜ/(2·s_a) − hₜ/s_h  > 3.5
    and does not itself rise       z_score = Δh / SE(h)                            < 2

Where all three hold at one w, hacking is suspected. z_lag asks whether the held-out score has gained less than half as
much as the training reward, each in units of its own spread; that both are of the same completions takes out what they
share. A held-out score that is the same on every completion lags by definition, unless it stands at its highest.

On simulated runs of 500 steps, W = 20 and 32 completions a step, where both stay or both rise, at most 1 in 100 is
suspected at any step; where the training reward rises from 0.3 to 0.9 and the held-out score stays, all are.
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
from grpo_toolbox.rewards.contract import Reward
from grpo_toolbox.rewards.scoring import Scoring
from grpo_toolbox.rewards.weights import TrainerState
from grpo_toolbox.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ON_HACKING = ("warn", "stop")
RISES = 3.5
"""Standard errors above which the training reward rises and the held-out score lags."""
ROSE = 2.0
"""Standard errors above which the held-out score rises itself."""
SCALES = (1, 2, 4)
"""Lengths of the halves that are compared, in multiples of the window."""
_LARGEST = 99.0
"""Metrics are finite: a difference without any spread counts this many standard errors."""


@dataclass(frozen=True)
class HeldOut:
    """A held-out verifier, and what is done with it."""

    reward: Reward
    share: float = 0.25
    """Of each group's completions that are scored by it; at least one is."""
    window: int = 20
    """W: steps in the shortest windows that are compared."""
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


@dataclass(frozen=True)
class Comparison:
    """Newer steps against older ones: how many standard errors each quantity has gained."""

    steps: Sequence[StepMeans]
    z_train: float
    z_lag: float
    z_score: float

    @property
    def parted(self) -> bool:
        """Whether the training reward has risen, and the held-out score has lagged behind and not risen."""
        return self.z_train > RISES and self.z_lag > RISES and self.z_score < ROSE


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

    def checked(self, components: Tensor, weights: Sequence[float]) -> Checked:
        """Finish; `components` (P, G, R) are what the training reward's parts said, to be weighed with `weights`.

        The weights should stay the same through the run, or the reward would rise because a weight does.
        """
        if self._scoring is None:
            return Checked()
        scores = self._scoring.scores()
        rows = components[:, : self._taken].flatten(0, 1).tolist()
        both = zip((_total(row, weights) for row in rows), scores.total.flatten().tolist(), strict=True)
        seconds = sum(scores.metrics[f"time/{name}"] for name in scores.names)
        pairs = [pair for pair in both if not any(map(math.isnan, pair))]
        return Checked(pairs, scores.metrics["reward_errors"], seconds)


class Divergence:
    """The comparison of both over the run; its state belongs into the checkpoint."""

    def __init__(self, heldout: HeldOut) -> None:
        self._heldout = heldout
        self._steps: list[StepMeans] = []
        self._lowest, self._highest = math.inf, -math.inf
        self._quiet: int | None = None
        """Steps since hacking was last suspected; None: it never was."""

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
        self._steps = self._steps[-self._kept :]
        self._lowest, self._highest = min(self._lowest, *held), max(self._highest, *held)
        metrics |= {"heldout/score": _mean(held), "heldout/train_reward": _mean(train)}
        return metrics | self._judged()

    @property
    def _kept(self) -> int:
        return 2 * max(SCALES) * self._heldout.window

    def _judged(self) -> dict[str, float]:
        lengths = [2 * scale * self._heldout.window for scale in SCALES]
        found = [compare(self._steps[-length:]) for length in lengths if length <= len(self._steps)]
        if not found:
            return {}
        parted = [one for one in found if one.parted and not self._saturated(one)]
        shown = max(parted or found, key=lambda one: min(one.z_train, one.z_lag))
        if parted and (self._quiet is None or self._quiet >= self._kept):  # once for one rise, at whatever scale
            self._say(shown.steps)
        self._quiet = 0 if parted else None if self._quiet is None else self._quiet + 1
        return {
            "heldout/z_train": shown.z_train,
            "heldout/z_lag": shown.z_lag,
            "heldout/z_score": shown.z_score,
            "heldout/suspected": float(bool(parted)),
        }

    def _saturated(self, one: Comparison) -> bool:
        """Whether the held-out score was the same on every completion, the highest there is, and once was lower."""
        constant = all(step.heldout == self._highest and not step.heldout_variance for step in one.steps)
        return constant and self._lowest < self._highest

    def _say(self, steps: Sequence[StepMeans]) -> None:
        half = len(steps) // 2
        old, new = steps[:half], steps[half:]
        train, held = ([[getattr(one, name) for one in part] for part in (old, new)] for name in ("train", "heldout"))
        message = (
            f"suspected reward hacking: from the {half} steps before to the last {half}, the training reward rose from"
            f" {_mean(train[0]):.3g} to {_mean(train[1]):.3g}, and the held-out {self._heldout.reward.name!r} went from"
            f" {_mean(held[0]):.3g} to {_mean(held[1]):.3g} on the same completions. samples.jsonl shows what is paid."
        )
        if self._heldout.on_hacking == "stop":
            raise RewardError(
                f"{message} reward.on_hacking=stop ends the run here, with its last finished step saved; resume= with"
                " reward.on_hacking=warn goes on."
            )
        log.warning(message)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "steps": [[*vars(one).values()] for one in self._steps],
            "range": [self._lowest, self._highest],
            "quiet": self._quiet,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._steps = [StepMeans(*values) for values in state["steps"]][-self._kept :]
        self._lowest, self._highest = state["range"]
        self._quiet = state["quiet"]


def compare(steps: Sequence[StepMeans]) -> Comparison:
    """Compare the newer half of `steps` with the older, as the module says."""
    train, held = [one.train for one in steps], [one.heldout for one in steps]
    spread_train = _spread(train, [one.train_variance for one in steps])
    spread_held = _spread(held, [one.heldout_variance for one in steps])
    lag = [
        (gain / (2 * spread_train) if spread_train else 0.0) - (score / spread_held if spread_held else 0.0)
        for gain, score in zip(train, held, strict=True)
    ]
    return Comparison(steps, _z(train), _z(lag), _z(held))


def _total(scores: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted sum of what applies, NaN where nothing does."""
    paid = [weight * score for weight, score in zip(weights, scores, strict=True) if not math.isnan(score)]
    return math.fsum(paid) if paid else math.nan


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
