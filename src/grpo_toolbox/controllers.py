"""Coefficients that follow a measurement; their state belongs into the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    """Adaptive KL weight (Ziegler et al., 2019): β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) per n rows."""

    target: float
    horizon: float
    beta: float

    def observe(self, kl: float, completions: int) -> None:
        """Take the mean KL of the step that has just been trained, on so many completions."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * completions / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state."""
        self.beta = state["beta"]
