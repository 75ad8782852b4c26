"""The grid of advantage × objective × aggregation × KL: each choice as a config that is checked, built and trained.

Every run goes through the checks of the config, `build_parts` and the trainer's own loop; only the loaded model is
shared between them, and put back to where it began. Three steps on two generations: the first and the third follow
their rollouts, the second is off-policy, so that ratios leave 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import composed
from grpo_toolbox.advantages import ADVANTAGES, needs_values
from grpo_toolbox.callbacks import Callback
from grpo_toolbox.config.build import build_parts, build_run
from grpo_toolbox.config.check import check_config
from grpo_toolbox.config.inputs import Inputs, check_inputs
from grpo_toolbox.config.options import check_named
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.config.source import option_names
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.ops import AGGREGATIONS, KL
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import train
from grpo_toolbox.types import RunInfo, Step
from toolbox_runs import SMALL

STEPS = 3
TWINS = {"ppo_clip": "grpo", "dr_grpo": "grpo"}
"""Objectives that are another one where aggregation and beta are set."""
OBJECTIVES = [name for name in option_names("objective") if name not in TWINS]
WORDS = (
    *SMALL,
    *("rollout.prompts_per_step=2", "rollout.group_size=3", "rollout.max_new_tokens=2"),
    *("rollout.steps_per_generation=2", f"trainer.max_steps={STEPS}", "trainer.lr=1e-3", "trainer.eval_every=0"),
    *("reward=custom", "reward.name=plugs:digits", "trainer.seed=55"),
)
"""Two prompts of three completions of at most two tokens a step; of this seed's first ones one stops after a token."""
NOWHERE = Path("/dev/null/run")
"""A run folder in which nothing can be written."""
LOGGED_ONCE = {"loss": [1, 2, 3], "reward": [1, 3]}
"""At which steps a KL is logged: one in the reward belongs to a generation, and is said with its first step."""


@dataclass(frozen=True)
class Kl:
    """What is said of the KL; `form=None` is beta = 0."""

    form: str | None
    place: str = "loss"
    unbiased: bool = False

    def keys(self) -> dict[str, Any]:
        if self.form is None:
            return {"beta": 0.0}
        return {"beta": 0.05, "kl": self.form, "kl_in": self.place, "kl_unbiased": self.unbiased}


NONE = [Kl(None)]
IN_LOSS = [Kl(form) for form in KL]
UNBIASED = [Kl(form, "loss", True) for form in KL]
IN_REWARD = [Kl(form, "reward", unbiased) for form, unbiased in product(KL, (False, True))]


@dataclass(frozen=True)
class Choice:
    """One option on each axis."""

    advantage: str
    objective: str
    loss_agg: str
    kl: Kl

    @property
    def refusal(self) -> str | None:
        """The key that an error names, where the combination cannot be."""
        if self.kl.unbiased and (self.kl.place == "reward" or self.kl.form == "k2"):
            return r"objective\.kl_unbiased=true needs objective\.kl"
        if self.kl.place == "reward" and self.advantage == "gdpo":  # which looks at each reward by itself
            return r"objective\.kl_in=reward .* advantage=gdpo"
        return None


def choices(advantage: str, objective: str, kls: Iterable[Kl]) -> Iterator[Choice]:
    """All aggregations with these KLs."""
    return (Choice(advantage, objective, loss_agg, kl) for loss_agg, kl in product(AGGREGATIONS, kls))


every_pair = pytest.mark.parametrize(("advantage", "objective"), [*product(ADVANTAGES, OBJECTIVES)])


def check_combinations(advantage: str, objective: str, kls: Iterable[Kl]) -> None:
    """Train what the config admits, see the rest refused by name; no two of the runs may go the same way."""
    ways: dict[tuple[float, ...], Choice] = {}
    for choice in choices(advantage, objective, kls):
        if choice.refusal:
            with pytest.raises(ConfigError, match=choice.refusal):
                build_parts(config_of(choice), inputs())
            continue
        way = trained(choice)
        assert way not in ways, f"{choice} trains as {ways.get(way)}: an option is not felt"
        ways[way] = choice


