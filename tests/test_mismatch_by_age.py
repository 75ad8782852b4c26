"""The gap between sampler and trainer, in all and by how old the weights were that drew a token."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_toolbox.batch import collate
from grpo_toolbox.mismatch import OLDEST, MismatchMeter
from grpo_toolbox.types import Rollout
from small_models import make_prompts
from toolbox_runs import SMALL, metrics, toolbox_train

MASK = torch.tensor([[True, True], [True, False]])
TRAINER = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]])
SAMPLER = torch.tensor([[-1.1, -2.0], [-2.7, 0.0]])  # Δ = .1, 0, −.3; the fourth is not a token


def metered(ages: list[list[int]]) -> dict[str, float]:
    meter = MismatchMeter()
    meter.add(TRAINER, SAMPLER, MASK, torch.tensor(ages))
    return meter.metrics()


def test_the_sums_by_hand() -> None:
    seen = metered([[0, 0], [0, 0]])
    ratios = [math.exp(0.1), 1.0, math.exp(-0.3)]
    assert seen["sampler/logp_gap_mean"] == pytest.approx(0.4 / 3)
    assert seen["sampler/logp_gap_max"] == pytest.approx(0.3)
    assert seen["sampler/kl"] == pytest.approx((sum(ratios) - 3 - (0.1 - 0.3)) / 3)
    assert seen["sampler/ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(one * one for one in ratios)))
    assert not any("age_" in name for name in seen)


def test_tokens_are_told_apart_by_the_age_of_their_weights() -> None:
    seen = metered([[0, 1], [1, 7]])
    assert seen["sampler/logp_gap_mean"] == pytest.approx(0.4 / 3)  # of all, as before
    assert (seen["sampler/age_0/logp_gap_mean"], seen["sampler/age_0/tokens"]) == (pytest.approx(0.1), 1)
    assert (seen["sampler/age_1/logp_gap_max"], seen["sampler/age_1/tokens"]) == (pytest.approx(0.3), 2)
    assert "sampler/age_7/tokens" not in seen  # its only token is masked


def test_very_old_weights_share_a_column() -> None:
    seen = metered([[OLDEST, 40], [999, 0]])
    assert seen[f"sampler/age_{OLDEST}/tokens"] == 3


def test_the_split_into_micro_batches_changes_nothing() -> None:
    whole, parts = metered([[0, 1], [1, 0]]), MismatchMeter()
    for row, ages in ((0, [[0, 1]]), (1, [[1, 0]])):
        part = slice(row, row + 1)
        parts.add(TRAINER[part], SAMPLER[part], MASK[part], torch.tensor(ages))
    assert parts.metrics() == pytest.approx(whole)


def test_a_batch_knows_the_version_of_every_token() -> None:
    prompt = make_prompts(2)[0]
    plain = Rollout(prompt, (5, 6, 7), (-1.0,) * 3, "length", "", weights_version=4)
    mixed = replace(plain, ids=(5, 6), logps=(-1.0,) * 2, versions=((2, 1), (4, 1)))
    batch = collate([plain, mixed], torch.zeros(1, 2))
    assert batch.versions is not None
    assert batch.versions.tolist() == [[4, 4, 4], [2, 4, 0]]


def test_steps_that_share_a_generation_grow_older(tmp_path: Path) -> None:
    arguments = (
        *SMALL,
        "trainer.max_steps=3",
        "rollout.prompts_per_step=2",
        "rollout.steps_per_generation=2",
        f"run_dir={tmp_path}",
    )
    assert toolbox_train(*arguments) == 0
    ages = [{name for name in line if "age_" in name and "tokens" in name} for line in metrics(tmp_path)]
    assert ages == [set(), {"sampler/age_1/tokens"}, set()]
