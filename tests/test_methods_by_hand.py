"""Whole methods on two or three short completions, from rewards to the gradients of log-probs, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from command_line import composed
from grpo_toolbox.advantages import ADVANTAGES, estimate
from grpo_toolbox.config.options import bind, resolve
from grpo_toolbox.objectives import OBJECTIVES, build_objective, kl_penalty, loss_and_terms
from grpo_toolbox.ops import Denominators
from grpo_toolbox.types import Scores

LENGTH = 3


def columns(*rows: list[float]) -> tuple[Tensor, Tensor]:
    """(B, 3) float64 values with NaN behind the shorter rows, and the mask."""
    mask = torch.arange(LENGTH) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
    values = [[*row, *([math.nan] * (LENGTH - len(row)))] for row in rows]
    return torch.tensor(values, dtype=torch.float64), mask


def method(*words: str, rewards: list[float], logps: list[list[float]], gaps: list[list[float]]) -> tuple[float, list]:
    """Loss, and its gradient by the log-probs of each completion of one group, as these words of a command line ask.

    `gaps` are log π − log π_old of each token, and log π − log π_ref.
    """
    config, _ = composed(*words)
    options = dict(config.advantage)
    advantage = bind("advantage", resolve("advantage", options.pop("name"), ADVANTAGES), options)
    options = dict(config.objective)
    objective = build_objective(resolve("objective", options.pop("name"), OBJECTIVES), **options)
    now, mask = columns(*logps)
    away, _ = columns(*gaps)
    now = now.requires_grad_()
    before = now.detach() - away
    penalty = None
    if objective.beta and objective.kl_in == "reward":
        penalty = kl_penalty(objective, now.detach(), before, mask).masked_fill(~mask, math.nan).unsqueeze(0)
    total = torch.tensor([rewards], dtype=torch.float64)
    advantages = estimate(advantage, Scores(("r",), (1.0,), total.unsqueeze(-1), total), penalty)
    mean_length = mask.sum(dim=1).double().mean().expand(len(rewards), 1)
    loss, _ = loss_and_terms(
        objective,
        logps=now,
        advantages=advantages.reshape(len(rewards), -1),
        mask=mask,
        denominators=Denominators(len(rewards), float(mask.sum()), LENGTH, mean_length),
        old_logps=before,
        ref_logps=before,
        sampler_logps=before,
    )
    (gradient,) = torch.autograd.grad(loss, now)
    assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))
    return loss.item(), [row[real].tolist() for row, real in zip(gradient, mask, strict=True)]


def test_rloo_by_hand() -> None:
    # beta = .5 and k1: the completions pay .5·(.2 + .4) = .3, .5·(−.2) = −.1 and .5·.4 = .2 of their rewards 1, 0, 2:
    # .7, .1 and 1.8. Less the mean of the others: .7 − .95 = −.25, .1 − 1.25 = −1.15, 1.8 − .4 = 1.4; sum 0.
    # REINFORCE summed over the completion: −A·Σ log π = .25·(−1.5) = −.375, 1.15·(−2) = −2.3, −1.4·(−1) = 1.4;
    # their mean is −1.275/3 = −.425, and each token's gradient −A/3
    words = ("method=rloo", "objective.beta=0.5")
    loss, gradient = method(
        *words, rewards=[1.0, 0.0, 2.0], logps=[[-1.0, -0.5], [-2.0], [-1.0]], gaps=[[0.2, 0.4], [-0.2], [0.4]]
    )
    assert loss == pytest.approx(-0.425)
    assert gradient == [pytest.approx([0.25 / 3] * 2), pytest.approx([1.15 / 3]), pytest.approx([-1.4 / 3])]


def test_sapo_by_hand() -> None:
    # rewards 1 and 0, population std .5: A = ±1 (eps = 0). τ = 1 above, 1.05 below.
    # ρ = e^.2 = 1.221403: −4·σ(.221403) = −4·.555126 = −2.220503; ∂ρ/∂log π = ρ, σ' = .555126·.444874 = .246961:
    #   gradient −4·.246961·1.221403 = −1.206557
    # ρ = 1: −4·½ = −2, gradient −4·¼ = −1; their mean −2.110251
    # A = −1, ρ = e^−.5 = .606531: (4/1.05)·σ(1.05·−.393469 = −.413143) = 3.809524·.398159 = 1.516795;
    #   gradient (4/1.05)·1.05·(.398159·.601841 = .239628)·.606531 = .581368
    # sequence means: loss (−2.110251 + 1.516795)/2 = −.296728; gradients over 2·2 and 2·1
    loss, gradient = method(
        "method=sapo", "advantage.eps=0", rewards=[1.0, 0.0], logps=[[-1.0, -0.5], [-2.0]], gaps=[[0.2, 0.0], [-0.5]]
    )
    assert loss == pytest.approx(-0.296728, abs=1e-6)
    assert gradient == [pytest.approx([-0.301639, -0.25], abs=1e-6), pytest.approx([0.290684], abs=1e-6)]


def test_luspo_by_hand() -> None:
    # A = r − mean = .5, −.7, .2 of rewards 1, −.2, .7 (mean .5); the ratio of a sequence is its geometric mean:
    #   (.1, −.3): e^−.1 = .904837, A > 0, not above 1.2: −.5·.904837 per token, times 2 tokens = −.904837
    #   (.2, .3, .1): e^.2 = 1.221403, A < 0, not below .8: .7·1.221403·3 = 2.564946
    #   (.5): e^.5 = 1.648721, A > 0, above 1.2: clipped, −.2·1.2 = −.24, no gradient
    # loss (−.904837 + 2.564946 − .24)/3 = .473370. Each token moves its sequence's ratio by s/|o|, and the sum counts
    # it |o| times: gradient −A·s/3 per token, whatever the length: −.150806 and .284994
    words = ("objective=luspo", "advantage=dr_grpo", "objective.clip_eps=0.2", "objective.clip_eps_high=0.2")
    loss, gradient = method(
        *words,
        rewards=[1.0, -0.2, 0.7],
        logps=[[-1.0, -0.5], [-2.0, -1.0, -0.1], [-1.0]],
        gaps=[[0.1, -0.3], [0.2, 0.3, 0.1], [0.5]],
    )
    assert loss == pytest.approx(0.473370, abs=1e-6)
    assert gradient == [pytest.approx([-0.150806] * 2, abs=1e-6), pytest.approx([0.284994] * 3, abs=1e-6), [0.0]]


def test_gmpo_by_hand() -> None:
    # rewards 1 and 0 less their mean: A = ±.5; log ρ is held at .4 from above where A > 0, at −.4 from below elsewhere
    #   (.1, .6): (.1 + .4)/2 = .25: −.5·e^.25 = −.642013; the held token has no gradient, the other −.642013/2
    #   (.6, −.8, .1): (.6 − .4 + .1)/3 = .1: .5·e^.1 = .552585; the held token has none, the others .552585/3
    # loss (−.642013 + .552585)/2 = −.044714; gradients once more over 2
    loss, gradient = method(
        *("objective=gmpo", "advantage=dr_grpo"),
        rewards=[1.0, 0.0],
        logps=[[-1.0, -0.5], [-2.0, -1.0, -0.1]],
        gaps=[[0.1, 0.6], [0.6, -0.8, 0.1]],
    )
    assert loss == pytest.approx(-0.044714, abs=1e-6)
    assert gradient[0] == pytest.approx([-0.160503, 0.0], abs=1e-6)
    assert gradient[1] == pytest.approx([0.092098, 0.0, 0.092098], abs=1e-6)


def test_scalerl_by_hand() -> None:
    # One group of rewards 1, 0, 0: r − mean = 2/3, −1/3, −1/3, population std √(2/9) = .471405: A = 1.414214 and twice
    # −.707107 (eps = 0). CISPO without a bound that is reached: −ρ·A·log π, ρ = e^.5 = 1.648721 and 1.
    # Tokens 2, 1, 1: the one prompt has 4. Losses: 1.414214·(1.648721·1 + .5) = 3.038751;
    # .707107·(−2 − 1) = −2.121320; sum over 4 tokens of the one prompt: .229358
    loss, _ = method(
        *("method=scalerl", "advantage.eps=0"),
        rewards=[1.0, 0.0, 0.0],
        logps=[[-1.0, -0.5], [-2.0], [-1.0]],
        gaps=[[0.5, 0.0], [0.0], [0.0]],
    )
    assert loss == pytest.approx(0.229358, abs=1e-6)
