"""Every advantage × objective × aggregation × KL that the config admits trains three steps: here those without a KL.

The others are in `test_combinations_*.py`, files of about the same length, which workers take apart.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from combinations import (
    IN_LOSS,
    IN_REWARD,
    NONE,
    OBJECTIVES,
    TWINS,
    UNBIASED,
    Choice,
    Kl,
    check_combinations,
    config_of,
    every_pair,
    fresh_run,
    inputs,
    option,
)
from grpo_toolbox.advantages import ADVANTAGES
from grpo_toolbox.config.build import build_parts
from grpo_toolbox.config.source import option_names
from grpo_toolbox.ops import AGGREGATIONS, KL
from grpo_toolbox.ratios import RATIO_LEVELS
from grpo_toolbox.trainer import train


@every_pair
def test_without_a_kl(advantage: str, objective: str) -> None:
    check_combinations(advantage, objective, NONE)


def test_the_files_hold_the_whole_grid() -> None:
    kls = [*NONE, *IN_LOSS, *UNBIASED, *IN_REWARD]
    assert sorted((kl.form, kl.place, kl.unbiased) for kl in kls if kl.form) == sorted(
        itertools.product(KL, ("loss", "reward"), (False, True))
    )
    assert {*OBJECTIVES, *TWINS} == set(option_names("objective"))
    assert set(option_names("advantage")) == set(ADVANTAGES)


@pytest.mark.parametrize("twin", TWINS)
def test_twins_differ_in_aggregation_and_beta_alone(twin: str) -> None:
    one, other = ({**option("objective", name), "loss_agg": "", "beta": 0.0} for name in (twin, TWINS[twin]))
    assert one == other


def test_a_run_of_the_grid_is_that_of_its_config() -> None:
    """What is chosen is what is built: the shared run brings no objective, aggregation or KL of its own."""
    for objective, loss_agg, kl in itertools.product(OBJECTIVES, AGGREGATIONS, (Kl(None), Kl("k2", "reward"))):
        choice = Choice("rloo", objective, loss_agg, kl)
        run, _ = fresh_run(choice)
        parts = build_parts(config_of(choice), inputs())
        built = run.objective
        assert replace(built, surrogate=parts.objective.surrogate) == parts.objective
        assert (built.loss_agg, built.beta > 0, built.kl_in) == (loss_agg, kl.form is not None, kl.place)
        assert (run.reference is not None) == (kl.form is not None)
        assert run.critic is None


def test_the_first_rollouts_tell_the_axes_apart() -> None:
    """Lengths differ, or all means over tokens were the same; rewards differ in a group, or nothing were learnt."""
    run, seen = fresh_run(Choice("rloo", "grpo", "token_mean", Kl(None)))
    train(run)
    for step in seen.steps[:2]:
        assert step.scores is not None
        assert len({len(one.ids) for one in step.rollouts}) > 1
        assert (step.scores.total.std(dim=1) > 0).any()


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_every_surrogate_trains_at_every_level(level: str) -> None:
    for objective in OBJECTIVES:
        run, seen = fresh_run(Choice("rloo", objective, "token_mean", Kl("k3")))
        run.objective = replace(run.objective, ratio_level=level)
        train(run)
        assert all(math.isfinite(value) for step in seen.steps for value in step.metrics.values())
        assert all(step.metrics["grad_norm"] > 0 for step in seen.steps)
