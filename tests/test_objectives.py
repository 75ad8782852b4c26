"""The objective by hand: clipped surrogate, REINFORCE, KL in the loss. Ids such as e07.1 number checked cases."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.advantages import group_relative
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.objectives import (
    OBJECTIVES,
    Objective,
    Surrogate,
    build_objective,
    call_surrogate,
    clipped,
    loss_and_terms,
    reinforce,
)
from grpo_toolbox.ops import AGGREGATIONS, KL, Denominators
from grpo_toolbox.ratios import CORRECTIONS, RATIO_LEVELS

SURROGATES: dict[str, Surrogate] = {
    "clipped": clipped,
    "clip_higher": partial(clipped, clip_eps=0.2, clip_eps_high=0.28),
    "two_sided": partial(clipped, delta=1.35),
    "reinforce": reinforce,
    "sapo": OBJECTIVES["sapo"],
    "gmpo": OBJECTIVES["gmpo"],
}
CONSTANT_WEIGHT = {"cispo", "vespo", "dppo"}
"""Their weight is not differentiated on purpose, so finite differences say nothing: tests/test_surrogates.py."""
EVERY = SURROGATES | {name: OBJECTIVES[name] for name in sorted(CONSTANT_WEIGHT)}
KLS = {name: {"kl": name} for name in KL} | {
    f"{name} unbiased": {"kl": name, "kl_unbiased": True} for name in KL if name != "k2"
}


def _row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _surrogate(ratio: float, advantage: float, **options: float) -> tuple[float, float, bool]:
    """Return loss, ascent gradient in ρ (that is −∂loss/∂ρ) and whether the token counts as clipped."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, is_clipped = clipped(logp, torch.zeros_like(logp), _row([advantage]), **options)
    (gradient,) = torch.autograd.grad(-loss.sum(), logp)
    return loss.item(), gradient.item() / ratio, bool(is_clipped)  # ∂ρ/∂log π = ρ


# ---- REINFORCE and on-policy -----------------------------------------------------------------------------------------


def test_reinforce_by_hand():
    # −A·log π: −2·log ½ = 1.386294 and 3·log ¼ = −4.158883; gradient −A whatever the old policy
    logps = _row([0.5, 0.25]).log().requires_grad_()
    loss, is_clipped = reinforce(logps, _row([-9.0, 9.0]), _row([2.0, -3.0]))
    assert loss[0].tolist() == pytest.approx([1.386294, -4.158883], abs=1e-6)
    assert torch.autograd.grad(loss.sum(), logps)[0].tolist() == [[-2.0, 3.0]]
    assert not is_clipped.any()


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_on_policy_every_surrogate_has_the_policy_gradient(surrogate: Surrogate):
    # ρ = 1: ∂(−ρA)/∂log π = −A = ∂(−A·log π)/∂log π, over N·|o| = 1·3
    logps = _row([-0.5, -1.0, -2.0]).requires_grad_()
    arguments: dict[str, Any] = {
        "logps": logps,
        "advantages": torch.tensor([[1.5]]),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "denominators": Denominators(1, 3, 3),
    }
    loss, terms = loss_and_terms(Objective(surrogate), **arguments)
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == [pytest.approx([-0.5] * 3)]
    assert torch.equal(terms["ratio"], torch.ones(1, 3, dtype=torch.float64))
    explicit, _ = loss_and_terms(Objective(surrogate), old_logps=logps.detach(), **arguments)
    assert torch.equal(torch.autograd.grad(explicit, logps)[0], gradient)


# ---- the whole objective ---------------------------------------------------------------------------------------------

# Two rows of four tokens, the second cut to three; every ratio is off the kinks .8, 1.2 and 1.28.
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
OLD = torch.tensor([[-1.0, -0.7, -2.0, -1.5], [-0.3, -1.1, -2.2, 0.0]], dtype=torch.float64)
NOW = OLD + torch.tensor([[0.5, 0.9, 1.1, 1.6], [0.6, 0.95, 1.4, 1.0]], dtype=torch.float64).log()
REFERENCE = NOW + torch.tensor([[0.3, -0.4, 0.1, 1.2], [-2.0, 0.05, 0.7, 0.0]], dtype=torch.float64)
PER_ROW = torch.tensor([[1.3], [-0.8]], dtype=torch.float64)
PER_TOKEN = torch.tensor([[1.3, -0.2, 0.4, 2.0], [-0.8, 0.6, -1.1, 0.0]], dtype=torch.float64)
COUNTS = Denominators(3, 11, 8, torch.tensor([[3.0], [4.0]]))  # of the step, of which these rows are a part


