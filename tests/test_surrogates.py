"""Surrogates by hand, beyond PPO's clip (tests/test_objectives.py): two-sided clip, CISPO, SAPO, GMPO, VESPO, DPPO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.objectives import Objective, call_surrogate, loss_and_terms
from grpo_toolbox.ops import AGGREGATIONS, KL, Denominators
from grpo_toolbox.ratios import RATIO_LEVELS
from grpo_toolbox.surrogates import cispo, clipped, dppo, gmpo, sapo, vespo

Surrogate = Callable[..., tuple[Tensor, Tensor]]


def _row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _one(surrogate: Surrogate, ratio: float, advantage: float, logp: float = -1.0) -> tuple[float, float, bool]:
    """Return loss, ∂loss/∂log π and whether the token counts as clipped, for a row of one token."""
    now = _row([logp]).requires_grad_()
    old = now.detach() - math.log(ratio)
    loss, is_clipped = call_surrogate(
        Objective(surrogate), now, old, now - old, _row([advantage]), torch.ones(1, 1, dtype=torch.bool)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), now)
    return loss.item(), gradient.item(), bool(is_clipped)


# ---- two-sided clip --------------------------------------------------------------------------------------------------

# ε = .2, ε_high = .28. For A = −1 the loss is max(min(ρ, δ), clip(ρ, .8, 1.28)); ∂loss/∂log π = ρ where ρ is taken.
#   δ = 4    ρ = 10   max(4, 1.28) = 4: bounded, no gradient; without δ the loss is 10 and so is its gradient
#   δ = 1.2  ρ = 1.35 max(1.2, 1.28) = 1.28: the clipped branch wins, no gradient (why δ belongs above 1 + ε_high)
#   δ = 1.2  ρ = 1.25 max(1.2, 1.25) = 1.25: both branches see ρ, the gradient stays
# For A = +1 it is −min(min(ρ, δ), clip ρ):
#   δ = 4    ρ = 1.1  −1.1, untouched; ρ = 1.35 −1.28 as without δ
#   δ = 1.2  ρ = 1.25 −1.2: here δ is the tighter bound, no gradient
TWO_SIDED = [
    (4.0, 10.0, -1.0, 4.0, 0.0),
    (None, 10.0, -1.0, 10.0, 10.0),
    (1.2, 1.35, -1.0, 1.28, 0.0),
    (1.2, 1.25, -1.0, 1.25, 1.25),
    (4.0, 1.1, 1.0, -1.1, -1.1),
    (4.0, 1.35, 1.0, -1.28, 0.0),
    (1.2, 1.25, 1.0, -1.2, 0.0),
    (4.0, 0.7, -1.0, 0.8, 0.0),
]


@pytest.mark.parametrize(("delta", "ratio", "advantage", "loss", "gradient"), TWO_SIDED)
def test_two_sided_clip_by_hand(delta: float | None, ratio: float, advantage: float, loss: float, gradient: float):
    surrogate = partial(clipped, clip_eps=0.2, clip_eps_high=0.28, delta=delta)
    assert _one(surrogate, ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), gradient == 0)


@pytest.mark.parametrize("delta", [None, 0.7, 1.0, 1.1, 1.25, 3.0])
def test_clipped_means_a_gradient_of_exactly_zero(delta: float | None):
    surrogate = partial(clipped, clip_eps=0.2, clip_eps_high=0.28, delta=delta)
    for ratio, advantage in itertools.product((0.1, 0.65, 0.75, 0.9, 1.05, 1.15, 1.26, 1.3, 2.9, 3.1), (1.0, -1.0)):
        _, gradient, is_clipped = _one(surrogate, ratio, advantage)
        assert is_clipped == (gradient == 0), (delta, ratio, advantage)


def test_delta_above_the_clip_range_is_dual_clip():
    # Ye et al. (2020): maximise max(min(ρA, clip(ρ)A), cA) where A < 0, and PPO's min where A > 0
    for ratio, advantage in itertools.product((0.3, 0.9, 1.1, 1.5, 2.9, 3.1, 50.0), (-2.0, 1.5)):
        ppo = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        dual = max(ppo, 3.0 * advantage) if advantage < 0 else ppo
        assert _one(partial(clipped, delta=3.0), ratio, advantage)[0] == pytest.approx(-dual)


# ---- CISPO -----------------------------------------------------------------------------------------------------------

# Loss −w·A·log π with log π = −1 held apart from w; its gradient is −w·A.
#   cap 1 + 4 = 5:        ρ = 6, A = 2: w = 5, loss −5·2·(−1) = 10, gradient −10; ρ = 3: w = 3, loss 6
#   no lower bound:       ρ = .01: w = .01; with clip_eps = .2: w = .8
#   A < 0 is capped, too: ρ = 6, A = −1: w = 5, loss −5
CISPO = [
    ({}, 6.0, 2.0, 10.0, True),
    ({}, 3.0, 2.0, 6.0, False),
    ({}, 0.01, 2.0, 0.02, False),
    ({"clip_eps": 0.2}, 0.01, 2.0, 1.6, True),
    ({}, 6.0, -1.0, -5.0, True),
    ({"clip_eps_high": 0.28}, 6.0, 2.0, 2.56, True),
    ({"clip_eps_high": 0.28, "ratio_cap": 5.5}, 6.0, 2.0, 11.0, True),
]


@pytest.mark.parametrize(("options", "ratio", "advantage", "loss", "is_clipped"), CISPO)
def test_cispo_by_hand(options: dict[str, float], ratio: float, advantage: float, loss: float, is_clipped: bool):
    value, gradient, flag = _one(partial(cispo, **options), ratio, advantage)
    assert (value, gradient) == (pytest.approx(loss), pytest.approx(-loss))  # log π = −1
    assert flag == is_clipped


def test_cispo_trains_every_token_where_ppo_trains_none():
    for ratio, advantage in ((1.5, 1.0), (0.5, -1.0)):
        assert _one(clipped, ratio, advantage)[1] == 0
        assert _one(cispo, ratio, advantage)[1] == pytest.approx(-ratio * advantage)


def test_a_cap_of_two_tenths_is_only_to_be_had_by_its_own_name():
    # 1 + .2 leaves an on-policy token alone; the absolute cap .2 would train it with a fifth of its gradient
    assert _one(partial(cispo, clip_eps_high=0.2), 1.0, 1.0)[1] == -1.0
    assert _one(partial(cispo, ratio_cap=0.2), 1.0, 1.0)[1] == pytest.approx(-0.2)


# ---- SAPO ------------------------------------------------------------------------------------------------------------


def test_sapo_by_hand():
    # τ = 2, ρ = 1.5, A = 3: −(4/2)·σ(2·.5)·3 = −6·σ(1) = −6·.731059 = −4.386352
    # gradient in log π: −4·σ(1)·σ(−1)·A·ρ = −4·.196612·3·1.5 = −3.539015
    loss, gradient, is_clipped = _one(partial(sapo, tau_pos=2.0), 1.5, 3.0)
    assert (loss, gradient) == (pytest.approx(-4.386352, abs=1e-6), pytest.approx(-3.539015, abs=1e-6))
    assert not is_clipped


def test_sapo_on_policy_is_worth_two_over_tau_and_has_the_policy_gradient():
    # σ(0) = ½: loss −(2/τ)·A; (4/τ)·τ·¼ = 1: gradient −A. τ = 1 for A > 0 and 1.05 else
    assert _one(sapo, 1.0, 2.0)[:2] == (pytest.approx(-4.0, abs=1e-12), pytest.approx(-2.0, abs=1e-12))
    assert _one(sapo, 1.0, -2.0)[:2] == (pytest.approx(4 / 1.05, abs=1e-12), pytest.approx(2.0, abs=1e-12))


def test_sapo_fades_out_softly_and_sooner_for_bad_answers():
    # |gradient|/ρ = 4σ(τ(ρ − 1))σ(−τ(ρ − 1)) = 1/cosh²(τ(ρ − 1)/2): ρ = 3 gives 1/cosh²(τ) with τ = 1 and 1.05
    good, bad = _one(sapo, 3.0, 1.0)[1], _one(sapo, 3.0, -1.0)[1]
    assert good == pytest.approx(-3 / math.cosh(1.0) ** 2)
    assert bad == pytest.approx(3 / math.cosh(1.05) ** 2)
    assert abs(bad) < abs(good)


# ---- GMPO ------------------------------------------------------------------------------------------------------------

# log ρ = .1, .6, −.8 and a masked token, ε = .4:
#   A = +1: .6 → .4, mean (.1 + .4 − .8)/3 = −.1: loss −e^−.1 = −.904837, gradient of the row −.301612 per free token
#   A = −1: −.8 → −.4, mean (.1 + .6 − .4)/3 = .1: loss e^.1 = 1.105171, gradient .368390 per free token
LOG_RHO = [0.1, 0.6, -0.8, math.nan]


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient", "is_clipped"),
    [
        (1.0, -0.904837, [-0.301612, 0.0, -0.301612], [False, True, False]),
        (-1.0, 1.105171, [0.368390, 0.368390, 0.0], [False, False, True]),
    ],
)
def test_gmpo_by_hand(advantage: float, loss: float, gradient: list[float], is_clipped: list[bool]):
    mask = torch.tensor([[True, True, True, False]])
    logps = (_row([-1.0, -2.0, -3.0, 0.0]) + _row(LOG_RHO)).requires_grad_()
    value, terms = loss_and_terms(
        Objective(gmpo),
        logps=logps,
        old_logps=_row([-1.0, -2.0, -3.0, 0.0]),
        advantages=_row([advantage]),
        mask=mask,
        denominators=Denominators(1, 3, 8),
    )
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert torch.autograd.grad(value, logps)[0].tolist() == [pytest.approx([*gradient, 0.0], abs=1e-6)]
    assert terms["clip_fraction"].tolist() == [[*is_clipped, False]]


# ---- VESPO -----------------------------------------------------------------------------------------------------------

# φ(w) = wᵏ·exp(λ(1 − w)) with (2, 3) where A ≥ 0 and (3, 2) where A < 0; φ(1) = 1, the maximum is at w = k/λ:
#   A > 0, w = 2/3: (2/3)²·e = .444444·2.718282 = 1.208125      w = 4: 16·e⁻⁹ = .001975
#   A < 0, w = 3/2: (3/2)³·e⁻¹ = 3.375·.367879 = 1.241593       w = ¼: e^1.5/64 = .070026
PHI = [(1.0, 1.0, 1.0), (-1.0, 1.0, 1.0), (1.0, 2 / 3, 1.208125), (1.0, 4.0, 0.001975)]
PHI += [(-1.0, 1.5, 1.241593), (-1.0, 0.25, 0.070026)]


@pytest.mark.parametrize(("advantage", "w", "phi"), PHI)
def test_vespo_weighs_a_row_by_the_product_of_its_ratios(advantage: float, w: float, phi: float):
    # two real tokens that share log w as 3 to −2, and a masked one; loss −φ·A·log π
    logps = _row([-1.0, -0.5, math.nan]).requires_grad_()
    gaps = _row([3 * math.log(w), -2 * math.log(w), 1.0])
    mask = torch.tensor([[True, True, False]])
    loss, _ = loss_and_terms(
        Objective(vespo, loss_agg="token_mean"),
        logps=logps,
        old_logps=logps.detach() - gaps,
        advantages=_row([advantage]),
        mask=mask,
        denominators=Denominators(1, 2, 8),
    )
    assert loss.item() == pytest.approx(phi * advantage * 1.5 / 2, abs=1e-6)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [pytest.approx([-phi * advantage / 2] * 2 + [0.0], abs=1e-6)]


def test_vespo_keeps_its_weight_finite():
    # log w is kept in [log 1e-8, 20]: −60 gives 1e-16·e^(3 − 3e-8) = 2.0085e-15; +60 gives e^(43 − 3e^20) = 0
    for gap, phi in ((-2.0, 2.0085e-15), (2.0, 0.0)):
        logps = torch.full((1, 30), -1.0, dtype=torch.float64)
        loss, _, terms = vespo(logps, logps - gap, torch.ones(1, 30), mask=torch.ones(1, 30, dtype=torch.bool))
        assert loss[0].tolist() == pytest.approx([phi] * 30, rel=1e-4)
        assert terms["vespo/phi_mean"].tolist() == pytest.approx([phi], rel=1e-4)


# ---- DPPO ------------------------------------------------------------------------------------------------------------

# π_old → π, A; weight ρ; D_tv = |π − π_old| up to .15; D_kl = π_old·ln(π_old/π) + (1−π_old)·ln((1−π_old)/(1−π)) up to
# .05. Only outward moves (up with A > 0, down with A < 0) are dropped; weights end at 20.
#   .001 → .01  ρ = 10      D_tv .009   D_kl .001·ln .1 + .999·ln(.999/.99) = −.002303 + .009041 = .0067
#   .99  → .8   ρ = .808081 D_tv .19    D_kl .99·ln 1.2375 + .01·ln .05 = .210962 − .029957 = .1810
#   .5   → .7   ρ = 1.4     D_tv .2     D_kl .5·ln(5/7) + .5·ln(5/3) = −.168236 + .255413 = .0872
#   .5   → .64  ρ = 1.28    D_tv .14    D_kl .5·ln .78125 + .5·ln(.5/.36) = −.123430 + .164252 = .0408
#   .3   → .44  ρ = 22/15   D_tv .14    D_kl .3·ln(15/22) + .7·ln(1.25) = −.114898 + .156200 = .0413
#   .05  → .19  ρ = 3.8     D_tv .14    D_kl .05·ln(5/19) + .95·ln(.95/.81) = −.066750 + .151446 = .0847
#   .001 → .05  ρ = 50 → 20 D_tv .049   D_kl .001·ln .02 + .999·ln(.999/.95) = −.003912 + .050243 = .0463
DPPO = [
    (0.001, 0.01, 1.0, 10.0, 10.0),
    (0.99, 0.8, -1.0, 0.0, 0.0),
    (0.99, 0.8, 1.0, 0.808081, 0.808081),
    (0.5, 0.7, 2.0, 0.0, 0.0),
    (0.5, 0.7, -2.0, 1.4, 1.4),
    (0.5, 0.64, 1.0, 1.28, 1.28),
    (0.3, 0.44, 1.0, 1.466667, 1.466667),
    (0.05, 0.19, 1.0, 3.8, 0.0),
    (0.001, 0.05, 1.0, 20.0, 20.0),
]


@pytest.mark.parametrize(("old", "now", "advantage", "tv_weight", "kl_weight"), DPPO)
def test_dppo_by_hand(old: float, now: float, advantage: float, tv_weight: float, kl_weight: float):
    for surrogate, weight in ((dppo, tv_weight), (partial(dppo, divergence="kl", max_divergence=0.05), kl_weight)):
        loss, gradient, is_clipped = _one(surrogate, now / old, advantage, math.log(now))
        assert gradient == pytest.approx(-weight * advantage, abs=1e-6)
        assert loss == pytest.approx(-weight * advantage * math.log(now), abs=1e-5)
        assert is_clipped == (weight == 0 or now / old > 20)


def test_dppo_lets_a_rare_token_grow_where_the_ratio_would_not():
    # ρ = 10 is far outside PPO's range; ρ = .85 is inside it although a seventh of all probability has moved
    assert _one(clipped, 10.0, 1.0, math.log(0.01))[1] == 0
    assert _one(dppo, 10.0, 1.0, math.log(0.01))[1] == pytest.approx(-10)
    assert _one(clipped, 0.84, -1.0, math.log(0.8316))[1] == pytest.approx(0.84)
    assert _one(dppo, 0.84, -1.0, math.log(0.8316))[1] == 0


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_at_the_edges_is_finite(divergence: Any):
    for now, old in ((0.0, -1.0), (0.0, 0.0), (-1.0, 0.0), (-200.0, 0.0), (0.0, -200.0), (-1e-9, -1e-9), (-3.0, 5.0)):
        leaf = _row([now, now]).requires_grad_()
        loss, _ = dppo(leaf, _row([old, old]), _row([1.0, -1.0]), divergence=divergence)
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), leaf)[0].isfinite().all()


def test_dppo_refuses_a_divergence_that_there_is_not():
    with pytest.raises(ConfigError, match=r"objective\.divergence='js' is not an option: kl, tv"):
        dppo(_row([-1.0]), _row([-1.0]), _row([1.0]), divergence="js")  # type: ignore[arg-type]


# ---- constants stay constant -----------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
OLD = torch.tensor([[-1.0, -0.7, -2.0, -1.5], [-0.3, -1.1, -2.2, 0.0]], dtype=torch.float64)
NOW = OLD + torch.tensor([[0.5, 0.9, 1.1, 6.6], [0.6, 0.95, 1.4, 1.0]], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[1.3, -0.2, 0.4, 2.0], [-0.8, -0.6, -1.1, 0.0]], dtype=torch.float64)


CONSTANT = {
    "cispo": cispo,
    "vespo": vespo,
    "dppo": partial(dppo, max_divergence=2.0),  # nothing is dropped
    "dppo_kl": partial(dppo, divergence="kl", max_divergence=99.0),
}


@pytest.mark.parametrize("kl", [None, *KL])
@pytest.mark.parametrize("level", RATIO_LEVELS)
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("name", CONSTANT)
def test_constant_weights_against_finite_differences(name: str, loss_agg: str, level: str, kl: str | None):
    """With π_old moving along with π the ratio stays what it was: a difference quotient sees log π and the KL alone."""
    beta = {} if kl is None else {"beta": 0.3, "kl": kl}
    objective = Objective(CONSTANT[name], loss_agg=loss_agg, ratio_level=level, **beta)

    def loss(x: Tensor, old: Tensor) -> Tensor:
        counts = Denominators(3, 11, 8, torch.arange(2.0, 2.0 + len(NOW)).unsqueeze(1))
        columns = {"old_logps": old, "ref_logps": OLD - 0.7, "advantages": ADVANTAGES, "mask": MASK}
        return loss_and_terms(objective, logps=x, denominators=counts, **columns)[0]

    assert torch.autograd.gradcheck(lambda x: loss(x, x.detach() - (NOW - OLD)), (NOW.clone().requires_grad_(),))
    leaf = NOW.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, OLD), leaf)
    (moving,) = torch.autograd.grad(loss(leaf, leaf.detach() - (NOW - OLD)), leaf)
    torch.testing.assert_close(gradient, moving, atol=1e-14, rtol=1e-12)
    assert (gradient[MASK] != 0).all()


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_weights_on_policy_have_the_policy_gradient(name: str):
    # weight 1: ∂(−A·log π)/∂log π = −A, over N·|o| = 1·4
    leaf = NOW[:1].clone().requires_grad_()
    loss, _ = loss_and_terms(
        Objective(CONSTANT[name]),
        logps=leaf,
        advantages=ADVANTAGES[:1],
        mask=MASK[:1],
        denominators=Denominators(1, 4, 8),
    )
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], -ADVANTAGES[:1] / 4, atol=1e-15, rtol=0)
