"""What a user would plug in, for the tests of whole runs: `reward.name=plugs:digits` and its like."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_toolbox.objectives import clipped
from grpo_toolbox.rewards import TrainerState

_calls = {"update": 0, "evaluation": 0}


def digits(completions: list[Any]) -> list[float]:
    """The share of digits: some spread in nearly every group of the untrained tiny policy."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def noisy(completions: list[str], trainer_state: TrainerState) -> list[float]:
    """`digits` with noise from each generator that a reward may draw from; the process stops itself where asked."""
    if trainer_state.evaluating:
        stop_here("evaluation")
    else:
        _stop("rollouts", trainer_state.step)
    return [
        value + 0.1 * random.random() + 0.1 * np.random.random() + 0.1 * float(torch.rand(()))
        for value in digits(completions)
    ]


def clipped_and_stopping(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """PPO's surrogate; the process stops itself where asked. The first call is the probe before the run."""
    stop_here("update")
    return clipped(logps, old_logps, advantages)


def stop_here(stage: str) -> None:
    """Send this process the signal of STOP_AT=<signal>:<stage>:<count> at the count-th call from `stage`."""
    _calls[stage] += 1
    _stop(stage, _calls[stage])


def start_counting() -> None:
    """Count the calls of another run in the same process from nothing."""
    _calls.update(dict.fromkeys(_calls, 0))


def _stop(stage: str, count: int) -> None:
    wanted = os.environ.get("STOP_AT", "").partition(":")
    if wanted[2] == f"{stage}:{count}":
        del os.environ["STOP_AT"]
        os.kill(os.getpid(), signal.Signals[wanted[0]])


def failing_at_3(completions: list[str], trainer_state: TrainerState) -> list[float]:
    """`digits`, and an exception in step 3."""
    if trainer_state.step == 3 and not trainer_state.evaluating:
        raise KeyError("gold")
    return digits(completions)


def spread_but_in_step_2(completions: list[str], trainer_state: TrainerState) -> list[float]:
    """`digits`, but the same for all in step 2."""
    return [1.0] * len(completions) if trainer_state.step == 2 else digits(completions)


def best_second(completions: list[str], trainer_state: TrainerState) -> list[float]:
    """`digits`, and in evaluations 0, 0.5, 1, 0.2, 0.1, …: the best comes after step 2."""
    if not trainer_state.evaluating:
        return digits(completions)
    _calls["evaluation"] += 1
    return [{2: 0.5, 3: 1.0, 4: 0.2}.get(_calls["evaluation"], 0.1)] * len(completions)


def only_some(completions: list[str], answer: list[str]) -> list[float | None]:
    """Solved where the answer is 0, not applicable where it is 2."""
    return [{"0": 1.0, "2": None}.get(one, 0.0) for one in answer]


def nan_in_call(logps: Tensor, old_logps: Tensor, advantages: Tensor, *, call: int) -> tuple[Tensor, Tensor]:
    """PPO's surrogate, and in the `call`-th call of the run a loss that is not a number."""
    _calls["update"] += 1
    loss, is_clipped = clipped(logps, old_logps, advantages)
    return loss * (float("nan") if _calls["update"] == call else 1.0), is_clipped


def endless_slope(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """A finite loss whose gradient is not: the root of 0."""
    return (logps - logps.detach()).sqrt(), torch.zeros_like(logps, dtype=torch.bool)
