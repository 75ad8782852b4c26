"""What a check found, and how what it measured is judged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_toolbox.measure import Gradient, difference, limits
from grpo_toolbox.run import Run


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    measured: str
    allowed: str
    passed: bool | None
    """None where the check does not apply to this run; `measured` says why."""
    meaning: str
    """What a failure means, and where to look."""


def compared(name: str, measured: dict[str, tuple[float, float]], meaning: str) -> Finding:
    """Judge measured values against their limits; NaN is never within one."""
    shown = ", ".join(f"{what} {value:.1e}" for what, (value, _) in measured.items())
    first = next(iter(measured.values()))[1]
    others = [f"{what} ≤ {limit:.0e}" for what, (_, limit) in measured.items() if limit != first]
    allowed = ", ".join([f"≤ {first:.0e}", *others])
    return Finding(name, shown, allowed, all(value <= limit for value, limit in measured.values()), meaning)


def gap(one: Tensor, other: Tensor, where: Tensor) -> float:
    """Return the largest difference of two (B, T) tensors where a token was written."""
    return float((one - other)[where].abs().max())


def same_logps(run: Run, one: Tensor, other: Tensor, where: Tensor) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean |Δ log-prob|: in half precision single tokens are far off, but not all."""
    _, limit = limits(run)
    return {
        "log-probs": (gap(one, other, where), limit),
        "their mean": (float((one - other)[where].abs().mean()), limit / 10),
    }


def same_gradient(run: Run, one: Gradient, other: Gradient) -> dict[str, tuple[float, float]]:
    """Return how far two gradients are apart, in shares of the second, and their losses."""
    limit, _ = limits(run)
    loss = abs(one.loss - other.loss) / max(abs(other.loss), 1.0)
    return {"gradient": (difference(one, other), limit), "loss": (loss, limit)}
