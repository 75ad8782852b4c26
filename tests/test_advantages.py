"""Advantage estimators by hand and by their properties. Ids such as e08.1 number checked cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_toolbox.advantages import ADVANTAGES as ALL
from grpo_toolbox.advantages import (
    batch_normalized,
    dr_grpo,
    estimate,
    gdpo,
    group_relative,
    reinforce_pp,
    rloo,
)
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import Scores

NONE = math.nan
EIGHT = torch.tensor([[1.0, 0, 1, 0, 0, 1, 0, 0]])
"""3 of 8 right: mean .375, population variance .375·.625 = .234375, std .484123; sample variance ·8/7, std .517549."""


def _eight(right: float, wrong: float) -> list[float]:
    return [right if reward else wrong for reward in EIGHT[0].tolist()]


ADVANTAGES = {name: function for name, function in ALL.items() if name != "gae"}  # tests/test_gae.py
GROUP_ESTIMATORS = [name for name in ADVANTAGES if name != "reinforce_pp"]  # that one has no group baseline


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        (partial(group_relative, std="population", eps=0), 1.2910, -0.7746),  # .625/.484123, −.375/.484123
        (group_relative, 1.2074, -0.7244),  # .625/(.517549 + 1e-4), −.375/(.517549 + 1e-4)
        (dr_grpo, 0.625, -0.375),  # 1 − .375, 0 − .375
        (rloo, 0.714286, -0.428571),  # 1 − 2/7, 0 − 3/7
        (batch_normalized, 1.2074, -0.7244),  # one group is the whole batch
    ],
)
def test_three_right_of_eight(estimator: Callable[[Tensor], Tensor], right: float, wrong: float):
    assert estimator(EIGHT)[0].tolist() == pytest.approx(_eight(right, wrong), abs=5e-5)
    assert right * 3 + wrong * 5 == pytest.approx(0, abs=1e-3)


def test_rloo_and_dr_grpo_to_six_digits():
    assert rloo(EIGHT)[0].tolist() == pytest.approx(_eight(0.714286, -0.428571), abs=5e-7)
    assert torch.equal(dr_grpo(EIGHT)[0], torch.tensor(_eight(0.625, -0.375)))


def test_sample_and_population_differ_by_a_constant_factor():
    sample, population = group_relative(EIGHT, eps=0), group_relative(EIGHT, eps=0, std="population")
    torch.testing.assert_close(sample, population * math.sqrt(7 / 8))


def test_case_e01_3_rloo():
    # 1 − 0; 0 − (1 + 0 + 0)/3
    assert rloo(torch.tensor([[1.0, 0, 0, 0]]))[0].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_case_e02_1_z_scores_of_one_outlier():
    # mean .475; squares 7·.075² + .525² = .315, /7 = .045, std .212132; −.075 and .525 over .212232
    group = torch.tensor([[0.4] * 7 + [1.0]])
    assert group_relative(group)[0].tolist() == pytest.approx([-0.3534] * 7 + [2.4737], abs=5e-5)
    # (n − 1)/√n bounds every z-score; a lone outlier reaches it
    assert group_relative(group, eps=0).max().item() == pytest.approx(7 / math.sqrt(8))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_case_e02_4_the_others_without_spread_are_no_divisor(name: str):
    # rloo: 1 − .4 = .6. No estimator divides by the (zero) spread of the other seven.
    advantages = ADVANTAGES[name](torch.tensor([[0.4] * 7 + [1.0]]))
    assert advantages.isfinite().all()
    assert advantages.abs().max() < 10
    assert rloo(torch.tensor([[0.4] * 7 + [1.0]]))[0, -1].item() == pytest.approx(0.6)


def test_case_e08_1_groups_are_normalised_apart():
    # (1,0,1,1): mean .75, sample std .5: .25/.5001 and −.75/.5001. Batch-wide the zeros would get −.7244.
    rewards = torch.tensor([[1.0, 0, 1, 1], [0, 0, 0, 0]])
    advantages = group_relative(rewards)
    assert advantages[0].tolist() == pytest.approx([0.4999, -1.4997, 0.4999, 0.4999], abs=5e-5)
    assert torch.equal(advantages[1], torch.zeros(4))


def test_batch_normalized_centres_by_group_and_divides_by_the_batch():
    # rewards (1,0,1,1) and (0,0,0,2): group means .75 and .5; batch mean .625,
    # squares around it 3·.375² + 4·.625² + 1.375² = .421875 + 1.5625 + 1.890625 = 3.875; /7 = .553571, std .744024
    rewards = torch.tensor([[1.0, 0, 1, 1], [0, 0, 0, 2]])
    expected = [[0.25, -0.75, 0.25, 0.25], [-0.5, -0.5, -0.5, 1.5]]
    advantages = batch_normalized(rewards, eps=0)
    torch.testing.assert_close(advantages, torch.tensor(expected) / 0.744024, atol=1e-5, rtol=0)
    population = batch_normalized(rewards, eps=0, std="population")  # /8 = .484375, std .695971
    torch.testing.assert_close(population, torch.tensor(expected) / 0.695971, atol=1e-5, rtol=0)
    assert batch_normalized(rewards, eps=0.5)[1, 3].item() == pytest.approx(1.5 / 1.244024, abs=1e-5)


def test_batch_normalized_by_the_std_of_the_batchs_advantages():
    # the same rewards: their differences from the group's mean are .25, −.75, .25, .25 and −.5, −.5, −.5, 1.5;
    # squares 3·.0625 + .5625 + 3·.25 + 2.25 = 3.75; /7 = .535714, std .731925; /8 = .46875, std .684653
    rewards = torch.tensor([[1.0, 0, 1, 1], [0, 0, 0, 2]])
    expected = torch.tensor([[0.25, -0.75, 0.25, 0.25], [-0.5, -0.5, -0.5, 1.5]])
    own = partial(batch_normalized, std_of="advantages", eps=0)
    torch.testing.assert_close(own(rewards), expected / 0.731925, atol=1e-5, rtol=0)
    torch.testing.assert_close(own(rewards, std="population"), expected / 0.684653, atol=1e-5, rtol=0)
    # easy and hard prompts far apart: the rewards' std counts the distance, the advantages' does not
    apart = rewards + torch.tensor([[0.0], [100.0]])
    torch.testing.assert_close(own(apart), own(rewards))
    assert batch_normalized(apart).abs().max() < 0.05
    # a row that has no others is in no std: group 3 changes nothing
    lone = torch.cat([rewards, torch.tensor([[7.0, NONE, NONE, NONE]])])
    torch.testing.assert_close(own(lone), torch.cat([own(rewards), torch.zeros(1, 4)]))
    assert torch.equal(own(torch.ones(2, 4)), torch.zeros(2, 4))
    with pytest.raises(ConfigError, match=r"advantage\.std_of='reward' is not an option.*Did you mean rewards\?"):
        batch_normalized(rewards, std_of="reward")


# ---- None ------------------------------------------------------------------------------------------------------------

# The scored rewards are 1, 0, 1: mean 2/3, squares (1 + 4 + 1)/9 = 2/3
HOLE = torch.tensor([[1.0, NONE, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (group_relative, [0.57726, 0, -1.15450, 0.57726]),  # std √(2/3/2) = .577350; ⅓/.577450, −⅔/.577450
        (partial(group_relative, std="population"), [0.70696, 0, -1.41391, 0.70696]),  # √(2/3/3) = .471405
        (dr_grpo, [1 / 3, 0, -2 / 3, 1 / 3]),
        (rloo, [0.5, 0, -1.0, 0.5]),  # 1 − (0 + 1)/2; 0 − (1 + 1)/2
        (batch_normalized, [0.57726, 0, -1.15450, 0.57726]),
    ],
)
def test_a_row_without_reward_leaves_every_mean(estimator: Callable[[Tensor], Tensor], expected: list[float]):
    assert estimator(HOLE)[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_batch_normalized_leaves_rows_without_reward_out_of_the_batch_too():
    # scored: 1, 0 | 1, 0, 0, 0: mean ⅓, squares 2·4/9 + 4·1/9 = 12/9; /5 = .266667, std .516398
    rewards = torch.tensor([[1.0, NONE, 0.0, NONE], [1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.5, 0, -0.5, 0], [0.75, -0.25, -0.25, -0.25]]) / 0.516398
    torch.testing.assert_close(batch_normalized(rewards, eps=0), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    "group",
    [
        [NONE, NONE, NONE, NONE],  # d02.2: no signal
        [NONE, 1.0],  # d02.3: one scored sample has no baseline
        [1.0, 1.0, 1.0, NONE],
        [0.1] * 7,  # .1 is no binary fraction: seven of them do not average to .1
        [1e6 + 0.01] * 8,
        [-3e-30] * 5,
        [0.0] * 3,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_no_spread_is_exactly_zero(name: str, group: list[float], dtype: torch.dtype, eps: float):
    options = {"eps": eps} if name in ("group_relative", "batch_normalized") else {}
    advantages = ADVANTAGES[name](torch.tensor([group], dtype=dtype), **options)
    assert torch.equal(advantages, torch.zeros(1, len(group), dtype=dtype))


@pytest.mark.parametrize("estimator", [group_relative, partial(group_relative, eps=0), dr_grpo, rloo])
def test_groups_without_signal_do_not_disturb_their_neighbours(estimator: Callable[[Tensor], Tensor]):
    rewards = torch.tensor([[NONE] * 4, [1.0, 0, 1, 1], [NONE, NONE, 2.0, NONE], [0.1] * 4])
    advantages = estimator(rewards)
    torch.testing.assert_close(advantages[1], estimator(rewards[1:2])[0])
    assert torch.equal(advantages[[0, 2, 3]], torch.zeros(3, 4))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_sums_that_differ_in_rounding_alone_have_no_spread(name: str):
    # .1 + .2 and .3 are the same score on two ways, 5.6e-17 apart
    advantages = ADVANTAGES[name](torch.tensor([[0.1 + 0.2, 0.3, 0.3, 0.3]], dtype=torch.float64))
    assert torch.equal(advantages, torch.zeros(1, 4, dtype=torch.float64))


def test_small_but_real_spread_on_a_large_reward_is_kept():
    # 1e6 and 1e6 + 1 are exact in float32: mean 1e6 + .25, sample std .5
    rewards = torch.tensor([[1e6, 1e6, 1e6, 1e6 + 1]])
    assert dr_grpo(rewards)[0].tolist() == [-0.25, -0.25, -0.25, 0.75]
    assert group_relative(rewards)[0].tolist() == pytest.approx([-0.4999, -0.4999, -0.4999, 1.4997], abs=1e-4)
    # 2⁻¹⁰ on a thousand million is 8192 steps of float64: ±.5/√⅓ in units of it
    far = 1e9 + 2**-10 * torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    assert group_relative(far, eps=0)[0].tolist() == pytest.approx([-0.8660, 0.8660, -0.8660, 0.8660], abs=1e-4)


def test_eps_zero_divides_by_the_std_itself():
    # (0, 1): mean ½, sample std √½, so ±.5/.707107 = ±.707107; a residue-sized eps would show in the sixth digit
    assert group_relative(torch.tensor([[0.0, 1.0]]), eps=0)[0].tolist() == pytest.approx([-0.707107, 0.707107])


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_case_e01_2_a_group_of_one_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"set rollout\.group_size to 2 or more"):
        ADVANTAGES[name](torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_case_d02_5_an_infinite_reward_is_refused(name: str, reward: float):
    with pytest.raises(ConfigError, match=f"{name} got a reward of -?inf"):
        ADVANTAGES[name](torch.tensor([[reward, 0.0]]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_d02_6_a_reward_beyond_float32_is_refused(name: str, dtype: torch.dtype):
    with pytest.raises(ConfigError, match="overflow float32"):
        ADVANTAGES[name](torch.tensor([[1e39, 0.0]], dtype=dtype))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_largest_rewards_allowed_stay_finite(name: str):
    assert ADVANTAGES[name](torch.tensor([[1e38, -1e38, 0.0]])).isfinite().all()
    assert ADVANTAGES[name](torch.tensor([[1e38, -1e38]])).isfinite().all()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("shape", [(4,), (2, 2, 2)])
def test_other_shapes_are_refused(name: str, shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match=r"takes rewards of shape \(P, G\)"):
        ADVANTAGES[name](torch.zeros(shape))


@pytest.mark.parametrize("name", ["group_relative", "batch_normalized", "gdpo", "reinforce_pp"])
@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_an_eps_that_turns_or_drowns_every_advantage_is_refused(name: str, eps: float):
    with pytest.raises(ConfigError, match=r"advantage\.eps=.* must be a finite number of at least 0"):
        ADVANTAGES[name](EIGHT, eps=eps)


@pytest.mark.parametrize("name", ["group_relative", "batch_normalized"])
def test_unknown_std_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"population, sample\. Did you mean population"):
        ADVANTAGES[name](EIGHT, std="populaton")


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_number_rewards_get_fractional_advantages(name: str, dtype: torch.dtype):
    torch.testing.assert_close(ADVANTAGES[name](EIGHT.to(dtype)), ADVANTAGES[name](EIGHT))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rewards_in_half_precision_get_advantages_in_float32(name: str, dtype: torch.dtype):
    """Those of float32: 3/8 is exact in all, and 1.2074 is not. RLOO's of ±60000 would be infinite in float16."""
    assert torch.equal(ADVANTAGES[name](EIGHT.to(dtype)), ADVANTAGES[name](EIGHT))
    assert ADVANTAGES[name](torch.tensor([[6e4, -6e4, 6e4]], dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_group_at_all_has_no_advantages(name: str):
    assert ADVANTAGES[name](torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_are_not_written_into(name: str):
    rewards = torch.tensor([[1.0, NONE, 0.0, 1.0], [0.1] * 4])
    before = rewards.clone()
    ADVANTAGES[name](rewards)
    assert torch.equal(rewards.nan_to_num(-7), before.nan_to_num(-7))


# ---- properties ------------------------------------------------------------------------------------------------------

SCORES = st.integers(-320, 320).map(lambda value: value / 64)  # exact in float64, as are their sums and shifts


@st.composite
def reward_tables(draw: st.DrawFn, holes: bool = True) -> Tensor:
    """(P, G) float64 rewards, some of them None."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    entry = st.one_of(SCORES, st.just(NONE)) if holes else SCORES
    cells = draw(st.lists(entry, min_size=groups * size, max_size=groups * size))
    return torch.tensor(cells, dtype=torch.float64).reshape(groups, size)


def _close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


quick = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@quick
@given(rewards=reward_tables())
def test_every_group_sums_to_zero_and_is_finite(name: str, rewards: Tensor):
    advantages = ADVANTAGES[name](rewards)
    assert advantages.shape == rewards.shape
    assert advantages.isfinite().all()
    _close(advantages.sum(dim=1), torch.zeros(len(rewards), dtype=torch.float64))
    assert torch.equal(advantages[rewards.isnan()], torch.zeros(int(rewards.isnan().sum()), dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(rewards=reward_tables(), shift=SCORES)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, rewards: Tensor, shift: float):
    _close(ADVANTAGES[name](rewards + shift), ADVANTAGES[name](rewards))


@pytest.mark.parametrize(
    ("estimator", "degree"),
    [(dr_grpo, 1), (rloo, 1), (partial(group_relative, eps=0), 0), (partial(batch_normalized, eps=0), 0)],
)
@quick
@given(rewards=reward_tables(), scale=st.floats(0.01, 100))
def test_scaled_rewards(estimator: Callable[[Tensor], Tensor], degree: int, rewards: Tensor, scale: float):
    _close(estimator(rewards * scale), estimator(rewards) * scale**degree)


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(rewards=reward_tables(), data=st.data())
def test_order_does_not_matter(name: str, rewards: Tensor, data: st.DataObject):
    columns = data.draw(st.permutations(range(rewards.shape[1])))
    rows = data.draw(st.permutations(range(rewards.shape[0])))
    _close(ADVANTAGES[name](rewards[rows][:, columns]), ADVANTAGES[name](rewards)[rows][:, columns])


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(rewards=reward_tables())
def test_a_row_without_reward_counts_as_if_it_had_not_been_sampled(name: str, rewards: Tensor):
    group = rewards[:1]
    scored = group[group.isfinite()].unsqueeze(0)
    if scored.shape[1] >= 2:
        _close(ADVANTAGES[name](group)[group.isfinite()].unsqueeze(0), ADVANTAGES[name](scored))


@quick
@given(rewards=reward_tables(holes=False))
def test_identities_between_estimators(rewards: Tensor):
    size = rewards.shape[1]
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (size - 1)
    _close(rloo(rewards), rewards - others)
    _close(rloo(rewards), dr_grpo(rewards) * size / (size - 1))
    _close(group_relative(rewards), dr_grpo(rewards) / (rewards.std(dim=1, keepdim=True) + 1e-4))
    _close(batch_normalized(rewards), dr_grpo(rewards) / (rewards.std() + 1e-4))
    _close(
        group_relative(rewards, std="population", eps=1e-6),
        dr_grpo(rewards) / (rewards.std(dim=1, keepdim=True, unbiased=False) + 1e-6),
    )


# ---- estimators that look beyond the total ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch_normalized", "gdpo"])
def test_beside_groups_with_spread_one_without_is_exactly_zero(name: str) -> None:
    rewards = torch.tensor([[1.0, NONE, 0.0, 1.0], [NONE] * 4, [2.0, 2.0, NONE, 2.0]])
    advantages = ADVANTAGES[name](rewards)
    assert torch.equal(advantages[1:], torch.zeros(2, 4))
    assert advantages[0].sum().abs() < 1e-6 < advantages[0, 0]


def test_gdpo_by_hand() -> None:
    # Reward 1: [1, 0] in group 1, [1, 1] in group 2; reward 2: [0, 0] and [.2, .6]; weights 1, 2; sample std; eps 0.
    # z₁ = ±1/√2 in group 1 and 0 in group 2; z₂ = 0 and ∓1/√2. s = [.7071, −.7071, −1.4142, 1.4142], mean 0,
    # sample std √((.5 + .5 + 2 + 2)/3) = √(5/3): A = ±√(.5·3/5) = ±√.3 and ±√(2·3/5) = ±√1.2
    components = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 0.2], [1.0, 0.6]]], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0])
    total = (components * weights).sum(-1)
    found = gdpo(total, components=components, weights=weights, eps=0.0)
    _close(found, torch.tensor([[0.3, 0.3], [1.2, 1.2]], dtype=torch.float64).sqrt() * torch.tensor([[1, -1], [-1, 1]]))


def test_gdpo_keeps_a_rare_failure_of_one_reward_that_the_sum_would_drown() -> None:
    # Eight completions: a 0/1 reward that fails once beside one of much larger spread; standardised first, the failure
    # weighs √7·… = 2.47 std of its own reward instead of a small part of the sum's spread.
    schema = torch.tensor([[1.0] * 7 + [0.0]])
    fields = torch.tensor([[0.0, 10.0, 0.0, 10.0, 0.0, 10.0, 0.0, 10.0]])
    components = torch.stack([schema, fields], dim=-1)
    summed = group_relative(schema + fields)
    apart = gdpo(schema + fields, components=components, weights=torch.ones(2))
    assert summed[0, 7] > 0.7  # the sum hardly sees it
    assert apart[0, 7] < 0 < apart[0, 1]


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("weights", [(0.1, 0.2, -0.3), (0.7, -0.7, 0.0)])
def test_gdpo_of_rewards_that_cancel_is_exactly_zero(weights: tuple[float, ...], eps: float):
    """.1·z + .2·z − .3·z is 0, and what rounding leaves of it is no spread: divided by its own std it would be ±1."""
    same = torch.tensor([[0.3, 0.9, 0.1], [0.2, 0.7, 0.5]]).unsqueeze(-1).expand(2, 3, 3)
    found = estimate(partial(gdpo, eps=eps), Scores(("a", "b", "c"), weights, same, torch.zeros(2, 3)))
    assert torch.equal(found, torch.zeros(2, 3))


def test_gdpo_of_one_reward_is_group_relative_then_the_batch() -> None:
    first = group_relative(EIGHT)
    _close(gdpo(EIGHT), (first - first.mean()) / (first.std() + 1e-4))


def test_reinforce_pp_by_hand() -> None:
    # no penalty: rewards 1, 0, 0, 1 have mean .5 and population std .5
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    _close(reinforce_pp(rewards, eps=0.0), torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))
    # penalties .1 .2 | .3: returns are 1 − .3, 1 − .2 and 0 − .3; mean .4, population std √((.09 + .16 + .49)/3)
    penalty = torch.tensor([[[0.1, 0.2], [0.3, math.nan]]], dtype=torch.float64)
    spread = math.sqrt((0.09 + 0.16 + 0.49) / 3)
    found = reinforce_pp(torch.tensor([[1.0, 0.0]], dtype=torch.float64), penalty=penalty, eps=0.0)
    expected = torch.tensor([[[0.3 / spread, 0.4 / spread], [-0.7 / spread, 0.0]]], dtype=torch.float64)
    _close(found, expected)


def test_rloo_bounds_the_reward_before_the_kl_is_taken_off() -> None:
    # 9, −9, .5 in [−1, 2] are 2, −1, .5; less the KL .5, 0, .25: 1.5, −1, .25. Minus the others' mean: 1.5 + .375,
    # −1 − .875, .25 − .25
    rewards = torch.tensor([[9.0, -9.0, 0.5]])
    penalty = torch.tensor([[[0.125, 0.375], [0.0, math.nan], [0.25, 0.0]]])
    _close(rloo(rewards, penalty=penalty, reward_min=-1.0, reward_max=2.0), torch.tensor([[1.875, -1.875, 0.0]]))
    # one bound alone; a row without reward is none of the others
    _close(rloo(torch.tensor([[9.0, NONE, 0.0]]), reward_max=1.0), torch.tensor([[1.0, 0.0, -1.0]]))
    _close(rloo(torch.tensor([[-9.0, 1.0]]), reward_min=0.0), torch.tensor([[-1.0, 1.0]]))


def test_rloo_divides_by_the_std_of_the_batchs_advantages() -> None:
    # groups (1, 0) and (4, 0): ±1 and ±4, squares 34 over 4 − 1 degrees: std √(34/3) = 3.366502, plus 1e-4
    found = rloo(torch.tensor([[1.0, 0.0], [4.0, 0.0]], dtype=torch.float64), normalize=True)
    one = 1 / (math.sqrt(34 / 3) + 1e-4)
    _close(found, torch.tensor([[one, -one], [4 * one, -4 * one]], dtype=torch.float64))
    # a group without spread counts with its zeros (2 over 3), one with a single scored row does not (2 over 1)
    equal, single = ([0.7, 0.7], 2 / 3), ([0.7, NONE], 2.0)
    for other, variance in (equal, single):
        found = rloo(torch.tensor([[1.0, 0.0], other], dtype=torch.float64), normalize=True)
        one = 1 / (math.sqrt(variance) + 1e-4)
        _close(found, torch.tensor([[one, -one], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.5, 0.5)])
def test_rloo_refuses_bounds_the_wrong_way_round(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=r"advantage\.reward_min=.* must be below advantage\.reward_max="):
        rloo(EIGHT, reward_min=low, reward_max=high)


@pytest.mark.parametrize("key", ["reward_min", "reward_max"])
def test_rloo_refuses_a_bound_that_is_no_number(key: str) -> None:
    """It would make NaN of every reward, which is "not applicable": nothing were ever learnt, without a word."""
    with pytest.raises(ConfigError, match=rf"advantage\.{key}=nan is not a number; null leaves"):
        rloo(EIGHT, **{key: math.nan})


def test_reinforce_pp_works_on_groups_of_one() -> None:
    assert reinforce_pp(torch.tensor([[1.0], [0.0]]), eps=0.0).tolist() == [[1.0], [-1.0]]


def test_estimate_hands_each_estimator_what_it_names() -> None:
    components = torch.tensor([[[1.0, 0.5], [0.0, 0.5]]])
    scores = Scores(("a", "b"), (1.0, 1.0), components, components.sum(-1))
    penalty = torch.tensor([[[0.1, 0.3], [0.2, math.nan]]])
    # RLOO's KL is that of the whole completion: rewards 1.5 − .4 and .5 − .2; each minus the other is ±.8
    _close(estimate(rloo, scores, penalty), torch.tensor([[0.8, -0.8]]))
    assert estimate(partial(reinforce_pp, eps=0.0), scores, penalty).shape == (1, 2, 2)
    _close(estimate(gdpo, scores), gdpo(scores.total, components=components, weights=torch.ones(2)))
