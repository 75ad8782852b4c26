"""A program's own optimizer and schedule, and what callbacks are shown in place of a scheduler."""

from __future__ import annotations

from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.run import Run


class Schedule:
    """The learning rate of a step: a torch scheduler's that a program gave, or our own function of the step."""

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._rates = [group["lr"] for group in optimizer.param_groups]

    @classmethod
    def of(cls, run: Run) -> Schedule:
        """Return what callbacks see of a run's own schedule."""
        return cls(run.optimizer)

    def __call__(self, step: int) -> float:
        """Return the rate of step `step`, from 1: the scheduler has been stepped `step` − 1 times, as in torch."""
        if self._scheduler is None:
            return self._rates[0]
        if self._scheduler.last_epoch > step - 1:
            raise ConfigError("the scheduler in optimizers= is beyond the run's first step: make a new one.")
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        while self._scheduler.last_epoch < step - 1:
            self._scheduler.step()
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr_share"] = rate / self._rates[0] if self._rates[0] else 0.0
        return self._rates[0]

    def get_last_lr(self) -> list[float]:
        """Return the rates that the optimizer has now, one per group of parameters."""
        return [group["lr"] for group in self._optimizer.param_groups]


def given_optimizer(optimizers: Any) -> tuple[Any, Schedule | None]:
    """Return a program's optimizer and its schedule; a scheduler has to stand on the optimizer beside it."""
    optimizer, scheduler = optimizers or (None, None)
    if optimizer is None and scheduler is not None:
        raise ConfigError("optimizers=(None, scheduler): pass the optimizer that the scheduler moves, too.")
    if optimizer is None:
        return None, None
    return optimizer, Schedule(optimizer, scheduler)