def _loss(objective: Objective, logps: Tensor, advantages: Tensor = PER_ROW, **changes: Tensor) -> Tensor:
    columns = {"old_logps": OLD, "ref_logps": REFERENCE, "mask": MASK, **changes}
    return loss_and_terms(objective, logps=logps, advantages=advantages, denominators=COUNTS, **columns)[0]


@pytest.mark.parametrize("advantages", [PER_ROW, PER_TOKEN], ids=["per_row", "per_token"])
@pytest.mark.parametrize("kl", KLS.values(), ids=KLS)
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_gradient_against_finite_differences(
    surrogate: Surrogate, loss_agg: str, kl: dict[str, Any], advantages: Tensor
):
    objective = Objective(surrogate, loss_agg=loss_agg, beta=0.3, **kl)
    assert torch.autograd.gradcheck(lambda x: _loss(objective, x, advantages), (NOW.clone().requires_grad_(),))


@pytest.mark.parametrize("level", ["sequence", "product"])  # sequence_token holds a constant, too
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_gradient_of_rows_ratios_against_finite_differences(surrogate: Surrogate, loss_agg: str, level: str):
    objective = Objective(surrogate, loss_agg=loss_agg, ratio_level=level)
    assert torch.autograd.gradcheck(lambda x: _loss(objective, x), (NOW.clone().requires_grad_(),))


def test_every_registered_surrogate_is_differentiated_here():
    assert set(OBJECTIVES) <= set(SURROGATES) | CONSTANT_WEIGHT


# What a token weighs in each aggregation, for the two rows above
WEIGHTS = {
    "seq_mean_token_mean": [[1 / 12], [1 / 9]],  # 1/(3·4), 1/(3·3)
    "token_mean": [[1 / 11], [1 / 11]],
    "prompt_mean": [
        [1 / 9],
        [1 / 12],
    ],  # 1/(3·3), 1/(3·4), for prompts whose completions have 3 and 4 tokens on average
    "seq_mean_token_sum": [[1 / 3], [1 / 3]],
    "constant": [[1 / 24], [1 / 24]],  # 1/(3·8)
}
# Schulman's estimators in r = log π_ref − log π
SLOPES = {"k1": torch.ones_like, "k2": lambda r: -r, "k3": lambda r: 1 - r.exp()}


@pytest.mark.parametrize("kl", KLS.values(), ids=KLS)
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", EVERY.values(), ids=EVERY)
def test_the_kl_reaches_the_gradient_as_documented(surrogate: Surrogate, loss_agg: str, kl: dict[str, Any]):
    gradients = []
    for beta in (0.0, 0.3):
        logps = NOW.clone().requires_grad_()
        loss = _loss(Objective(surrogate, loss_agg=loss_agg, beta=beta, **kl), logps)
        gradients.append(torch.autograd.grad(loss, logps)[0])
    weights = torch.tensor(WEIGHTS[loss_agg], dtype=torch.float64)
    slope = SLOPES[kl["kl"]](REFERENCE - NOW)
    if kl.get("kl_unbiased"):  # ∇(ρ·k) = ρ·(k + ∇k)
        slope = (NOW - OLD).exp() * (KL[kl["kl"]](NOW, REFERENCE) + slope)
    expected = torch.where(MASK, 0.3 * weights * slope, 0.0)
    torch.testing.assert_close(gradients[1] - gradients[0], expected, atol=1e-12, rtol=1e-9)
    assert (expected[MASK] != 0).all()


def test_the_surrogate_reaches_the_gradient_as_documented():
    # A = 1.3: ρ·A/12 where ρ ≤ 1.2, and 1.6 is clipped; A = −.8: .6 is clipped, then ρ·A/9; the last place is off
    logps = NOW.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-_loss(Objective(clipped), logps), logps)
    assert gradient[0].tolist() == pytest.approx([0.5 * 1.3 / 12, 0.9 * 1.3 / 12, 1.1 * 1.3 / 12, 0])
    assert gradient[1].tolist() == pytest.approx([0, -0.95 * 0.8 / 9, -1.4 * 0.8 / 9, 0])


