"""What rollouts in the background gain over synchronous training: `python benchmarks/overlap.py [steps]`.

The engine, the reward and the update of the tiny policy wait, each for a given time, as those wait whose work is done
on another machine or device: what is measured is the overlap, and not how a processor is shared. Each setting is run
synchronously and with max_staleness 0, 1 and 2, in turn. Then, without any waiting, experiment=grpo_tiny as it is:
there generation and update share the cores of one process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from torch import Tensor
from transformers.utils import logging as transformers_logging

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.config.build import build_run
from grpo_toolbox.config.inputs import check_inputs
from grpo_toolbox.config.schema import from_composed, schema_node
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import train
from grpo_toolbox.types import Rollout, RunInfo, Step

SETTINGS = {
    "equal": {"engine": 0.5, "reward": 0.3, "update": 0.8},
    "slow engine": {"engine": 0.8, "reward": 0.3, "update": 0.5},
    "slow update": {"engine": 0.3, "reward": 0.2, "update": 0.8},
}
"""Seconds that each waits in a step."""
MODES = {"synchronous": None, "k = 0": 0, "k = 1": 1, "k = 2": 2}
WARM_UP = 3
"""Steps that are not counted: the first one fills the pipe."""


class Waiting:
    """An engine that takes `seconds` longer."""

    def __init__(self, engine: Any, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds

    def generate(self, *args: Any) -> list[Rollout]:
        """Wait, and sample."""
        time.sleep(self._seconds)
        rollouts: list[Rollout] = self._engine.generate(*args)
        return rollouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def digits(completions: list[str], *, seconds: float = 0.0) -> list[float]:
    """Wait, and pay for the share of digits."""
    time.sleep(seconds)
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def waiting_surrogate(surrogate: Any, seconds: float, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Wait, as for a slow forward pass, and compute the surrogate."""
    time.sleep(seconds)
    found: tuple[Tensor, Tensor] = surrogate(*args)
    return found


class Steps(Callback):
    """When each step ended, and its metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.metrics: list[Mapping[str, float]] = []

    def on_step(self, step: Step) -> None:
        """Remember a step."""
        self.ends.append(time.perf_counter())
        self.metrics.append(step.metrics)

    def of(self, name: str) -> float:
        """Return the median of a metric after the first steps; 0 where there is none."""
        return median([line.get(name, 0.0) for line in self.metrics[WARM_UP:]])

    @property
    def seconds(self) -> float:
        """Seconds per step, the first ones left out."""
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)


def measured(words: list[str], k: int | None, steps: int, waits: Mapping[str, float]) -> Steps:
    """Train for some steps and return what they took."""
    ahead = [] if k is None else ["rollout.async.enabled=true", f"rollout.async.max_staleness={k}"]
    with initialize_config_module("grpo_toolbox.conf", version_base="1.3"):
        config = from_composed(compose("train", [*words, "callbacks=none", *ahead]))
    seen = Steps()
    with tempfile.TemporaryDirectory() as folder:
        info = RunInfo("overlap", Path(folder), steps, 1, {})
        run: Run = build_run(config, check_inputs(config), info)
        run.callbacks = [seen]
        if waits:
            run.engine = Waiting(run.engine, waits["engine"])  # type: ignore[assignment]
            slow = partial(waiting_surrogate, run.objective.surrogate, waits["update"])
            run.objective = replace(run.objective, surrogate=slow)
        train(run)
    return seen


def main(steps: int) -> None:
    """Print a line per setting and mode."""
    transformers_logging.disable_progress_bar()
    ConfigStore.instance().store(name="schema", node=schema_node(), provider="grpo_toolbox")
    small = ["experiment=grpo_tiny", "rollout.prompts_per_step=8", "rollout.group_size=8", "reward=custom"]
    rows = {
        name: (waits, [*small, "reward.name=overlap:digits", "~reward.extract", f"+reward.seconds={waits['reward']}"])
        for name, waits in SETTINGS.items()
    }
    rows["no waiting"] = ({}, ["experiment=grpo_tiny"])
    print(f"{'setting':12} {'mode':12} {'s/step':>8} {'faster':>7} {'trainer idle':>13} {'engine idle':>12}")
    for name, (waits, words) in rows.items():
        plain = 0.0
        for mode, k in MODES.items():
            seen = measured(words, k, steps, waits)
            plain = plain or seen.seconds
            idle = "".join(f" {seen.of(key):12.3f}" for key in ("time/trainer_idle", "time/engine_idle"))
            print(f"{name:12} {mode:12} {seen.seconds:8.3f} {plain / seen.seconds:6.2f}× {idle}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 13)
