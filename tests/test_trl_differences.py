"""Where we differ from TRL on purpose; the list with reasons stands in docs/algorithms.md."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_toolbox.advantages import group_relative
from grpo_toolbox.metrics import step_metrics
from grpo_toolbox.models.experts import aux_loss, routing
from grpo_toolbox.objectives import build_objective, loss_and_terms
from grpo_toolbox.ops import Denominators
from grpo_toolbox.selection import entropy_threshold
from grpo_toolbox.surrogates import cispo, clipped
from grpo_toolbox.types import Prompt, Rollout, Scores

pytest.importorskip("trl")

from same_tensors import (
    ENTROPY,
    HALVES,
    LENGTHS,
    MASK,
    NOW,
    OLD,
    REFERENCE,
    ROWS,
    SAMPLER,
    WHOLE,
    assert_equal,
    ours,
    theirs,
)
from trl_side import GROUP_SIZE, loss_on_log_probs, save_reference, scored, trl_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TOKEN_MEAN = {"loss_agg": "token_mean"}
FIRST, SECOND = HALVES


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("trl") / "reference")


# ---- denominators ----------------------------------------------------------------------------------------------------


def test_dapo_with_two_steps_per_generation_divides_by_their_average(reference: Path):
    # steps of 14 and 16 tokens: TRL divides both by 15, we each by its own count
    assert [int(LENGTHS[list(half)].sum()) for half in HALVES] == [14, 16]
    trainer = trl_trainer(reference, steps_per_generation=2)
    for half, tokens in ((FIRST, 14), (SECOND, 16)):
        expected = theirs(trainer, [half], old_per_token_logps=OLD)
        mine = ours(TOKEN_MEAN, half, old_logps=OLD)
        torch.testing.assert_close(mine[0] * tokens, expected[0] * 15)
        torch.testing.assert_close(mine[1] * tokens, expected[1] * 15)


def test_bnpo_depends_on_the_split_and_is_token_mean_only_in_one_micro_batch(reference: Path):
    one = theirs(trl_trainer(reference, loss_type="bnpo", per_device_train_batch_size=ROWS), WHOLE)
    two = theirs(trl_trainer(reference, loss_type="bnpo", micro_batches=2), HALVES)
    assert_equal(ours(TOKEN_MEAN), one)
    assert not torch.allclose(one[1], two[1], rtol=1e-2)


def test_entropy_bonus_is_a_mean_of_micro_batch_means_there(reference: Path):
    # micro-batches of 14 and 16 tokens: weights c/(2·14) and c/(2·16) per token there, c/30 here
    options = {"entropy_coef": 0.3}
    expected = theirs(trl_trainer(reference, micro_batches=2, **options), HALVES)[2]
    assert expected[0, 0].item() == pytest.approx(-0.3 / 28)
    assert expected[4, 0].item() == pytest.approx(-0.3 / 32)
    assert ours(TOKEN_MEAN | options)[2][MASK].tolist() == pytest.approx([-0.3 / 30] * 30)


def test_entropy_bonus_beside_top_entropy_is_over_the_kept_tokens_there(reference: Path):
    options = {"entropy_coef": 0.3, "top_entropy_quantile": 0.4}
    trained = (entropy_threshold(ENTROPY[MASK], 0.4) <= ENTROPY) & MASK
    kept = int(trained.sum())
    expected = theirs(trl_trainer(reference, per_device_train_batch_size=ROWS, **options), WHOLE)[2]
    assert expected[trained].tolist() == pytest.approx([-0.3 / kept] * kept)
    mine = ours(TOKEN_MEAN | options, trained=trained)[2]
    assert mine[trained].tolist() == pytest.approx([-0.3 / 30] * kept)
    assert not mine[~trained].any()


def test_top_entropy_has_a_threshold_per_micro_batch_there(reference: Path):
    # the micro-batch that happens to be unsure loses as many tokens as the one that is sure of everything
    trainer = trl_trainer(reference, top_entropy_quantile=0.5, micro_batches=2)
    shifted = ENTROPY + torch.where(torch.arange(ROWS) < GROUP_SIZE, 10.0, 0.0).unsqueeze(1)
    per_part = [trainer.get_high_entropy_mask(shifted[list(half)], MASK[list(half)].long(), 0.5) for half in HALVES]
    assert [int(part.sum()) for part in per_part] == [7, 8]
    mine = (shifted >= entropy_threshold(shifted[MASK], 0.5)) & MASK
    assert [int(mine[list(half)].sum()) for half in HALVES] == [14, 1]


# ---- surrogates and KL -----------------------------------------------------------------------------------------------


def test_cispo_under_trls_defaults_trains_with_a_fifth_of_the_gradient(reference: Path):
    trainer = trl_trainer(reference, loss_type="cispo", per_device_train_batch_size=ROWS)
    expected = theirs(trainer, WHOLE)
    assert_equal(ours(TOKEN_MEAN | {"name": "cispo", "ratio_cap": 0.2}), expected)
    mine = ours(TOKEN_MEAN | {"name": "cispo"})
    torch.testing.assert_close(mine[1] * 0.2, expected[1])
    assert cispo(NOW, NOW, NOW)[1].sum() == 0  # nothing is capped on-policy


def test_unbiased_kl_beside_a_sequence_ratio_is_unbiased_only_here(reference: Path):
    # tests/test_objective_options.py shows that ours is: it takes each token's own ratio; TRL takes the sequence's
    options = {"beta": 0.3}
    trainer = trl_trainer(reference, importance_sampling_level="sequence", per_device_train_batch_size=ROWS, **options)
    expected = theirs(trainer, WHOLE, ref_per_token_logps=REFERENCE)
    mine = ours(TOKEN_MEAN | options | {"ratio_level": "sequence", "kl_unbiased": True}, ref_logps=REFERENCE)
    torch.testing.assert_close(mine[0], expected[0])  # on-policy every ratio is 1 …
    assert not torch.allclose(mine[1], expected[1], rtol=1e-2)  # … and only the gradients differ
    r = REFERENCE - NOW
    k3 = torch.where(MASK, r.exp() - r - 1, 0.0)
    own = 0.3 / 30 * k3
    spread = 0.3 / 30 * (k3.sum(1) / LENGTHS).unsqueeze(1).expand_as(k3)  # Σ k3 · ∇s with ∇s = (1/|o|)·Σ∇log π
    torch.testing.assert_close((mine[1] - expected[1])[MASK], (own - spread)[MASK])


def test_vespo_takes_the_correction_into_its_own_weight_there(reference: Path):
    # TRL: w = Π π/π_old · Π IS, and one token that token_mask drops weighs 1e-8 in that product: the row is lost
    trainer = trl_trainer(reference, loss_type="vespo", per_device_train_batch_size=ROWS)
    kept, dropped = torch.ones_like(NOW), torch.ones_like(NOW)
    dropped[0, 2] = 0.0
    plain = theirs(trainer, WHOLE, importance_sampling_ratio=kept)
    lost = theirs(trainer, WHOLE, importance_sampling_ratio=dropped)
    assert plain[1][0].abs().sum() > 0.1
    assert lost[1][0].abs().max() < 1e-12
    sampler = NOW.clone()
    sampler[0, 2] += 5.0  # w = e⁻⁵ is out of [.5, 2]: that token alone is lost
    options = TOKEN_MEAN | {"name": "vespo", "correction": "token_mask"}
    mine = ours(options, sampler_logps=sampler)
    assert mine[1][0].tolist() == [0.0 if place == 2 else pytest.approx(plain[1][0, 0].item()) for place in range(6)]


def test_absurd_gaps_are_infinite_there_and_bounded_here(reference: Path):
    now = NOW.float().requires_grad_()
    far = {"old_per_token_logps": now.detach() - 95, "ref_per_token_logps": now.detach() + 95}
    columns = {"advantages": -torch.ones(ROWS), **far}
    trainer = trl_trainer(reference, beta=0.04, per_device_train_batch_size=ROWS)
    assert not loss_on_log_probs(trainer, now, ENTROPY.float(), MASK, columns, WHOLE).isfinite()
    loss, terms = loss_and_terms(
        build_objective(clipped, beta=0.04, kl_unbiased=True, **TOKEN_MEAN),
        logps=now,
        advantages=-torch.ones(ROWS, 1),
        mask=MASK,
        denominators=Denominators(ROWS, 30, 7),
        old_logps=far["old_per_token_logps"],
        ref_logps=far["ref_per_token_logps"],
    )
    assert loss.isfinite()
    assert torch.autograd.grad(loss, now)[0].isfinite().all()
    assert terms["kl_bounded_fraction"][MASK].all()


def test_off_policy_rows_are_measured_against_the_sampler_always(reference: Path):
    # without vLLM, TRL measures against π_old; in process the two are the same
    trainer = trl_trainer(reference, off_policy_mask_threshold=0.05, per_device_train_batch_size=ROWS)
    options = TOKEN_MEAN | {"off_policy_threshold": 0.05}
    expected = theirs(trainer, WHOLE, old_per_token_logps=OLD)
    assert_equal(ours(options, old_logps=OLD, sampler_logps=OLD), expected)
    assert not torch.allclose(ours(options, old_logps=OLD, sampler_logps=SAMPLER)[1], expected[1])


# ---- advantages and metrics ------------------------------------------------------------------------------------------


def test_aux_loss_is_a_mean_of_micro_batch_losses_there(reference: Path):
    # two micro-batches that use one expert of two each, and both evenly together: by themselves 2, together 1
    trainer = trl_trainer(reference, micro_batches=2, beta=0.0)
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.5
    parts = [routing([sign * torch.tensor([[50.0, -50.0]])], torch.ones(1), 1) for sign in (1.0, -1.0)]
    assert [float(aux_loss(part, part)) for part in parts] == [2, 2]
    there = 0.0
    for half, part in zip(HALVES, parts, strict=True):
        rows = list(half)
        outputs = SimpleNamespace(log_probs=NOW[rows], entropy=ENTROPY[rows], aux_loss=aux_loss(part, part))
        inputs = {
            "prompt_ids": torch.full((len(rows), 1), 5),
            "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
            "completion_ids": torch.full((len(rows), MASK.shape[1]), 5),
            "completion_mask": MASK[rows].long(),
            "num_items_in_batch": MASK.sum().double(),
            "advantages": torch.zeros(len(rows), dtype=torch.float64),
        }
        there += float(trainer._compute_loss(lambda outputs=outputs, **_: outputs, inputs))
    assert there == pytest.approx(0.5 * 2)
    assert sum(float(aux_loss(part, parts[0] + parts[1])) for part in parts) == pytest.approx(1)


def _scored_by_trl(
    reference: Path, rewards: list[float], kind: str = "grpo", size: int = GROUP_SIZE, **options: object
) -> tuple[torch.Tensor, float]:
    """Return TRL's advantages and its frac_reward_zero_std."""

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [rewards[ids[0] - 4] for ids in completion_ids]

    trainer = trl_trainer(
        reference,
        kind,
        rewards=[reward],
        completions=[[4 + index, 1] for index in range(len(rewards))],
        per_device_train_batch_size=len(rewards),
        num_generations=size,
        **options,
    )
    prompts = [("1+2=", "10+20=")[index // size] for index in range(len(rewards))]
    advantages = scored(trainer, prompts)["advantages"]
    return advantages, trainer._metrics["train"]["frac_reward_zero_std"][0]


def test_equal_rewards_can_leave_a_rounding_residue_there_and_exactly_nothing_here(reference: Path):
    # six times .9 in float32: the mean is off by one unit in the last place, and 6e-8 / (6e-8 + 1e-4) is 6e-4
    residue, _ = _scored_by_trl(reference, [0.9] * 6, size=6)
    assert residue.abs().tolist() == pytest.approx([5.96e-4] * 6, rel=1e-3)
    assert torch.equal(group_relative(torch.full((1, 6), 0.9)), torch.zeros(1, 6))


def test_frac_reward_zero_std_counts_groups_whatever_the_scaling(reference: Path):
    # one of two groups has no spread; with scale_rewards="batch" TRL looks at the batch's std, which is not 0
    rewards = [1.0] * GROUP_SIZE + [1.0, 0.0, 0.0, 0.0]
    for scale, expected in (("group", 0.5), ("none", 0.5), ("batch", 0.0)):
        assert _scored_by_trl(reference, rewards, scale_rewards=scale)[1] == expected
    # RLOO's trainer looks at the rewards less their KL, which is hardly ever the same
    assert _scored_by_trl(reference, rewards, "rloo", beta=0.0)[1] == 0.5
    assert _scored_by_trl(reference, rewards, "rloo", beta=0.05)[1] == 0.0
    prompts = [Prompt(0, "a", (1,)), Prompt(1, "b", (1,))]
    rollouts = [Rollout(prompts[index // GROUP_SIZE], (3,), (0.0,), "stop", "") for index in range(8)]
    total = torch.tensor(rewards).reshape(2, GROUP_SIZE)
    mine = step_metrics(rollouts, Scores(("r",), (1.0,), total.unsqueeze(-1), total))
    assert mine["frac_reward_zero_std"] == 0.5