def test_terms_for_the_log():
    objective = Objective(clipped, beta=0.1, kl="k1")
    logps = NOW.clone().requires_grad_()
    _, terms = loss_and_terms(
        objective,
        logps=logps,
        advantages=PER_ROW,
        mask=MASK,
        denominators=COUNTS,
        old_logps=OLD,
        ref_logps=REFERENCE,
    )
    assert not any(value.requires_grad for value in terms.values())
    assert terms["clip_fraction"].tolist() == [[False, False, False, True], [True, False, False, False]]
    assert terms["ratio"][MASK].tolist() == pytest.approx([0.5, 0.9, 1.1, 1.6, 0.6, 0.95, 1.4])
    assert terms["kl"][MASK].tolist() == pytest.approx([-0.3, 0.4, -0.1, -1.2, 2.0, -0.05, -0.7])
    assert not terms["kl_bounded_fraction"].any()


def test_without_beta_the_reference_is_not_looked_at():
    loss, terms = loss_and_terms(
        Objective(clipped),
        logps=NOW,
        advantages=PER_ROW,
        mask=MASK,
        denominators=COUNTS,
        old_logps=OLD,
        ref_logps=torch.full_like(NOW, math.nan),
    )
    assert loss.isfinite()
    assert set(terms) == {"clip_fraction", "ratio"}


