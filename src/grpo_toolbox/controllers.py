"""Coefficients and choices that follow a measurement; their state belongs into the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass
class EntropyControl:
    """Adaptive entropy bonus (Skywork-OR1; He et al., 2025): raise the coefficient while entropy is at or below target.

    cₙ₊₁ = min(cₙ + δ, max) where H ≤ target, else max(cₙ − δ, min); the bonus itself counts only while H ≤ target.
    """

    target: float
    delta: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0
    value: float = 0.0
    below: bool = False

    @property
    def coef(self) -> float:
        """The coefficient of the coming step."""
        return self.value if self.below else 0.0

    def observe(self, entropy: float) -> None:
        """Take the mean entropy of the step that has just been trained."""
        self.below = entropy <= self.target
        self.value += self.delta if self.below else -self.delta
        self.value = min(max(self.value, self.lowest), self.highest)

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"value": self.value, "below": float(self.below)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state."""
        self.value, self.below = state["value"], bool(state["below"])


@dataclass
class KlControl:
    """Adaptive KL weight (Ziegler et al., 2019): β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) per n rows.

    A step of more rows than the horizon counts as one of the horizon: β moves by a fifth at most and stays above 0.
    """

    target: float
    horizon: float
    beta: float

    def observe(self, kl: float, completions: int) -> None:
        """Take the mean KL of the step that has just been trained, on so many completions."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * min(completions / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state."""
        self.beta = state["beta"]


ROUNDING_MEAN, ROUNDING_MAX = 1e-3, 0.1
"""Up to here nothing is corrected. A weight that is off by 0.1 % on average, and by 10 % once, is small beside the 20 %
that a ratio may move before it is clipped; what a correction would add is noise."""
HALF_PRECISION_MEAN, HALF_PRECISION_ESS = 0.05, 0.9
"""Up to here tokens are weighted one by one. bfloat16 alone makes 0.01 to 0.03 on average; a sampler that is further
off, or so far at some tokens that weighting them costs a tenth of the sample, is another policy, and has visited other
prefixes. Weights of single tokens do not see that; those of whole sequences do."""
BACK = 0.5
"""What is measured must fall to this share of a threshold before the weaker correction is taken again."""
CORRECTION_STEPS = ("none", "token_truncate", "sequence_mask")


@dataclass
class CorrectionControl:
    """Chooses the sampler correction from the measured |Δ log-prob| between engine and trainer."""

    value: str = "none"
    fixed: bool = False
    """Whether what is measured is something else than a mismatch, so that the choice stays."""

    def observe(self, mean: float, largest: float, ess: float = 1.0) -> None:
        """Take a measurement over tokens: mean and largest gap in nats, effective sample size as a share."""
        if self.fixed:
            return
        level = CORRECTION_STEPS.index(self.value)
        wanted = _correction_level(mean, largest, 1 - ess)
        if wanted < level:
            wanted = min(level, _correction_level(mean / BACK, largest / BACK, (1 - ess) / BACK))
        if wanted == level:
            return
        former, self.value = self.value, CORRECTION_STEPS[wanted]
        log.warning(
            "objective.correction=auto: %s in place of %s, for |Δ log-prob| between engine and trainer is %.2g on "
            "average and %.2g at most, with an effective sample of %.1f %%. (none up to %g and %g; token_truncate up "
            "to %g and %g %%; back at half of that.)",
            *(self.value, former, mean, largest, 100 * ess, ROUNDING_MEAN, ROUNDING_MAX),
            *(HALF_PRECISION_MEAN, 100 * HALF_PRECISION_ESS),
        )

    @property
    def level(self) -> float:
        """0 none, 1 token_truncate, 2 sequence_mask: for the log."""
        return float(CORRECTION_STEPS.index(self.value))

    def state_dict(self) -> dict[str, str]:
        """Return what a resumed run needs."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a saved state."""
        self.value = state["value"]


def _correction_level(mean: float, largest: float, lost: float) -> int:
    if mean <= ROUNDING_MEAN and largest <= ROUNDING_MAX:
        return 0
    return 1 if mean <= HALF_PRECISION_MEAN and lost <= 1 - HALF_PRECISION_ESS else 2
