"""Seconds per stage, and what they say about speed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from grpo_toolbox.types import Rollout


class Clock:
    """Seconds per stage of one step, or of one generation of rollouts."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's seconds as `stage`'s."""
        started = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started

    def stages(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return `time/<stage>` of all stages, and tokens per second of those that go through the rollouts' tokens."""
        tokens = tokens_of(rollouts)
        speeds = {
            f"tokens_per_s/{stage}": tokens / self._seconds[stage]
            for stage in ("rollout", "update")
            if self._seconds.get(stage)
        }
        return {f"time/{stage}": value for stage, value in self._seconds.items()} | speeds

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the same with the whole, `time/step` and `tokens_per_s`, up to now."""
        total, tokens = time.perf_counter() - self._started, tokens_of(rollouts)
        return self.stages(rollouts) | {"time/step": total, "tokens_per_s": tokens / total}


def tokens_of(rollouts: Sequence[Rollout]) -> int:
    """Return how many tokens were sampled."""
    return sum(one.written_tokens for one in rollouts)