@pytest.mark.parametrize("kl", KLS.values(), ids=KLS)
@pytest.mark.parametrize("surrogate", EVERY.values(), ids=EVERY)
def test_nan_off_the_mask_changes_nothing_whatever_is_switched_on(surrogate: Surrogate, kl: dict[str, Any]):
    """Each surrogate and KL beside every correction, level and aggregation, with bonus, dropped rows and anchors."""
    marks = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]], dtype=torch.bool)
    on = {"off_policy_threshold": 0.3, "entropy_coef": 0.2, "kl_cov_coef": 0.5, "beta": 0.3}
    for place, (level, correction) in enumerate(itertools.product(RATIO_LEVELS, CORRECTIONS)):
        loss_agg = [*AGGREGATIONS][place % len(AGGREGATIONS)]
        objective = Objective(surrogate, ratio_level=level, correction=correction, loss_agg=loss_agg, **on, **kl)

        def found(planted: float, objective: Objective = objective) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
            def column(values: Tensor) -> Tensor:
                return torch.where(MASK, values, planted)

            now, entropy = column(NOW).requires_grad_(), column(NOW.square()).requires_grad_()
            loss, terms = loss_and_terms(
                objective,
                logps=now,
                entropy=entropy,
                advantages=column(PER_TOKEN),
                old_logps=column(OLD),
                ref_logps=column(REFERENCE),
                sampler_logps=column(OLD + 0.1),
                trained=marks | ~MASK,
                anchored=~marks | ~MASK,
                mask=MASK,
                denominators=COUNTS,
            )
            return loss, *torch.autograd.grad(loss, (now, entropy)), terms

        *clean, _ = found(0.0)
        for value in (math.nan, math.inf, -math.inf):
            *dirty, terms = found(value)
            assert all(torch.equal(one, other) for one, other in zip(clean, dirty, strict=True)), (level, correction)
            assert all(term.double().isfinite().all() for term in terms.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("surrogate", EVERY.values(), ids=EVERY)
def test_half_precision_log_probs_are_computed_with_in_float32(surrogate: Surrogate, dtype: torch.dtype):
    """A ratio of e²⁰ overflows float16, and 0 times that is NaN; sums over a row keep three digits in bfloat16."""
    rounded = {"logps": NOW, "old_logps": OLD, "ref_logps": REFERENCE - 11, "sampler_logps": OLD + 30.0}
    objective = Objective(surrogate, beta=0.3, correction="sequence_truncate", off_policy_threshold=50.0)
    found = []
    for precision in (dtype, torch.float32):
        columns = {name: column.to(dtype).to(precision) for name, column in rounded.items()}
        columns["logps"].requires_grad_()
        columns["old_logps"][1, 1] = -60.0
        loss, _ = loss_and_terms(objective, mask=MASK, denominators=COUNTS, advantages=PER_ROW.float(), **columns)
        found.append((loss, torch.autograd.grad(loss, columns["logps"])[0]))
    (loss, gradient), (exact, exact_gradient) = found
    assert loss.isfinite()
    assert torch.equal(loss, exact)  # their dtype, too
    assert torch.equal(gradient, exact_gradient.to(dtype))


EDGES = {
    "ratio of e⁹⁴": (-0.5, -95.0, -1.0),
    "ratio of e⁻⁹⁴": (-95.0, -0.5, -1.0),
    "impossible under the reference": (-1.0, -1.0, -math.inf),
    "certain": (0.0, 0.0, 0.0),
    "ten thousand nats": (-1e4, -0.5, -1e4),
    "ten thousand nats ago": (-0.5, -1e4, -0.5),
}


@pytest.mark.parametrize("kl", KLS.values(), ids=KLS)
@pytest.mark.parametrize("surrogate", EVERY.values(), ids=EVERY)
def test_the_ends_of_what_log_probs_can_be_are_finite(surrogate: Surrogate, kl: dict[str, Any]):
    """Rows of one token at the ends of float32, each with both signs of the advantage and none."""
    rows = [(*edge, advantage) for edge in EDGES.values() for advantage in (1.5, -1.5, 0.0)]
    now, old, reference, advantages = torch.tensor(rows).T.unsqueeze(-1)
    for level, correction in itertools.product(RATIO_LEVELS, CORRECTIONS):
        leaf = now.clone().requires_grad_()
        loss, terms = loss_and_terms(
            Objective(surrogate, ratio_level=level, correction=correction, beta=0.1, **kl),
            logps=leaf,
            old_logps=old,
            ref_logps=reference,
            sampler_logps=old - 50.0,
            advantages=advantages,
            mask=torch.ones_like(now, dtype=torch.bool),
            denominators=Denominators(len(rows), len(rows), 1),
        )
        assert torch.autograd.grad(loss, leaf)[0].isfinite().all(), (level, correction)
        assert loss.isfinite()
        assert all(term.double().isfinite().all() for term in terms.values())


def test_nan_off_the_mask_does_not_reach_the_log():
    _, terms = loss_and_terms(
        Objective(clipped, beta=0.3),
        logps=torch.where(MASK, NOW, math.nan),
        advantages=PER_ROW,
        mask=MASK,
        denominators=COUNTS,
        old_logps=torch.where(MASK, OLD, math.nan),
        ref_logps=torch.where(MASK, REFERENCE, math.nan),
    )
    assert all(value.double().isfinite().all() for value in terms.values())


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_no_spread_no_gradient_unless_there_is_a_kl(surrogate: Surrogate):
    advantages = group_relative(torch.full((1, 2), 0.1)).T  # (2, 1): one group of two rows, both at .1
    for beta, moved in ((0.0, False), (0.3, True)):
        logps = NOW.clone().requires_grad_()
        objective = Objective(surrogate, beta=beta)
        (gradient,) = torch.autograd.grad(_loss(objective, logps, advantages), logps)
        assert bool((gradient != 0).any()) == moved
        assert objective.zero_advantage_is_zero_gradient != moved


@pytest.mark.parametrize(
    ("current", "reference"), [(-95.0, -0.5), (-1.0, -math.inf), (-1.0, -1e30)], ids=["e07.1", "e07.4", "e07.4 finite"]
)
def test_cases_e07_a_huge_gap_leaves_loss_and_gradient_finite_and_is_counted(current: float, reference: float):
    logps = torch.tensor([[current]], requires_grad=True)
    loss, terms = loss_and_terms(
        Objective(clipped, beta=0.04),
        logps=logps,
        advantages=torch.zeros(1, 1),
        mask=torch.ones(1, 1, dtype=torch.bool),
        denominators=Denominators(1, 1, 1),
        ref_logps=torch.tensor([[reference]]),
    )
    loss.backward()
    assert loss.isfinite()
    assert loss > 0
    assert logps.grad is not None
    assert logps.grad.isfinite().all()
    # descending must bring log π towards the reference: up where the reference is above, down where it is below
    assert (-logps.grad).sign().item() == math.copysign(1, max(reference, -100) - current)
    assert terms["kl_bounded_fraction"].tolist() == [[True]]


def test_case_e04_2_all_rows_masked():
    logps = NOW.clone().requires_grad_()
    for loss_agg in AGGREGATIONS:
        loss, terms = loss_and_terms(
            Objective(clipped, loss_agg=loss_agg, beta=0.1),
            logps=logps,
            advantages=PER_ROW,
            mask=torch.zeros_like(MASK),
            denominators=Denominators(2, 0, 4, torch.zeros(2, 1)),
            old_logps=OLD,
            ref_logps=REFERENCE,
        )
        assert loss.item() == 0
        assert torch.equal(torch.autograd.grad(loss, logps)[0], torch.zeros_like(NOW))
        assert all(value.double().isfinite().all() for value in terms.values())


def test_case_e08_3_ratios_are_per_token():
    # 500 tokens of log-ratio −.005: each ratio is e^−.005 = .9950, which is also their geometric mean, and is inside
    # the clip range; the product over the sequence, e^−2.5 = .0821, would be far outside
    logps = torch.full((1, 500), -1.005, dtype=torch.float64)
    _, terms = loss_and_terms(
        Objective(clipped),
        logps=logps,
        advantages=torch.tensor([[-1.0]]),
        mask=torch.ones(1, 500, dtype=torch.bool),
        denominators=Denominators(1, 500, 500),
        old_logps=torch.full_like(logps, -1.0),
    )
    assert terms["ratio"].tolist() == [pytest.approx([0.9950] * 500, abs=5e-5)]
    assert terms["ratio"].prod().item() == pytest.approx(0.0821, abs=5e-5)
    assert not terms["clip_fraction"].any()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_beta_needs_a_reference():
    with pytest.raises(ConfigError, match=r"objective\.beta=0\.04 needs the reference's log-probs"):
        loss_and_terms(Objective(clipped, beta=0.04), logps=NOW, advantages=PER_ROW, mask=MASK, denominators=COUNTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_agg": "token"}, r"objective\.loss_agg='token' is not an option: .* Did you mean token_mean\?"),
        ({"kl": "k4"}, r"objective\.kl='k4' is not an option: k1, k2, k3\."),
        ({"beta": -0.1}, r"objective\.beta=-0\.1 must be a finite number >= 0"),
        ({"beta": math.nan}, r"objective\.beta=nan must be"),
        ({"beta": math.inf}, r"objective\.beta=inf must be"),
        ({"length": 0}, r"objective\.length=0 must be a finite number > 0"),
        ({"length": -4.0}, r"objective\.length=-4\.0 must be"),
        ({"clip_eps": -0.2}, r"objective\.clip_eps=-0\.2 must be >= 0"),
        ({"clip_eps_high": math.nan}, r"objective\.clip_eps_high=nan must be >= 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_objective(clipped, **options)


def test_build_objective_splits_its_options():
    objective = build_objective(
        clipped, clip_eps=0.1, clip_eps_high=0.5, beta=0.2, kl="k2", loss_agg="constant", length=7
    )
    assert (objective.beta, objective.kl, objective.loss_agg, objective.length) == (0.2, "k2", "constant", 7)
    ratios = _row([1.4, 1.6, 0.85, 0.95]).log()
    _, is_clipped = objective.surrogate(ratios, torch.zeros_like(ratios), _row([1, 1, -1, -1]))
    assert is_clipped.tolist() == [[False, True, True, False]]


def test_surrogates_leave_their_inputs_alone():
    for surrogate, advantages in itertools.product(SURROGATES.values(), (PER_ROW, PER_TOKEN)):
        columns = [NOW.clone(), OLD.clone(), advantages.clone()]
        call_surrogate(Objective(surrogate), columns[0], columns[1], NOW - OLD, columns[2].expand_as(NOW), MASK)
        assert all(torch.equal(one, other) for one, other in zip(columns, (NOW, OLD, advantages), strict=True))
