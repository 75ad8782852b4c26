"""Generalised advantage estimation, and what a critic is to learn from it, by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from grpo_toolbox.advantages import ADVANTAGES, estimate, gae, needs_values, rloo, value_targets
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import Scores

NONE = math.nan
plain = partial(gae, whiten=False)


def scores(total: Tensor) -> Scores:
    return Scores(("r",), (1.0,), total.unsqueeze(-1), total)


def test_three_tokens_by_hand() -> None:
    # γ = .9, λ = .5, V = (.2, .4, .1), reward 1 at the last token
    # δ₃ = 1 − .1 = .9; δ₂ = .9·.1 − .4 = −.31; δ₁ = .9·.4 − .2 = .16
    # Â₃ = .9; Â₂ = −.31 + .45·.9 = .095; Â₁ = .16 + .45·.095 = .20275
    values = torch.tensor([[[0.2, 0.4, 0.1]]], dtype=torch.float64)
    rewards = torch.ones(1, 1, dtype=torch.float64)
    expected = torch.tensor([[[0.20275, 0.095, 0.9]]], dtype=torch.float64)
    torch.testing.assert_close(plain(rewards, values=values, gamma=0.9, lam=0.5), expected)
    # what the critic is to learn: Â + V, whether the policy's advantages are whitened or not
    for advantage in (partial(gae, gamma=0.9, lam=0.5), partial(plain, gamma=0.9, lam=0.5)):
        torch.testing.assert_close(value_targets(advantage, scores(rewards), values), expected + values)


def test_the_penalty_counts_at_its_own_token() -> None:
    # V = 0, γ = 1, λ = .5; reward 2 and penalties (.1, .2, .4): r = (−.1, −.2, 1.6) = δ
    # Â₃ = 1.6; Â₂ = −.2 + .8 = .6; Â₁ = −.1 + .3 = .2
    penalty = torch.tensor([[[0.1, 0.2, 0.4]]])
    advantages = plain(torch.tensor([[2.0]]), values=torch.zeros(1, 1, 3), penalty=penalty, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[[0.2, 0.6, 1.6]]]))


def test_the_ends_of_lambda() -> None:
    values = torch.tensor([[[0.3, -0.2, 0.5], [0.1, 0.7, NONE]]])
    rewards = torch.tensor([[1.0, -2.0]])
    # λ = 1, γ = 1, V = 0: the reward of the completion at every token
    nothing = torch.where(values.isnan(), torch.nan, 0.0)
    torch.testing.assert_close(
        plain(rewards, values=nothing, lam=1.0), torch.tensor([[[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]]])
    )
    # λ = 1: reward less value; λ = 0: δ, and the shorter completion is paid at its own last token
    torch.testing.assert_close(
        plain(rewards, values=values, lam=1.0), torch.tensor([[[0.7, 1.2, 0.5], [-2.1, -2.7, 0.0]]])
    )
    torch.testing.assert_close(
        plain(rewards, values=values, lam=0.0), torch.tensor([[[-0.5, 0.7, 0.5], [0.6, -2.7, 0.0]]])
    )


def test_whitening_is_over_the_real_tokens_of_the_batch() -> None:
    # λ = 1, V = 0: Â = 1, 1 | −1, and nothing: mean 1/3, squares 2·4/9 + 16/9 = 24/9, /3 = 8/9, std .942809
    # (1 − 1/3)/.942809 = .707107, (−1 − 1/3)/.942809 = −1.414214
    values = torch.tensor([[[0.0, 0.0]], [[0.0, NONE]], [[0.0, 0.0]]])
    advantages = gae(torch.tensor([[1.0], [-1.0], [NONE]]), values=values, lam=1.0)
    expected = torch.tensor([[[0.707107, 0.707107]], [[-1.414214, 0.0]], [[0.0, 0.0]]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("whiten", [True, False])
def test_a_row_without_a_reward_gets_nothing_and_teaches_nothing(whiten: bool) -> None:
    values = torch.tensor([[[0.4, 0.1], [0.4, 0.1]]])
    rewards = torch.tensor([[NONE, 1.0]])
    advantages = gae(rewards, values=values, whiten=whiten)
    assert torch.equal(advantages[0, 0], torch.zeros(2))
    assert bool((advantages[0, 1] != 0).all())
    returns = value_targets(partial(gae, whiten=whiten), scores(rewards), values)
    assert bool(returns[0, 0].isnan().all())
    assert bool(returns[0, 1].isfinite().all())


@pytest.mark.parametrize("rewards", [[[NONE, NONE]], [[0.0, 0.0]]])
def test_no_signal_is_exactly_zero(rewards: list[list[float]]) -> None:
    assert torch.equal(gae(torch.tensor(rewards), values=torch.zeros(1, 2, 4)), torch.zeros(1, 2, 4))


def test_without_values_the_error_names_the_critic() -> None:
    with pytest.raises(ConfigError, match=r"advantage=gae needs a critic's values"):
        ADVANTAGES["gae"](torch.tensor([[1.0, 0.0]]))
    with pytest.raises(ConfigError, match="gae got a reward of inf"):
        gae(torch.tensor([[math.inf]]), values=torch.zeros(1, 1, 1))


@pytest.mark.parametrize("option", [{"gamma": math.nan}, {"gamma": 1.1}, {"lam": -0.1}, {"lam": math.nan}], ids=str)
def test_discounts_outside_their_range_are_refused(option: dict[str, float]) -> None:
    """NaN would make all advantages 0, without a word."""
    with pytest.raises(ConfigError, match=r"advantage\.(gamma|lam)=.* must be in \[0, 1\]\."):
        gae(torch.ones(1, 1), values=torch.zeros(1, 1, 2), **option)


def test_no_row_at_all_has_no_advantages() -> None:
    assert gae(torch.zeros(0, 2), values=torch.zeros(0, 2, 3)).shape == (0, 2, 3)
    assert plain(torch.zeros(2, 1), values=torch.zeros(2, 1, 0)).shape == (2, 1, 0)


def test_values_are_handed_to_who_names_them() -> None:
    assert needs_values(partial(gae, lam=1.0))
    assert not needs_values(rloo)
    total, values = torch.tensor([[1.0, 0.0]]), torch.full((1, 2, 3), 0.25)
    torch.testing.assert_close(estimate(plain, scores(total), None, values), plain(total, values=values))
    torch.testing.assert_close(estimate(rloo, scores(total), None, values), rloo(total))
