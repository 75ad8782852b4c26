"""What the display knows about the run so far: rewards, pace, the latest numbers, one fresh sample."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_toolbox.callbacks.actions import prompt_text
from grpo_toolbox.types import RunInfo, Step

SAMPLE_SECONDS = 3.0
"""How long a sample stays on the screen: long enough to be read."""


@dataclass(frozen=True)
class Sample:
    """One completion to look at."""

    step: int
    prompt: str
    """The prompt's text, or the last message of a conversation."""
    completion: str
    finish_reason: str
    reward: float


class Progress:
    """The run as the display sees it; `add` takes microseconds, everything else is derived when something is drawn."""

    def __init__(self, run: RunInfo, now: float) -> None:
        """Start at the time `now`, in seconds of any clock. A resumed run takes its earlier rewards from its file."""
        self.run = run
        self.started = now
        self.number = run.first_step - 1
        self.metrics: Mapping[str, float] = {}
        self.sample: Sample | None = None
        self.rewards, self.evals = _history(run.run_dir / "metrics.jsonl") if run.first_step > 1 else ([], [])
        self._times: deque[float] = deque(maxlen=64)
        self._sampled = float("-inf")

    def add(self, step: Step, now: float) -> None:
        """Take in a finished step."""
        self.number = step.number
        self.metrics = step.metrics
        if "eval/reward" in step.metrics:
            self.evals.append(step.metrics["eval/reward"])
        if step.number == 0:
            return
        self._times.append(now)
        if "reward_mean" in step.metrics:
            self.rewards.append(step.metrics["reward_mean"])
        if step.rollouts and step.scores is not None and now - self._sampled >= SAMPLE_SECONDS:
            self.sample, self._sampled = _pick(step), now

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time to the last step from the pace of the last 64 steps; None before there is a pace."""
        if len(self._times) < 2:
            return None
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return max(0.0, pace * (self.run.max_steps - self.number) - (now - self._times[-1]))


def before_after(values: Sequence[float], share: float = 0.05) -> tuple[float, float] | None:
    """Return the means of the first and of the last `share` of the values (at least one each), None below two.

    Values that are not a number are left out.
    """
    values = [v for v in values if math.isfinite(v)]
    if len(values) < 2:
        return None
    n = max(1, round(share * len(values)))
    return sum(values[:n]) / n, sum(values[-n:]) / n


def _pick(step: Step) -> Sample:
    row = step.number % len(step.rollouts)  # another prompt each time, without touching any random state
    rollout = step.rollouts[row]
    assert step.scores is not None
    reward = float(step.scores.total.flatten()[row])
    return Sample(step.number, prompt_text(rollout.prompt.text), rollout.text, rollout.finish_reason, reward)


def _history(path: Path) -> tuple[list[float], list[float]]:
    """Read the rewards and evaluations of the steps before a resume; nothing where the file is missing."""
    if not path.exists():
        return [], []
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    rewards = [m["reward_mean"] for m in lines if m["step"] > 0 and m.get("reward_mean") is not None]
    return rewards, [m["eval/reward"] for m in lines if m.get("eval/reward") is not None]