def trained(choice: Choice) -> tuple[float, ...]:
    """Train three steps, check them, and return what tells the run from another: the norms of its gradients.

    Not its losses: a KL that has no gradient is in them, too.
    """
    try:
        run, seen = fresh_run(choice)
        before = parameters(run)
        train(run)
        _check(choice, seen.steps, before, parameters(run))
    except Exception as error:
        raise AssertionError(f"{choice}: {error}") from error
    return tuple(step.metrics["grad_norm"] for step in seen.steps)


def _check(choice: Choice, steps: Sequence[Step], before: Tensor, after: Tensor) -> None:
    assert [step.number for step in steps] == [1, 2, 3]
    for step in steps:
        assert all(math.isfinite(value) for value in step.metrics.values()), step.metrics
    assert steps[0].metrics["grad_norm"] > 0
    assert steps[1].metrics["ratio"] != 1  # off-policy
    assert after.isfinite().all()
    assert not after.equal(before)
    logged = [step.number for step in steps if "kl" in step.metrics]
    assert logged == ([] if choice.kl.form is None else LOGGED_ONCE[choice.kl.place])
    if logged:
        assert steps[2].metrics["kl"] != 0  # the policy has left the reference


def parameters(run: Run) -> Tensor:
    """All of the policy's parameters as one vector."""
    return torch.cat([value.detach().flatten() for value in run.policy.parameters()])


# ---- configs


def config_of(choice: Choice) -> RunConfig:
    """The checked config that `advantage=… objective=… objective.loss_agg=… objective.kl=… …` composes."""
    chosen = {**option("objective", choice.objective), "loss_agg": choice.loss_agg, **choice.kl.keys()}
    config = replace(base(), advantage=option("advantage", choice.advantage), objective=chosen)
    for group in ("advantage", "objective"):
        check_named(group, getattr(config, group))
    check_config(config)
    return config


@cache
def base() -> RunConfig:
    """The config of all that is not chosen."""
    return composed(*WORDS)[0]


@cache
def option(group: str, name: str) -> dict[str, Any]:
    """What a group holds with this option."""
    return dict(getattr(composed("~experiment", f"{group}={name}")[0], group))


@cache
def inputs() -> Inputs:
    """Data and reward."""
    return check_inputs(base())


# ---- runs


class _Listener(Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step)


@cache
def _built() -> tuple[Run, list[Tensor], dict[str, Any]]:
    """A run with a reference and a critic, and the state in which they begin."""
    config = config_of(Choice("gae", "grpo", "token_mean", Kl("k3")))
    run = build_run(config, inputs(), RunInfo("combination", NOWHERE, STEPS, 1, {}))
    assert run.critic is not None
    return run, [value.detach().clone() for value in run.policy.parameters()], copy.deepcopy(run.critic.state_dict())


def fresh_run(choice: Choice) -> tuple[Run, _Listener]:
    """The run of a choice as the command line builds it, on the one loaded model; nothing is saved at its end."""
    parts = build_parts(config_of(choice), inputs())
    run, begun, critic = _built()
    with torch.no_grad():
        for value, former in zip(run.policy.parameters(), begun, strict=True):
            value.copy_(former)
    run.optimizer.state.clear()
    if run.critic is not None:
        run.critic.load_state_dict(critic)
    seen = _Listener()
    fresh = replace(
        run,
        advantage=parts.advantage,
        objective=parts.objective,
        reward=parts.reward,
        data=parts.stream,
        reference=run.reference if parts.objective.needs_reference else None,
        critic=run.critic if needs_values(parts.advantage) else None,
        callbacks=[seen],
        saved=STEPS,
    )
    return fresh, seen
