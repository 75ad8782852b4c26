"""Ratio levels and sampler corrections by hand. e08.3 numbers a checked case."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.objectives import Objective, loss_and_terms, mismatch
from grpo_toolbox.ops import Denominators
from grpo_toolbox.ratios import CORRECTIONS, RATIO_LEVELS, Correction, off_policy_rows
from grpo_toolbox.surrogates import clipped, reinforce

NAN = math.nan


def _rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _real(*values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


# ---- levels ----------------------------------------------------------------------------------------------------------

# Ratios .7, .95, 1.1, 1.35 and a masked NaN. Product .7·.95·1.1·1.35 = .987525; its fourth root is .996866.
RATIOS = _rows([0.7, 0.95, 1.1, 1.35, NAN])
MASK = _real([1, 1, 1, 1, 0])
LEVELS = {
    "token": [0.7, 0.95, 1.1, 1.35],
    "sequence": [0.996866] * 4,
    "sequence_token": [0.996866] * 4,
    "product": [0.987525] * 4,
}


@pytest.mark.parametrize(("name", "values"), LEVELS.items())
def test_levels_by_hand(name: str, values: list[float]):
    level = RATIO_LEVELS[name](RATIOS.log(), torch.zeros_like(RATIOS), MASK).exp()
    assert level[MASK].tolist() == pytest.approx(values, abs=1e-6)


def test_every_level_has_a_hand_number():
    assert set(LEVELS) == set(RATIO_LEVELS)


def test_case_e08_3_product_and_geometric_mean_of_500_tokens():
    logps, old = torch.full((1, 500), -1.005, dtype=torch.float64), torch.full((1, 500), -1.0, dtype=torch.float64)
    mask = torch.ones(1, 500, dtype=torch.bool)
    for name, value in (("product", 0.0821), ("sequence", 0.9950), ("token", 0.9950)):  # e^−2.5, e^−.005
        assert RATIO_LEVELS[name](logps, old, mask).exp()[0].tolist() == pytest.approx([value] * 500, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        # of −Σₜ ρₜ·A with A = 2, divided by N = 1: token −2ρₜ; sequence: four times −2s, each token a quarter of each
        ("token", [-1.4, -1.9, -2.2, -2.7]),
        ("sequence", [-1.993732] * 4),
        ("sequence_token", [-1.993732] * 4),  # value and on-policy gradient of GSPO, token by token
        ("product", [4 * -1.97505] * 4),  # each of the four terms −2·Π depends on each token wholly
    ],
)
def test_levels_reach_the_gradient(name: str, gradient: list[float]):
    logps = RATIOS.log().requires_grad_()
    objective = Objective(_unclipped, ratio_level=name, loss_agg="seq_mean_token_sum")
    loss, _ = loss_and_terms(
        objective,
        logps=logps,
        old_logps=torch.zeros_like(RATIOS),
        advantages=_rows([2.0]),
        mask=MASK,
        denominators=Denominators(1, 4, 8),
    )
    assert torch.autograd.grad(loss, logps)[0].tolist() == [pytest.approx([*gradient, 0.0], abs=1e-5)]


def _unclipped(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    return clipped(logps, old_logps, advantages, clip_eps=0.9, clip_eps_high=9.0)


def test_sequence_level_clips_a_row_as_a_whole_and_sequence_token_each_advantage_for_itself():
    # s = .996866 is below 1 − 3e-4: with A < 0 all tokens are clipped, with A > 0 none; the token of ratio 1.35 as well
    logps = RATIOS.log()
    for level, advantages, expected in (
        ("sequence", _rows([-1.0]), [True] * 4),
        ("sequence", _rows([1.0]), [False] * 4),
        ("sequence_token", _rows([-1.0, 1.0, -1.0, 1.0, 0.0]), [True, False, True, False]),
        ("token", _rows([-1.0]), [True, True, False, False]),
    ):
        _, terms = loss_and_terms(
            Objective(lambda *a: clipped(*a, clip_eps=3e-4, clip_eps_high=4e-4), ratio_level=level),
            logps=logps,
            old_logps=torch.zeros_like(RATIOS),
            advantages=advantages,
            mask=MASK,
            denominators=Denominators(1, 4, 8),
        )
        assert terms["clip_fraction"][MASK].tolist() == expected


def test_gspo_token_gives_each_token_its_own_advantage_times_the_rows_ratio():
    # −s·Aₜ·∇log πₜ: the gradient of token t knows only its own advantage, whereas GSPO's knows their mean
    logps = RATIOS.log().requires_grad_()
    advantages = _rows([1.0, 0.0, -3.0, 6.0, NAN])
    gradients = {}
    for level in ("sequence", "sequence_token"):
        loss, _ = loss_and_terms(
            Objective(_unclipped, ratio_level=level, loss_agg="seq_mean_token_sum"),
            logps=logps,
            old_logps=torch.zeros_like(RATIOS),
            advantages=advantages,
            mask=MASK,
            denominators=Denominators(1, 4, 8),
        )
        gradients[level] = torch.autograd.grad(loss, logps)[0][0, :4].tolist()
    assert gradients["sequence_token"] == pytest.approx([-0.996866, 0.0, 2.990598, -5.981197], abs=1e-5)
    assert gradients["sequence"] == pytest.approx([-0.996866 * 4 / 4] * 4, abs=1e-5)  # Σ A / |o| = 1


# ---- corrections -----------------------------------------------------------------------------------------------------

# Trainer over sampler: w = .4, .9, 1.5, 2.6 and a masked token. Product 1.404, geometric mean 1.404^¼ = 1.088534.
W = [0.4, 0.9, 1.5, 2.6]
SAMPLER = _rows([-2.0, -1.0, -0.5, -3.0, NAN])
TRAINER = SAMPLER + _rows([*W, 1.0]).log()
WEIGHTS = {
    "token_truncate": [0.4, 0.9, 1.5, 2.0],  # at most 2
    "token_mask": [0.0, 0.9, 1.5, 0.0],  # within [.5, 2], and there as it is
    "icepop": [0.0, 0.9, 1.5, 2.6],  # within [.5, 5]
    "sequence_truncate": [1.404] * 4,  # at most 3
    "sequence_mask": [1.404] * 4,  # at most 3, and kept as a weight of 1.404, not of 1
    "geometric_truncate": [1.088534] * 4,  # at most 2
    "geometric_mask": [1.088534] * 4,  # within [.5, 2]
}


def _weights(**options: Any) -> list[float]:
    _, terms = loss_and_terms(
        Objective(reinforce, **options),
        logps=TRAINER,
        sampler_logps=SAMPLER,
        advantages=_rows([1.0]),
        mask=MASK,
        denominators=Denominators(1, 4, 8),
    )
    return terms["correction"][MASK].tolist()


@pytest.mark.parametrize(("name", "weights"), WEIGHTS.items())
def test_corrections_by_hand(name: str, weights: list[float]):
    assert _weights(correction=name) == pytest.approx(weights, abs=1e-6)


def test_every_correction_has_a_hand_number():
    assert set(WEIGHTS) == set(CORRECTIONS)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"correction": "token_truncate", "correction_max": 1.2}, [0.4, 0.9, 1.2, 1.2]),
        ({"correction": "token_truncate", "correction_min": 0.8}, [0.8, 0.9, 1.5, 2.0]),  # the upper bound stays 2
        ({"correction": "token_mask", "correction_max": 3.0}, [0.0, 0.9, 1.5, 2.6]),  # the lower bound stays .5
        ({"correction": "token_mask", "correction_min": 0.0}, [0.4, 0.9, 1.5, 0.0]),
        ({"correction": "token_mask", "correction_min": 0.0, "correction_max": math.inf}, W),
        ({"correction": "sequence_truncate", "correction_max": 1.2}, [1.2] * 4),
        ({"correction": "sequence_mask", "correction_max": 1.2}, [0.0] * 4),
        ({"correction": "sequence_mask", "correction_min": 1.5}, [0.0] * 4),
        ({"correction": "geometric_mask", "correction_max": 1.05}, [0.0] * 4),
        ({"correction": "geometric_truncate", "correction_max": 1.05}, [1.05] * 4),
    ],
)
def test_correction_bounds_by_hand(options: dict[str, Any], weights: list[float]):
    assert _weights(**options) == pytest.approx(weights, abs=1e-6)


def test_a_weight_on_its_bound_is_kept():
    weights = Correction("token", drops=True, low=0.5, high=2.0)(_rows([0.5, 2.0]).log(), _rows([0, 0]), _real([1, 1]))
    assert weights.tolist() == [pytest.approx([0.5, 2.0])]


def test_the_correction_is_a_constant_weight_on_the_surrogate_and_not_on_the_kl():
    # token_truncate: w = (.4, .9, 1.5, 2). REINFORCE with A = 3: gradient −w·3/4. KL k1, beta = .1: +.1/4 on each token
    logps = TRAINER.clone().requires_grad_()
    loss, _ = loss_and_terms(
        Objective(reinforce, correction="token_truncate", beta=0.1, kl="k1"),
        logps=logps,
        ref_logps=TRAINER - 0.7,
        sampler_logps=SAMPLER,
        advantages=_rows([3.0]),
        mask=MASK,
        denominators=Denominators(1, 4, 8),
    )
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == [pytest.approx([(-3 * w + 0.1) / 4 for w in (0.4, 0.9, 1.5, 2.0)] + [0.0])]


def test_the_correction_compares_the_sampler_with_the_policy_that_the_update_started_from():
    # two epochs in, π has moved by 1 nat: w is π_old/π_sampler all the same
    _, terms = loss_and_terms(
        Objective(reinforce, correction="token_truncate"),
        logps=TRAINER + 1.0,
        old_logps=TRAINER,
        sampler_logps=SAMPLER,
        advantages=_rows([1.0]),
        mask=MASK,
        denominators=Denominators(1, 4, 8),
    )
    assert terms["correction"][MASK].tolist() == pytest.approx([0.4, 0.9, 1.5, 2.0])


def test_a_hundred_tokens_of_one_percent_each_leave_the_sequence_weight_but_not_the_geometric_one():
    # 1.02^100 = 7.24 > 3: dropped; the geometric mean is 1.02: kept
    trainer, mask = torch.full((1, 100), math.log(1.02), dtype=torch.float64), torch.ones(1, 100, dtype=torch.bool)
    sampler = torch.zeros_like(trainer)
    assert CORRECTIONS["sequence_mask"](trainer, sampler, mask).unique().tolist() == [0.0]
    assert CORRECTIONS["geometric_mask"](trainer, sampler, mask)[0, 0].item() == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction_min": -0.1}, r"correction_min=-0\.1 must be at least 0 and below correction_max=2\.0"),
        ({"correction_max": 0.4}, r"correction_min=0\.5 must be at least 0 and below correction_max=0\.4"),
        ({"correction_max": NAN}, "correction_max=nan"),
        ({"correction": "token_clip"}, r"objective\.correction='token_clip' is not an option: .*Did you mean token_"),
    ],
)
def test_correction_options_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Objective(reinforce, **({"correction": "token_mask"} | options))


def test_a_correction_needs_what_the_sampler_said():
    for options in ({"correction": "icepop"}, {"off_policy_threshold": 0.1}):
        with pytest.raises(ConfigError, match="need the sampler's log-probs"):
            loss_and_terms(
                Objective(reinforce, **options),  # type: ignore[arg-type]
                logps=TRAINER,
                advantages=_rows([1.0]),
                mask=MASK,
                denominators=Denominators(1, 4, 8),
            )


# ---- rows that are too far off-policy --------------------------------------------------------------------------------

# mean log(π_sampler/π) of four rows with two, two, one and three real tokens; the threshold is .5
#   (.3 + .5)/2 = .4: kept      (.7 + .5)/2 = .6: dropped where A < 0      .6: A ≥ 0, kept      (3 − 4 + 1)/3 = 0: kept
DRIFT = _rows([0.3, 0.5, NAN], [0.7, 0.5, 9.0], [0.6, -9.0, NAN], [3.0, -4.0, 1.0])
DRIFT_MASK = _real([1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1])


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [
        ([-1.0, -1.0, -1.0, -1.0], [1, 0, 0, 1]),
        ([-1.0, 1.0, 0.0, -1.0], [1, 1, 1, 1]),
        ([1.0, -1e-6, 0.0, -1.0], [1, 0, 1, 1]),
    ],
)
def test_off_policy_rows_by_hand(advantages: list[float], kept: list[int]):
    logps = torch.full((4, 3), -1.0, dtype=torch.float64, requires_grad=True)
    weights = off_policy_rows(logps, logps.detach() + DRIFT, _rows(advantages).T, DRIFT_MASK, 0.5)
    assert weights.tolist() == [[float(one)] * 3 for one in kept]
    assert not weights.requires_grad


def test_a_row_that_is_dropped_has_no_gradient_but_stays_in_the_mean():
    # −A·log π over N = 4: rows 0 and 3 keep their gradient 1/(4·|o|), rows 1 and 2 lose theirs
    logps = torch.where(DRIFT_MASK, -1.0, NAN).double().requires_grad_()
    loss, _ = loss_and_terms(
        Objective(reinforce, off_policy_threshold=0.5),
        logps=logps,
        sampler_logps=logps.detach() + DRIFT,
        advantages=torch.full((4, 1), -1.0),
        mask=DRIFT_MASK,
        denominators=Denominators(4, 8, 8),
    )
    assert torch.autograd.grad(loss, logps)[0].tolist() == [
        pytest.approx([1 / 8, 1 / 8, 0]),
        [0, 0, 0],
        [0, 0, 0],
        pytest.approx([1 / 12] * 3),
    ]


def test_drift_is_measured_against_the_policy_of_now():
    # π_old = π_sampler, but π has fallen by .6 nats since: over the threshold
    sampler = _rows([-1.0, -2.0])
    for moved, kept in ((-0.4, 1.0), (-0.6, 0.0), (0.6, 1.0)):
        _, terms = loss_and_terms(
            Objective(clipped, off_policy_threshold=0.5),
            logps=sampler + moved,
            old_logps=sampler,
            sampler_logps=sampler,
            advantages=_rows([-1.0]),
            mask=_real([1, 1]),
            denominators=Denominators(1, 2, 8),
        )
        assert terms["off_policy_kept"].tolist() == [[kept, kept]]


# ---- how far the sampler is from the trainer -------------------------------------------------------------------------


def test_mismatch_by_hand():
    # w = .4, .9, 1.5, 2.6, d = log w = −.916291, −.105361, .405465, .955511
    #   Σ|d| = 2.382628; Σw = 5.4; Σd = log 1.404 = .339325, so Σ(w − 1 − d) = 5.4 − 4 − .339325 = 1.060675
    #   Σw² = .16 + .81 + 2.25 + 6.76 = 9.98
    measured = {name: value.item() for name, value in mismatch(TRAINER, SAMPLER, MASK).items()}
    assert measured == pytest.approx(
        {
            "gap": 2.382628,
            "kl": 1.060675,
            "ratio": 5.4,
            "ratio_squared": 9.98,
            "gap_max": 0.955511,
            "ratio_min": 0.4,
            "ratio_max": 2.6,
        },
        abs=1e-6,
    )


def test_mismatch_of_equal_log_probs_is_zero_and_of_absurd_ones_finite():
    same = mismatch(SAMPLER, SAMPLER, MASK)
    assert (same["gap"].item(), same["kl"].item(), same["ratio"].item()) == (0.0, 0.0, 4.0)
    far = mismatch(_rows([-1e4, -0.1]), _rows([-0.1, -1e4]), _real([1, 1]))
    assert all(value.isfinite() for value in far.values())
