"""Parity with TRL from rewards to parameter gradients: one tiny model, given completions, both sides' own code.

TRL scores, estimates advantages, computes log-probs under policy and reference, corrects and masks; so do we, packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_toolbox.advantages import ADVANTAGES, estimate, rloo
from grpo_toolbox.batch import Batch, collate, denominators
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.tiny import build_tiny
from grpo_toolbox.objectives import build_objective, kl_penalty, loss_and_terms
from grpo_toolbox.rewards import combine, score_rollouts
from grpo_toolbox.selection import entropy_threshold
from grpo_toolbox.surrogates import OBJECTIVES
from grpo_toolbox.types import Prompt, Rollout

pytest.importorskip("trl")

from trl_side import GROUP_SIZE, MAX_TOKENS, losses_of, save_reference, scored, trl_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Estimator = Callable[..., Tensor]
TEMPERATURE = 0.8
PROMPTS = ("1+2=", "10+20=")  # of different lengths: TRL pads, we do not
# 1 is the end; the two rows of seven tokens without it are cut off
COMPLETIONS = [
    [4, 5, 1],
    [6, 7, 8, 9, 1],
    [5, 1],
    [10, 11, 12, 13, 14, 15, 16],
    [3, 4, 1],
    [8, 8, 8, 1],
    [9, 10, 11, 12, 13, 14, 1],
    [5, 6, 7, 8, 9, 10, 11],
]
RIGHT = dict(zip(map(tuple, COMPLETIONS), [1.0, 0.0, 0.3, 0.7, None, 1.0, None, 0.2], strict=True))
STYLE = dict(zip(map(tuple, COMPLETIONS), [0.5, None, 0.1, -0.4, None, 0.9, 0.6, 0.0], strict=True))


def right(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    return [RIGHT[tuple(ids)] for ids in completion_ids]


def style(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    return [STYLE[tuple(ids)] for ids in completion_ids]


WEIGHTS = [1.0, 0.5]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("trl") / "reference")


def _rollouts() -> list[Rollout]:
    """Completions whose sampler differs from the policy by about a tenth of a nat, as another engine's would."""
    model, tokenizer = build_tiny(seed=0)
    prompts = [Prompt(index, text, tuple(tokenizer(text)["input_ids"])) for index, text in enumerate(PROMPTS)]
    rows = [
        Rollout(prompts[index // GROUP_SIZE], tuple(ids), (0.0,) * len(ids), "stop" if ids[-1] == 1 else "length", "")
        for index, ids in enumerate(COMPLETIONS)
    ]
    batch = collate(rows, torch.zeros(len(PROMPTS), GROUP_SIZE))
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    logps = _logps(model, batch)[0].detach() + noise
    return [
        Rollout(row.prompt, row.ids, tuple(values[: len(row.ids)].tolist()), row.finish_reason, row.text)
        for row, values in zip(rows, logps, strict=True)
    ]


def _logps(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return completion_logps(model, batch, temperature=TEMPERATURE, packed=True)


def _move(model: nn.Module) -> None:
    """A step of the optimizer's size or more, the same for both sides: ratios leave 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)


def _ours(
    rollouts: list[Rollout], advantage: str | Estimator, options: dict[str, Any]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    model, reference = build_tiny(seed=0)[0], build_tiny(seed=1)[0]
    options = dict(options)
    objective = build_objective(OBJECTIVES[options.pop("name", "clipped")], **options)
    scores = score_rollouts(combine([right, style], WEIGHTS), rollouts, GROUP_SIZE)
    blank = collate(rollouts, torch.zeros_like(scores.total))
    with torch.no_grad():
        old_logps, ref_logps = _logps(model, blank)[0], _logps(reference, blank)[0]
    penalty = None
    if objective.kl_in == "reward":
        penalty = kl_penalty(objective, old_logps, ref_logps, blank.mask).reshape(len(PROMPTS), GROUP_SIZE, -1)
    estimator = ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
    advantages = estimate(estimator, scores, penalty)
    batch = collate(rollouts, advantages, mask_truncated=objective.mask_truncated)
    _move(model)
    logps, entropy = _logps(model, batch)
    threshold = entropy_threshold(entropy[batch.mask], objective.top_entropy_quantile).detach()
    loss, _ = loss_and_terms(
        objective,
        logps=logps,
        entropy=entropy,
        advantages=batch.advantages,
        mask=batch.mask,
        denominators=denominators(batch, MAX_TOKENS),
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampler_logps=batch.sampler_logps,
        trained=(entropy >= threshold) if objective.top_entropy_quantile < 1 else None,
    )
    loss.backward()
    return advantages.flatten(), loss.item(), _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _theirs(
    reference: Path, kind: str, rollouts: list[Rollout], sampler: bool, micro_batches: int, options: dict[str, Any]
) -> tuple[Tensor, float, dict[str, Tensor]]:
    rows = len(rollouts) // micro_batches
    trainer = trl_trainer(
        reference,
        kind,
        rewards=[right, style],
        completions=COMPLETIONS,
        sampler_logps=[row.logps for row in rollouts] if sampler else None,
        micro_batches=micro_batches,
        per_device_train_batch_size=rows,
        num_iterations=2,  # off-policy, as far as TRL knows: it computes π_old
        temperature=TEMPERATURE,
        reward_weights=WEIGHTS,
        **options,
    )
    batch = scored(trainer, [row.prompt.text for row in rollouts])
    _move(trainer.model)
    loss = losses_of(trainer, batch, [range(start, start + rows) for start in range(0, len(rollouts), rows)])
    return batch["advantages"], loss, _gradients(trainer.model)


IS = {"vllm_importance_sampling_clip_max": 1.05, "vllm_importance_sampling_clip_min": 0.9}
BOUNDS = {"correction_max": 1.05, "correction_min": 0.9}
TOKENS = {"loss_agg": "token_mean"}
SEQUENCES = {"loss_agg": "seq_mean_token_mean"}

# TRL: trainer, options, whether it gets the sampler's log-probs, micro-batches; ours: advantage, objective
Case = tuple[str, dict[str, Any], bool, int, str | Estimator, dict[str, Any]]
CASES: dict[str, Case] = {
    "TRL's defaults": ("grpo", {}, False, 2, "group_relative", TOKENS),
    "GRPO, batch std, KL": (
        "grpo",
        {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.04, "use_bias_correction_kl": False},
        False,
        2,
        "batch_normalized",
        SEQUENCES | {"beta": 0.04},
    ),
    "Dr. GRPO, two-sided clip": (
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none", "delta": 1.3},
        False,
        2,
        "dr_grpo",
        {"loss_agg": "constant", "delta": 1.3},
    ),
    "GSPO": (
        "grpo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        False,
        2,
        "group_relative",
        SEQUENCES | {"ratio_level": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    ),
    "LUSPO": (
        "grpo",
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        False,
        2,
        "group_relative",
        {"loss_agg": "seq_mean_token_sum", "ratio_level": "sequence"},
    ),
    "CISPO": (
        "grpo",
        {"loss_type": "cispo", "epsilon_high": 1.05},
        False,
        2,
        "group_relative",
        TOKENS | {"name": "cispo", "ratio_cap": 1.05},
    ),
    "SAPO": ("grpo", {"loss_type": "sapo"}, False, 2, "group_relative", SEQUENCES | {"name": "sapo"}),
    "VESPO": ("grpo", {"loss_type": "vespo"}, False, 2, "group_relative", TOKENS | {"name": "vespo"}),
    "BNPO in one micro-batch": ("grpo", {"loss_type": "bnpo"}, False, 1, "group_relative", TOKENS),
    "GDPO": ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, False, 2, "gdpo", TOKENS),
    "truncated completions masked": (
        "grpo",
        {"loss_type": "grpo", "mask_truncated_completions": True},
        False,
        2,
        "group_relative",
        SEQUENCES | {"mask_truncated": True},
    ),
    "truncated completions masked, token mean": (
        "grpo",
        {"mask_truncated_completions": True},
        False,
        2,
        "group_relative",
        TOKENS | {"mask_truncated": True},
    ),
    **{
        f"correction {mode}": (
            "grpo",
            {"vllm_importance_sampling_mode": mode} | IS,
            True,
            2,
            "group_relative",
            TOKENS | {"correction": mode} | BOUNDS,
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "TRL's default correction": ("grpo", {}, True, 2, "group_relative", TOKENS | {"correction": "sequence_mask"}),
    "off-policy rows, against the sampler": (
        "grpo",
        {"off_policy_mask_threshold": 0.02, "vllm_importance_sampling_correction": False},
        True,
        2,
        "group_relative",
        TOKENS | {"off_policy_threshold": 0.02},
    ),
    "entropy bonus": ("grpo", {"entropy_coef": 0.1}, False, 1, "group_relative", TOKENS | {"entropy_coef": 0.1}),
    "top entropy": (
        "grpo",
        {"top_entropy_quantile": 0.3},
        False,
        1,
        "group_relative",
        TOKENS | {"top_entropy_quantile": 0.3},
    ),
    "unbiased KL": ("grpo", {"beta": 0.1}, False, 2, "group_relative", TOKENS | {"beta": 0.1, "kl_unbiased": True}),
    "RLOO with its KL in the reward": (
        "rloo",
        {"beta": 0.05},
        False,
        1,
        "rloo",
        SEQUENCES | {"ratio_level": "product", "beta": 0.05, "kl": "k1", "kl_in": "reward"},
    ),
    "RLOO with bounded rewards, normalised": (
        "rloo",
        {"beta": 0.05, "reward_clip_range": (0.1, 1.0), "normalize_advantages": True},
        False,
        1,
        partial(rloo, reward_min=0.1, reward_max=1.0, normalize=True),
        SEQUENCES | {"ratio_level": "product", "beta": 0.05, "kl": "k1", "kl_in": "reward"},
    ),
    "GMPO with KL": (
        "gmpo",
        {"beta": 0.1, "epsilon": 0.02},
        False,
        2,
        "group_relative",
        SEQUENCES | {"name": "gmpo", "clip_eps": 0.02, "beta": 0.1},
    ),
}


def test_every_case_makes_a_difference():
    """Parity under an option that does nothing here would be no evidence."""
    rollouts = _rollouts()
    gradients = {}
    for name, (_, _, _, _, advantage, objective) in CASES.items():
        found = _ours(rollouts, advantage, objective)[2]
        gradients[name] = torch.cat([gradient.flatten() for gradient in found.values()])
    del gradients["BNPO in one micro-batch"]  # there it is TRL's default
    for one, other in itertools.combinations(gradients, 2):
        gap = (gradients[one] - gradients[other]).norm() / gradients[other].norm()
        assert gap > 1e-3, (one, other)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_advantages_loss_and_parameter_gradients_are_trls(case: Case, reference: Path):
    kind, options, sampler, micro_batches, advantage, objective = case
    rollouts = _rollouts()
    advantages, loss, gradients = _ours(rollouts, advantage, objective)
    their_advantages, their_loss, their_gradients = _theirs(reference, kind, rollouts, sampler, micro_batches, options)
    torch.testing.assert_close(advantages, their_advantages, atol=1e-5, rtol=1e-5)
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert gradients.keys() == their_gradients.keys()
    ours = torch.cat([gradients[name].flatten() for name in gradients])
    theirs = torch.cat([their_gradients[name].flatten() for name in gradients])
    assert theirs.norm() > 1e-3
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
