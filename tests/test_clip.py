"""The clipped surrogate by hand: which tokens keep their gradient, and a worked example of two answers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from grpo_toolbox.objectives import Objective, clipped, loss_and_terms
from grpo_toolbox.ops import Denominators


def _row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _surrogate(ratio: float, advantage: float, **options: float) -> tuple[float, float, bool]:
    """Return loss, ascent gradient in ρ (that is −∂loss/∂ρ) and whether the token counts as clipped."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, is_clipped = clipped(logp, torch.zeros_like(logp), _row([advantage]), **options)
    (gradient,) = torch.autograd.grad(-loss.sum(), logp)
    return loss.item(), gradient.item() / ratio, bool(is_clipped)  # ∂ρ/∂log π = ρ


# ---- the clipped surrogate -------------------------------------------------------------------------------------------

# ε = .2, ε_high = .28: the band is [.8, 1.28].
#   ρ      A = +1: −min(ρ, clip ρ)      A = −1: −min(−ρ, −clip ρ) = max(ρ, clip ρ)
#   .70    −.70                         .80, constant
#   .95    −.95                         .95
#   1.10   −1.10                        1.10
#   1.35   −1.28, constant              1.35
CLIP_TABLE = [
    (0.70, 1.0, -0.70, 1.0),
    (0.70, -1.0, 0.80, 0.0),
    (0.95, 1.0, -0.95, 1.0),
    (0.95, -1.0, 0.95, -1.0),
    (1.10, 1.0, -1.10, 1.0),
    (1.10, -1.0, 1.10, -1.0),
    (1.35, 1.0, -1.28, 0.0),
    (1.35, -1.0, 1.35, -1.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CLIP_TABLE)
def test_clip_table(ratio: float, advantage: float, loss: float, gradient: float):
    value, slope, is_clipped = _surrogate(ratio, advantage, clip_eps=0.2, clip_eps_high=0.28)
    assert value == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert is_clipped == (gradient == 0) == (slope == 0)  # exactly 0, not nearly


def test_clip_higher_alone_moves_the_upper_bound():
    assert _surrogate(1.25, 1.0) == (pytest.approx(-1.2), 0.0, True)
    assert _surrogate(1.25, 1.0, clip_eps_high=0.28) == (pytest.approx(-1.25), pytest.approx(1.0), False)
    assert _surrogate(0.75, -1.0, clip_eps_high=0.28) == (pytest.approx(0.8), 0.0, True)  # below, ε = .2 still holds
    assert _surrogate(0.75, -1.0, clip_eps=0.3, clip_eps_high=0.28) == (pytest.approx(0.75), pytest.approx(-1.0), False)


def test_default_clip_range_is_two_tenths_both_ways():
    assert [_surrogate(ratio, 1.0)[2] for ratio in (1.19, 1.21)] == [False, True]
    assert [_surrogate(ratio, -1.0)[2] for ratio in (0.81, 0.79)] == [False, True]


def test_a_clip_range_of_zero_still_trains_on_policy():
    assert _surrogate(1.0, 1.0, clip_eps=0.0) == (-1.0, 1.0, False)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [-3000.0, 3000.0])
def test_absurd_ratios_stay_finite(advantage: float, gap: float):
    logp = torch.tensor([[gap]], requires_grad=True)
    loss, _ = clipped(logp, torch.zeros(1, 1), torch.tensor([[advantage]]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


# ---- two answers to one question -------------------------------------------------------------------------------------

# "It is London": ratios 1/3, 1/4, 1/12, A = −1. "The capital of France is Paris": six ratios of 1/6, A = +1. ε = .01.
RATIOS = torch.tensor([[1 / 3, 1 / 4, 1 / 12, 1, 1, 1], [1 / 6] * 6], dtype=torch.float64)
RATIO_MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6], dtype=torch.bool)


def _two_answers(clip_eps: float) -> tuple[float, Tensor, Tensor]:
    logps = RATIOS.log().requires_grad_()
    loss, terms = loss_and_terms(
        Objective(partial(clipped, clip_eps=clip_eps)),
        logps=logps,
        old_logps=torch.zeros(2, 6, dtype=torch.float64),
        advantages=torch.tensor([[-1.0], [1.0]]),
        mask=RATIO_MASK,
        denominators=Denominators(sequences=2, tokens=9, length=6),
    )
    (gradient,) = torch.autograd.grad(-loss, logps)
    return -loss.item(), gradient, terms["clip_fraction"][RATIO_MASK]


def test_two_answers_unclipped():
    # A tutorial gives −1/3, −1/4, −1/12 as the minima at ε = .01, hence −2/9 for the first answer and −1/36 for both:
    # ½(−2/9 + 1/6). These are the values WITHOUT clipping. Gradient of the first answer: ρ·A/(2·3) per token.
    objective, gradient, is_clipped = _two_answers(clip_eps=1e6)
    assert objective == pytest.approx(-1 / 36)
    assert (RATIOS[0, :3] * -1).mean().item() == pytest.approx(-2 / 9)
    assert gradient[0].tolist() == pytest.approx([-1 / 18, -1 / 24, -1 / 72, 0, 0, 0])
    assert not is_clipped.any()


def test_two_answers_clipped():
    # With ε = .01 the minima are min(−1/3, −.99) = −.99, three times: the first answer is −.99 and, all its tokens
    # being clipped, has no gradient. The second keeps min(1/6, .99) = 1/6. ½(−.99 + 1/6) = −.411667.
    objective, gradient, is_clipped = _two_answers(clip_eps=0.01)
    assert objective == pytest.approx(0.5 * (-0.99 + 1 / 6))
    assert torch.equal(gradient[0], torch.zeros(6, dtype=torch.float64))
    assert gradient[1].tolist() == pytest.approx([1 / 6 / 12] * 6)
    assert is_clipped.tolist() == [True] * 3 + [False] * 6
