"""Every advantage × objective × aggregation × KL that the config admits trains the tiny policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from command_line import composed
from grpo_toolbox.advantages import ADVANTAGES, needs_values
from grpo_toolbox.config.build import _objective
from grpo_toolbox.config.source import option_names
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.experience import batch_of, next_experience
from grpo_toolbox.objectives import Objective
from grpo_toolbox.ops import AGGREGATIONS, KL
from grpo_toolbox.run import Run
from grpo_toolbox.update import update
from test_experience import clock, parameters
from toolbox_runs import SMALL, built_run

STEPS = 3


@dataclass(frozen=True)
class Choice:
    """One option on each axis."""

    advantage: str
    objective: str
    loss_agg: str
    kl: str
    kl_in: str
    kl_unbiased: bool


def choices() -> Iterator[Choice]:
    """All that the config admits; KL none is beta = 0, where neither its form nor its place counts."""
    kls = [
        ("none", "loss", False),
        *product(KL, ("loss", "reward"), (False,)),
        *(("k1", "loss", True), ("k3", "loss", True)),
    ]
    objectives = [name for name in option_names("objective") if name not in TWINS]
    for advantage, objective, loss_agg, kl in product(ADVANTAGES, objectives, AGGREGATIONS, kls):
        yield Choice(advantage, objective, loss_agg, *kl)


TWINS = {"ppo_clip": "grpo", "dr_grpo": "grpo"}
"""Objectives that are another one where aggregation and beta are set."""
ALL = list(choices())
FEW = random.Random(1).sample(ALL, 40)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a reference and a critic, of two prompts and two completions of at most two tokens a step."""
    sizes = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=2")
    paid = ("reward=custom", "reward.name=plugs:digits", "objective=grpo", "trainer.lr=1e-3", "advantage=gae")
    return built_run(*SMALL, *paid, *sizes, f"run_dir={tmp_path_factory.mktemp('tiny') / 'run'}")


@pytest.fixture(scope="module")
def options() -> dict[str, dict[str, Any]]:
    """What each objective's file sets."""
    return {name: composed("~experiment", f"objective={name}")[0].objective for name in option_names("objective")}


def objective_of(choice: Choice, options: dict[str, dict[str, Any]]) -> Objective:
    own = {key: value for key, value in options[choice.objective].items() if key != "name"}
    kl = {} if choice.kl == "none" else {"kl": choice.kl, "kl_in": choice.kl_in, "kl_unbiased": choice.kl_unbiased}
    own |= {"loss_agg": choice.loss_agg, "beta": 0.05 if kl else 0.0, **kl}
    return _objective(options[choice.objective]["name"], own)


def train_three_steps(run: Run, advantage: Callable[..., Tensor], objective: Objective) -> None:
    """Three steps from where the run stands; loss, gradient and every other metric are finite, and it moves."""
    critic = run.critic if needs_values(advantage) else None
    run = replace(run, advantage=advantage, objective=objective, critic=critic, pending=[])
    before = parameters(run)
    for number in range(1, STEPS + 1):
        learnt = next_experience(run, number, clock)
        metrics = update(run, batch_of(run, learnt), number)
        assert all(math.isfinite(value) for value in metrics.values())
        run.engine.sync()
    assert parameters(run).isfinite().all()
    assert not parameters(run).equal(before)


def check(run: Run, options: dict[str, dict[str, Any]], chosen: list[Choice]) -> None:
    for choice in chosen:
        try:
            train_three_steps(run, ADVANTAGES[choice.advantage], objective_of(choice, options))
        except Exception as error:
            raise AssertionError(f"{choice}") from error


@pytest.mark.parametrize("twin", TWINS)
def test_twins_differ_in_aggregation_and_beta_alone(twin: str, options: dict[str, dict[str, Any]]) -> None:
    one, other = ({**options[name], "loss_agg": "", "beta": 0.0} for name in (twin, TWINS[twin]))
    assert one == other


def test_the_few_hold_every_option() -> None:
    for axis in ("advantage", "objective", "loss_agg", "kl", "kl_in", "kl_unbiased"):
        assert {getattr(choice, axis) for choice in FEW} == {getattr(choice, axis) for choice in ALL}


@pytest.mark.parametrize("kl", [("k2", "loss"), *product(KL, ("reward",))])
def test_an_unbiased_kl_that_is_none_is_refused(kl: tuple[str, str], options: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="kl_unbiased"):
        objective_of(Choice("rloo", "grpo", "token_mean", *kl, True), options)


def test_some_combinations_train(tiny: Run, options: dict[str, dict[str, Any]]) -> None:
    check(tiny, options, FEW)


@pytest.mark.slow
def test_every_combination_trains(tiny: Run, options: dict[str, dict[str, Any]]) -> None:
    check(tiny, options, ALL)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "product"])
def test_off_policy_every_surrogate_trains_at_every_level(
    level: str, tiny: Run, options: dict[str, dict[str, Any]]
) -> None:
    """Two optimizer steps a batch, so that the ratios are not 1."""
    former = tiny.settings
    tiny.settings = replace(former, ppo_epochs=2)
    for name in options:
        plain = objective_of(Choice("rloo", name, "token_mean", "k3", "loss", False), options)
        train_three_steps(tiny, ADVANTAGES["rloo"], replace(plain, ratio_level=level))
    tiny.settings = former
