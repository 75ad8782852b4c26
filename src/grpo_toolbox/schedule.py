"""Learning rates as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(progress: float) -> float:
    """Stay at 1."""
    return 1.0


def linear(progress: float) -> float:
    """Fall from 1 to 0 in a straight line."""
    return 1 - progress


def cosine(progress: float) -> float:
    """Fall from 1 to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def lr_factor(schedule: str, step: int, *, max_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Return what to multiply the peak learning rate with at optimizer step `step` (from 1).

    It rises linearly over `warmup_steps` (the first step already trains), then falls with the schedule to `min_ratio`.
    """
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    progress = (step - 1 - warmup_steps) / max(max_steps - warmup_steps, 1)
    return min_ratio + (1 - min_ratio) * SCHEDULES[schedule](min(progress, 1.0))
