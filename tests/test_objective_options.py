"""The objective's options: unbiased KL, entropy bonus, tokens left out, KL in the reward, and what none depends on."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.objectives import Objective, build_objective, kl_penalty, loss_and_terms
from grpo_toolbox.ops import AGGREGATIONS, KL, Denominators
from grpo_toolbox.ratios import CORRECTIONS, RATIO_LEVELS
from grpo_toolbox.surrogates import OBJECTIVES, clipped, reinforce

ONE = torch.ones(1, 1, dtype=torch.bool)

# ---- unbiased KL -----------------------------------------------------------------------------------------------------

PI = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.10], dtype=torch.float64)
REF = torch.tensor([0.10, 0.25, 0.30, 0.05, 0.30], dtype=torch.float64)
STALE = torch.tensor([0.20, 0.20, 0.10, 0.30, 0.20], dtype=torch.float64)


def _mean_kl_gradient(kl: str, samples_of: Tensor, unbiased: bool) -> tuple[float, Tensor]:
    """Return mean and gradient in the logits of the KL term, exactly: a sum over all tokens in place of samples."""
    logits = PI.log().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for token, probability in enumerate(samples_of):
        loss, _ = loss_and_terms(
            Objective(reinforce, beta=1.0, kl=kl, kl_unbiased=unbiased),
            logps=logits.log_softmax(0)[token].reshape(1, 1),
            old_logps=samples_of[token].log().reshape(1, 1),
            ref_logps=REF[token].log().reshape(1, 1),
            advantages=torch.zeros(1, 1),
            mask=ONE,
            denominators=Denominators(1, 1, 1),
        )
        total = total + probability * loss
    return total.item(), torch.autograd.grad(total, logits)[0]


def _exact_kl_gradient() -> tuple[float, Tensor]:
    """KL(π‖π_ref) = Σ π·log(π/π_ref) and its gradient in the logits, π·(log(π/π_ref) − KL)."""
    divergence = (PI * (PI / REF).log()).sum()
    return divergence.item(), PI * ((PI / REF).log() - divergence)


@pytest.mark.parametrize("samples_of", [PI, STALE], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_kl_unbiased_has_value_and_gradient_of_the_reverse_kl(kl: str, samples_of: Tensor):
    # E_μ[ρ·k] = E_π[k] = KL for k1 and k3 whatever μ the samples are of; with k3, r = log(π_ref/π) and ∇ρ = ρ∇log π:
    #   ∇E_μ[ρ·k3] = E_π[(eʳ − r − 1)∇log π + (1 − eʳ)∇log π] = E_π[−r·∇log π] = ∇KL(π‖π_ref)
    value, gradient = _mean_kl_gradient(kl, samples_of, unbiased=True)
    exact, exact_gradient = _exact_kl_gradient()
    assert value == pytest.approx(exact, abs=1e-12)
    torch.testing.assert_close(gradient, exact_gradient, atol=1e-12, rtol=0)


def test_kl_k3_as_it_stands_has_the_forward_kls_gradient_and_off_policy_neither():
    # on-policy E_π[(1 − eʳ)·∇log π] = π − π_ref = ∇KL(π_ref‖π); under stale samples it is neither
    value, gradient = _mean_kl_gradient("k3", PI, unbiased=False)
    assert value == pytest.approx(_exact_kl_gradient()[0], abs=1e-12)
    torch.testing.assert_close(gradient, PI - REF, atol=1e-12, rtol=0)
    _, stale = _mean_kl_gradient("k3", STALE, unbiased=False)
    for other in (PI - REF, _exact_kl_gradient()[1]):
        assert (stale - other).abs().max() > 0.01


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_kl_unbiased_takes_each_tokens_own_ratio_at_every_level(level: str):
    # Two tokens, drawn independently: Σₜ KLₜ. With GSPO's ratio on the KL, ∇s = ½ Σ∇log πₜ would halve the part from ρ.
    logits = PI.log().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(5), repeat=2):
        tokens = list(pair)
        loss, _ = loss_and_terms(
            Objective(reinforce, ratio_level=level, loss_agg="seq_mean_token_sum", beta=1.0, kl_unbiased=True),
            logps=logits.log_softmax(0)[tokens].unsqueeze(0),
            ref_logps=REF[tokens].log().unsqueeze(0),
            advantages=torch.zeros(1, 1),
            mask=torch.ones(1, 2, dtype=torch.bool),
            denominators=Denominators(1, 2, 2),
        )
        total = total + PI[tokens].prod() * loss
    value, gradient = _exact_kl_gradient()
    assert total.item() == pytest.approx(2 * value, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], 2 * gradient, atol=1e-12, rtol=0)


def test_kl_unbiased_by_hand():
    # π = ½, π_ref = ¼, π_old = ⅓: ρ = 1.5, k3 = ½ + log 2 − 1 = .193147, product .289721
    # gradient in log π: ρ·k3 + ρ·(1 − ½) = .289721 + .75 = 1.039721; A = 0
    logp = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    loss, terms = loss_and_terms(
        Objective(clipped, beta=2.0, kl_unbiased=True),
        logps=logp,
        old_logps=torch.tensor([[1 / 3]], dtype=torch.float64).log(),
        ref_logps=torch.tensor([[0.25]], dtype=torch.float64).log(),
        advantages=torch.zeros(1, 1),
        mask=ONE,
        denominators=Denominators(1, 1, 1),
    )
    assert terms["kl"].item() == pytest.approx(0.289721, abs=1e-6)
    assert loss.item() == pytest.approx(2 * 0.289721, abs=2e-6)
    assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(2 * 1.039721, abs=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_unbiased": True, "kl_in": "reward"}, r"kl_unbiased=true needs objective\.kl_in=loss"),
        ({"kl_unbiased": True, "kl": "k2"}, r"kl_unbiased=true needs objective\.kl=k1 or k3"),
        ({"kl_in": "rewards"}, r"objective\.kl_in='rewards' is not an option: loss, reward\. Did you mean reward\?"),
        ({"ratio_level": "tokens"}, r"objective\.ratio_level='tokens' is not an option: .* Did you mean token\?"),
        ({"entropy_coef": -0.1}, r"objective\.entropy_coef=-0\.1 must be a finite number >= 0"),
        ({"top_entropy_quantile": 0.0}, r"objective\.top_entropy_quantile=0\.0 must be in \(0, 1\]"),
        ({"top_entropy_quantile": 1.1}, r"objective\.top_entropy_quantile=1\.1 must be"),
        ({"clip_cov": -0.1}, r"objective\.clip_cov=-0\.1 must be in \[0, 1\]"),
        ({"kl_cov": 2.0}, r"objective\.kl_cov=2\.0 must be in \[0, 1\]"),
        ({"kl_cov": math.nan}, r"objective\.kl_cov=nan must be in \[0, 1\]"),
        ({"kl_cov_coef": math.inf}, r"objective\.kl_cov_coef=inf must be a finite number >= 0"),
        ({"off_policy_threshold": math.nan}, r"objective\.off_policy_threshold=nan must be a finite number >= 0"),
        ({"off_policy_threshold": -1.0}, r"objective\.off_policy_threshold=-1\.0 must be a finite number >= 0"),
        ({"clip_cov_min": 5.0}, r"objective\.clip_cov_min=5\.0 must be below clip_cov_max=5\.0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_objective(clipped, **options)


@pytest.mark.parametrize(
    ("surrogate", "option", "message"),
    [
        ("clipped", {"delta": 1.0}, r"objective\.delta=1\.0 must be above 1\."),  # good answers would have no gradient
        ("cispo", {"ratio_cap": 0.0}, r"objective\.ratio_cap=0\.0 must be above 0\."),
        ("sapo", {"tau_pos": 0}, r"objective\.tau_pos=0 must be above 0\."),
        ("sapo", {"tau_neg": math.nan}, r"objective\.tau_neg=nan must be a finite number of at least 0\."),
        ("sapo", {"tau_pos": math.inf}, r"objective\.tau_pos=inf must be a finite number of at least 0\."),
        ("vespo", {"k_pos": math.nan}, r"objective\.k_pos=nan must be a finite number of at least 0\."),
        ("vespo", {"k_neg": -1.0}, r"objective\.k_neg=-1\.0 must be a finite number of at least 0\."),
        ("vespo", {"lambda_pos": 0}, r"objective\.lambda_pos=0 must be above 0\."),
    ],
)
def test_surrogate_options_that_would_stop_training(surrogate: str, option: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        build_objective(OBJECTIVES[surrogate], **option)


# ---- KL in the reward ------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_is_a_constant_per_token_and_leaves_the_loss_alone():
    # k1 = log π − log π_ref = (.7, −.2), beta = .5: penalties .35 and −.1; the third token is off the mask
    logps = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.7, -1.8, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    objective = Objective(clipped, beta=0.5, kl="k1", kl_in="reward")
    penalty = kl_penalty(objective, logps, reference, mask)
    assert penalty.tolist() == [pytest.approx([0.35, -0.1, 0.0])]
    assert not penalty.requires_grad
    assert objective.needs_reference
    assert objective.zero_advantage_is_zero_gradient
    loss, terms = loss_and_terms(
        objective,
        logps=logps,
        advantages=torch.zeros(1, 1),
        mask=mask,
        denominators=Denominators(1, 2, 2),
        ref_logps=reference,
    )
    assert loss.item() == 0
    assert "kl" not in terms


# ---- entropy bonus ---------------------------------------------------------------------------------------------------

# Entropies 1, 2 and 3 of this part of a step of 12 tokens, coefficient .5: bonus .5·6/12 = .25
ENTROPY = torch.tensor([[1.0, 2.0], [3.0, math.nan]], dtype=torch.float64)
ENTROPY_MASK = torch.tensor([[True, True], [True, False]])


def _bonus(trained: Tensor | None = None, **options: Any) -> tuple[float, list[list[float]]]:
    entropy = ENTROPY.clone().requires_grad_()
    loss, _ = loss_and_terms(
        Objective(clipped, entropy_coef=0.5, **options),
        logps=torch.zeros(2, 2, dtype=torch.float64, requires_grad=True),
        entropy=entropy,
        advantages=torch.zeros(2, 1),
        mask=ENTROPY_MASK,
        denominators=Denominators(4, 12, 8, torch.full((2, 1), 3.0)),
        trained=trained,
    )
    return loss.item(), torch.autograd.grad(loss, entropy)[0].tolist()


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_entropy_bonus_is_a_mean_over_the_steps_tokens_whatever_the_aggregation(loss_agg: str):
    assert _bonus(loss_agg=loss_agg) == (
        pytest.approx(-0.25),
        [pytest.approx([-0.5 / 12] * 2), pytest.approx([-0.5 / 12, 0])],
    )


def test_entropy_bonus_counts_the_tokens_that_are_trained():
    # tokens of entropy 2 and 3: .5·5/12; the last is off the mask whatever `trained` says
    trained = torch.tensor([[False, True], [True, True]])
    value, gradient = _bonus(trained)
    assert value == pytest.approx(-0.5 * 5 / 12)
    assert gradient == [pytest.approx([0, -0.5 / 12]), pytest.approx([-0.5 / 12, 0])]


def test_entropy_bonus_needs_entropy():
    with pytest.raises(ConfigError, match=r"objective\.entropy_coef=0\.5 needs the policy's entropy"):
        loss_and_terms(
            Objective(clipped, entropy_coef=0.5),
            logps=torch.zeros(1, 1),
            advantages=torch.zeros(1, 1),
            mask=ONE,
            denominators=Denominators(1, 1, 1),
        )


def test_entropy_bonus_of_a_softmax_pulls_towards_uniform():
    # descending −H moves every logit by −p·(log p + H): down for the likely token, up for the unlikely one
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    loss, _ = loss_and_terms(
        Objective(clipped, entropy_coef=1.0),
        logps=log_probs[:1].reshape(1, 1),
        entropy=-(log_probs.exp() * log_probs).sum().reshape(1, 1),
        advantages=torch.zeros(1, 1),
        mask=ONE,
        denominators=Denominators(1, 1, 1),
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    # p = σ(2) = .880797, H = .365334, log p = −.126928: −∂H/∂z₀ = .880797·(−.126928 + .365334) = .209987
    assert gradient.tolist() == pytest.approx([0.209987, -0.209987], abs=1e-6)


# ---- tokens that are not trained -------------------------------------------------------------------------------------


def test_trained_leaves_tokens_out_of_the_surrogate_and_in_the_kl_and_the_denominators():
    # REINFORCE, A = 3, two of three tokens trained, mean over 3: −1 each; KL k1 with beta = .3: +.1 on all three
    logps = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    loss, terms = loss_and_terms(
        Objective(reinforce, beta=0.3, kl="k1"),
        logps=logps,
        ref_logps=torch.full((1, 3), -2.0, dtype=torch.float64),
        advantages=torch.tensor([[3.0]]),
        mask=torch.ones(1, 3, dtype=torch.bool),
        denominators=Denominators(1, 3, 3),
        trained=torch.tensor([[True, False, True]]),
    )
    assert torch.autograd.grad(loss, logps)[0].tolist() == [pytest.approx([-0.9, 0.1, -0.9])]
    assert terms["tokens_kept"].tolist() == [[1.0, 0.0, 1.0]]


def test_rows_of_zero_advantage_stay_where_they_matter():
    # their entropies move the threshold that decides which tokens of other rows are trained
    assert Objective(clipped).zero_advantage_is_zero_gradient
    assert Objective(clipped, correction="icepop", off_policy_threshold=0.1).zero_advantage_is_zero_gradient
    chosen: tuple[dict[str, Any], ...] = ({"top_entropy_quantile": 0.5}, {"clip_cov": 0.1}, {"kl_cov": 0.1})
    for options in (*chosen, {"entropy_coef": 0.1}, {"beta": 0.1}):
        assert not Objective(clipped, **options).zero_advantage_is_zero_gradient


# ---- tokens anchored to π_old


def test_anchored_tokens_are_pulled_to_the_policy_that_the_update_started_from():
    # A = 0, log ρ = .3, −.2, .4, the last not anchored: 2·(.3 + .2)/3 tokens; gradient 2·sign/3; no KL at log ρ = 0
    now = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    columns = {
        "advantages": torch.zeros(1, 1, dtype=torch.float64),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "denominators": Denominators(1, 3, 8),
        "anchored": torch.tensor([[True, True, False]]),
    }
    objective = Objective(clipped, loss_agg="token_mean", kl_cov=0.5, kl_cov_coef=2.0)
    gaps = torch.tensor([[0.3, -0.2, 0.4]], dtype=torch.float64)
    loss, terms = loss_and_terms(objective, logps=now, old_logps=now.detach() - gaps, **columns)
    assert loss.item() == pytest.approx(1 / 3)
    assert torch.autograd.grad(loss, now)[0].tolist() == [pytest.approx([2 / 3, -2 / 3, 0.0])]
    assert terms["kl_cov"].tolist() == [pytest.approx([0.3, 0.2, 0.0])]
    first_pass, _ = loss_and_terms(objective, logps=now, **columns)
    assert first_pass.item() == 0
    assert torch.autograd.grad(first_pass, now)[0].tolist() == [[0.0, 0.0, 0.0]]


# ---- what no option may depend on ------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    **{f"surrogate {name}": {"surrogate": surrogate} for name, surrogate in OBJECTIVES.items()},
    **{f"ratio_level {level}": {"ratio_level": level} for level in RATIO_LEVELS},
    **{f"cispo at {level}": {"surrogate": OBJECTIVES["cispo"], "ratio_level": level} for level in RATIO_LEVELS},
    **{f"kl {kl}": {"beta": 0.3, "kl": kl} for kl in KL},
    "kl_unbiased": {"beta": 0.3, "kl_unbiased": True},
    "kl_unbiased at sequence": {"beta": 0.3, "kl_unbiased": True, "ratio_level": "sequence"},
    **{f"correction {name}": {"correction": name} for name in CORRECTIONS},
    "off_policy_threshold": {"off_policy_threshold": 0.05},
    "entropy_coef": {"entropy_coef": 0.2},
    "two-sided clip": {"delta": 1.3},
    "kl_cov_coef": {"kl_cov_coef": 3.0},
    "dppo with kl": {"surrogate": OBJECTIVES["dppo"], "divergence": "kl", "max_divergence": 0.01},
}
ROWS, WIDTH = 6, 5
LENGTHS = torch.tensor([5, 3, 1, 4, 0, 2])  # one row without any trained token
MASK = torch.arange(WIDTH) < LENGTHS.unsqueeze(1)
COUNTS = Denominators(sequences=ROWS, tokens=float(MASK.sum()), length=7)
PROMPT_LENGTHS = torch.tensor([[4.0], [4.0], [2.5], [2.5], [1.0], [1.0]])  # groups of two
SEEDED = torch.Generator().manual_seed(0)


def _noise(scale: float, shift: float) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=SEEDED, dtype=torch.float64) * scale + shift


NOW = _noise(0.5, -2.0)
COLUMNS = {
    "old_logps": NOW + _noise(0.3, 0.0),
    "ref_logps": NOW + _noise(0.5, 0.0),
    "sampler_logps": NOW + _noise(0.3, 0.0),
    "entropy": _noise(0.3, 1.5),
    "advantages": torch.tensor([[1.2], [-0.7], [0.4], [-1.5], [2.0], [-0.1]], dtype=torch.float64).expand(ROWS, WIDTH),
    "trained": _noise(1.0, 0.5) > 0,
    "anchored": _noise(1.0, 0.0) > 0,
}


def _objective(loss_agg: str, options: dict[str, Any]) -> Objective:
    return build_objective(**({"surrogate": clipped, "loss_agg": loss_agg} | options))


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_split_into_micro_batches_has_the_same_loss_and_gradient(options: dict[str, Any], loss_agg: str):
    objective = _objective(loss_agg, options)

    def run(splits: list[list[int]]) -> tuple[float, Tensor]:
        logps = NOW.clone().requires_grad_()
        value = 0.0
        for rows in splits:
            columns = {name: column[rows] for name, column in COLUMNS.items()}
            counts = replace(COUNTS, prompt_length=PROMPT_LENGTHS[rows])
            loss, _ = loss_and_terms(objective, logps=logps[rows], mask=MASK[rows], denominators=counts, **columns)
            loss.backward()
            value += loss.item()
        assert logps.grad is not None
        return value, logps.grad

    value, gradient = run([list(range(ROWS))])
    assert (gradient[MASK] != 0).any()
    for splits in ([[0, 1], [2], [3, 4, 5]], [[5], [4], [3], [2], [1], [0]], [[4, 0, 2], [1, 3, 5]]):
        split_value, split_gradient = run(splits)
        assert split_value == pytest.approx(value, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(split_gradient, gradient, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nan_off_the_mask_changes_nothing(options: dict[str, Any]):
    objective = _objective("token_mean", options)

    def run(planted: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        leaf = torch.where(MASK, NOW, planted).requires_grad_()
        columns = {
            name: column | ~MASK if column.dtype == torch.bool else torch.where(MASK, column, planted)
            for name, column in COLUMNS.items()
        }
        loss, terms = loss_and_terms(objective, logps=leaf, mask=MASK, denominators=COUNTS, **columns)
        return loss, torch.autograd.grad(loss, leaf)[0], terms

    loss, gradient, _ = run(0.0)
    for value in (math.nan, math.inf, -math.inf):
        dirty_loss, dirty_gradient, terms = run(value)
        assert torch.equal(dirty_loss, loss)
        assert torch.equal(dirty_gradient, gradient)
        assert all(term.double().isfinite().all() for term in terms.values())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_reaches_the_gradient(options: dict[str, Any]):
    """An option that is only logged is a bug: each changes the gradient of the plain objective."""

    def gradient(chosen: dict[str, Any]) -> Tensor:
        leaf, columns = NOW.clone().requires_grad_(), dict(COLUMNS)
        columns["entropy"] = columns["entropy"] * leaf  # entropy depends on the policy, too
        loss, _ = loss_and_terms(
            _objective("token_mean", chosen), logps=leaf, mask=MASK, denominators=COUNTS, **columns
        )
        return torch.autograd.grad(loss, leaf)[0]

    same = options.get("surrogate") is clipped or options == {"ratio_level": "token"}
    assert torch.equal(gradient(options), gradient({})) == same
