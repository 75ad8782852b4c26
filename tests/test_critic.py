"""The critic: values where they belong, the clipped loss by hand, steps that do not depend on the split, whole runs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import composed, refused
from exact_llama import PLAIN, full_batch, small_llama
from grpo_toolbox.batch import Batch
from grpo_toolbox.critic import Critic, CriticSettings, value_loss
from grpo_toolbox.errors import ToolboxError, TrainingError
from toolbox_runs import SMALL, all_metrics, built_run, differences, metrics, one_thread, state, toolbox_train

CPU = torch.device("cpu")
ACTOR_CRITIC = (*SMALL, "advantage=gae", "objective=ppo_clip", "trainer.ppo_epochs=2", "critic.lr=1e-3")
NOISY = (*ACTOR_CRITIC, "reward=custom", "reward.name=plugs:noisy")


def critic(**settings: Any) -> Critic:
    """A critic in float64 whose head no longer is zero."""
    made = Critic(small_llama(), CriticSettings(**{"lr": 1e-2, **settings}), CPU)
    with torch.no_grad():
        made.parts["head"].weight.copy_(torch.linspace(-1, 1, 16, dtype=torch.float64))
    return made


def taught() -> Batch:
    batch = full_batch(PLAIN)
    shape = batch.mask.shape
    random = torch.Generator().manual_seed(1)
    values, returns = (torch.randn(shape, generator=random) for _ in range(2))
    returns[2] = math.nan  # a row without a reward
    return replace(batch, values=values, returns=returns)


def weights(one: Critic) -> Tensor:
    return torch.cat([value.detach().flatten() for value in one._parameters().values()])


# ---- values


def test_an_untrained_critic_expects_nothing() -> None:
    assert torch.equal(Critic(small_llama(), CriticSettings(), CPU).values(full_batch(PLAIN)), torch.zeros(9, 6))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [8, 10**6])
def test_values_are_read_where_the_token_before_stands(packed: bool, tokens: int) -> None:
    """V before a token: the head on the hidden state of what stands before it, one row at a time, no padding."""
    batch, made = full_batch(PLAIN), critic(packed=packed, micro_batch_tokens=tokens)
    values = made.values(batch)
    for row, (group, ids) in enumerate(zip(batch.group, batch.completions, strict=True)):
        prompt = batch.prompts[group]
        with torch.no_grad():
            hidden = made._model.model(input_ids=torch.tensor([[*prompt, *ids]])).last_hidden_state[0]
            expected = made.parts["head"](hidden[len(prompt) - 1 : -1]).squeeze(-1)
        torch.testing.assert_close(values[row, : len(ids)], expected.float(), atol=1e-6, rtol=1e-6)
        assert torch.equal(values[row, len(ids) :], torch.zeros(6 - len(ids)))


# ---- learning


def test_the_clipped_value_loss_by_hand() -> None:
    # ε = .2, V_old = 0, R = 1. V = .1: inside, ½·.9² = .405. V = .5: held at .2, ½·max(.5², .8²) = .32, clipped.
    # V = −.5: held at −.2, ½·max(1.5², 1.2²) = 1.125, not clipped: it went the wrong way, and may come back.
    values = torch.tensor([0.1, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    loss, held = value_loss(values, torch.ones(3).double(), torch.zeros(3).double(), 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.405, 0.32, 1.125], dtype=torch.float64))
    assert held.tolist() == [False, True, False]
    # d/dV ½(V − R)² = V − R where it is not held, 0 where it is
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 0.0, -1.5], dtype=torch.float64))
    free, none = value_loss(values, torch.ones(3).double(), torch.zeros(3).double(), None)
    torch.testing.assert_close(free, torch.tensor([0.405, 0.125, 1.125], dtype=torch.float64))
    assert not none.any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_a_step_does_not_depend_on_the_split(packed: bool, tokens: int) -> None:
    whole, split = critic(packed=False, micro_batch_tokens=10**6), critic(packed=packed, micro_batch_tokens=tokens)
    expected, found = whole.update(taught(), 1, epochs=2), split.update(taught(), 1, epochs=2)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weights(split), weights(whole), atol=1e-7, rtol=0)


def test_rows_without_a_return_and_columns_off_the_mask_teach_nothing() -> None:
    batch = taught()
    one, other = critic(), critic()
    logged = one.update(batch, 1, epochs=1)
    assert batch.values is not None
    assert batch.returns is not None
    off = ~batch.mask | batch.returns.isnan()
    spoilt = replace(
        batch, values=batch.values.masked_fill(off, 1e6), returns=batch.returns.masked_fill(~batch.mask, 1e6)
    )
    assert other.update(spoilt, 1, epochs=1) == logged
    assert torch.equal(weights(one), weights(other))
    untaught = replace(batch, returns=torch.full_like(batch.returns, math.nan))
    assert one.update(untaught, 2, epochs=1) == {}
    assert torch.equal(weights(one), weights(other))


def test_explained_variance_is_of_the_values_that_judged() -> None:
    # R = V + 1: the residual has no variance, all is explained; V = 0: nothing is; R = −V: 1 − 4 = −3
    batch, one = taught(), critic()
    assert batch.values is not None
    for returns, values, explained in (
        (batch.values + 1, batch.values, 1.0),
        (batch.values, torch.zeros_like(batch.values), 0.0),
        (-batch.values, batch.values, -3.0),
    ):
        logged = one.update(replace(batch, returns=returns, values=values), 1, epochs=1)
        assert logged["critic/explained_variance"] == pytest.approx(explained, abs=1e-6)
    flat = one.update(replace(batch, returns=torch.ones_like(batch.values)), 1, epochs=1)
    assert "critic/explained_variance" not in flat


def test_it_learns_returns_that_depend_on_the_token_before() -> None:
    batch = taught()
    returns = torch.zeros(batch.mask.shape)
    for row, ids in enumerate(batch.completions):
        before = (batch.prompts[batch.group[row]][-1], *ids[:-1])
        returns[row, : len(ids)] = torch.tensor([token % 2 for token in before], dtype=torch.float32)
    one = critic(clip=None)
    for number in range(1, 61):
        logged = one.update(replace(batch, returns=returns, values=one.values(batch)), number, epochs=1)
    assert logged["critic/explained_variance"] > 0.95


def test_what_is_not_finite_does_not_reach_the_optimizer() -> None:
    batch, one = taught(), critic()
    before = weights(one)
    assert batch.returns is not None
    with pytest.raises(TrainingError, match="step 7: the critic's loss is not finite"):
        one.update(replace(batch, returns=batch.returns.masked_fill(batch.mask, math.inf)), 7, epochs=1)
    assert torch.equal(weights(one), before)


def test_a_saved_critic_goes_on_where_it_was() -> None:
    one, other = critic(), critic()
    one.update(taught(), 1, epochs=1)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for each in (one, other):
        each.update(taught(), 2, epochs=1)
    assert torch.equal(weights(one), weights(other))
    with pytest.raises(ToolboxError, match=r"resume with the critic\.path"):
        one.load_state_dict({"parameters": {}, "optimizer": {}})


# ---- whole runs


def test_a_critic_is_built_for_estimators_that_ask_for_values_only() -> None:
    assert built_run(*SMALL).critic is None
    run = built_run(*ACTOR_CRITIC, "model.lora.r=2", "critic.lr=3e-4", "trainer.packing=false")
    assert run.critic is not None
    assert run.critic.settings == CriticSettings(lr=3e-4, packed=False)
    assert not any("lora" in name for name in run.critic._parameters())
    assert not any(name.startswith("decoder.lm_head") for name in run.critic._parameters())


@pytest.mark.parametrize("key", ["critic.clip=0", "critic.max_grad_norm=0", "critic.lr=-1", "critic.pretrain_steps=-1"])
def test_settings_that_cannot_work_are_refused(key: str) -> None:
    assert key.partition("=")[0] in str(refused(key))


@pytest.mark.parametrize(
    "words",
    [
        ["rollout.group_size=1"],
        ["objective.beta=0.1", "objective.kl=k1", "objective.kl_in=reward", "model.lora.r=2"],
        ["rollout.steps_per_generation=2", "data.path='builtin:additions?max_sum=4'"],
        ["rollout.dynamic_sampling=true", "reward=custom", "reward.name=plugs:noisy"],
        ["trainer.packing=false", "critic.path='builtin:tiny'", "objective.mask_truncated=true"],
        ["method=ppo"],
    ],
    ids=lambda words: words[0],
)
def test_runs_with_a_critic(words: list[str], tmp_path: Path) -> None:
    assert toolbox_train(*ACTOR_CRITIC, *words, "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}") == 0
    for line in all_metrics(tmp_path / "run"):
        found = {name.removeprefix("critic/") for name in line if name.startswith("critic/")}
        assert (
            {"loss", "value_mean", "clip_fraction", "grad_norm"}
            <= found
            <= {*("loss", "value_mean", "clip_fraction", "grad_norm", "explained_variance")}
        )


def test_while_the_critic_is_pretrained_the_policy_stays(tmp_path: Path) -> None:
    words = (*NOISY, "critic.pretrain_steps=2", "trainer.max_steps=2")
    assert toolbox_train(*words, f"run_dir={tmp_path / 'run'}") == 0
    start = built_run(*words)
    saved = state(tmp_path / "run")
    assert differences(saved["parameters"], dict(start.policy.named_parameters())) == []
    assert start.critic is not None
    assert differences(saved["critic"]["parameters"], start.critic.state_dict()["parameters"]) != []
    for line in all_metrics(tmp_path / "run"):
        assert line["critic/pretraining"] == 1
        assert "loss" not in line
        assert "critic/loss" in line
    assert toolbox_train(f"resume={tmp_path / 'run'}", "trainer.max_steps=3") == 0
    line = all_metrics(tmp_path / "run")[-1]
    assert line["critic/pretraining"] == 0
    assert "loss" in line


@pytest.mark.parametrize("words", [[], ["rollout.steps_per_generation=2", "rollout.prompts_per_step=2"]])
def test_two_and_two_steps_equal_four(words: list[str], tmp_path: Path) -> None:
    """Bit for bit, the critic and its optimizer, too; also when the stop is amid a generation."""
    given = (*NOISY, *words)
    with one_thread():
        assert toolbox_train(*given, "trainer.max_steps=4", f"run_dir={tmp_path / 'four'}") == 0
        assert toolbox_train(*given, "trainer.max_steps=3", f"run_dir={tmp_path / 'two'}") == 0
        assert toolbox_train(f"resume={tmp_path / 'two'}", "trainer.max_steps=4") == 0
    assert metrics(tmp_path / "two") == metrics(tmp_path / "four")
    assert differences(state(tmp_path / "two"), state(tmp_path / "four")) == []
    assert state(tmp_path / "two")["critic"]["optimizer"]["state"]


def test_the_method_sets_the_critic_s_clip() -> None:
    config, _ = composed("method=ppo")
    assert (config.critic.clip, config.trainer.ppo_epochs, config.advantage["lam"]) == (0.2, 4, 0.95)


@pytest.mark.slow
def test_it_learns_additions(tmp_path: Path) -> None:
    """48 prompts a step, four completions each; without the entropy bonus the policy stops exploring too early."""
    given = ("experiment=grpo_tiny", "advantage=gae", "objective=ppo_clip", "trainer.ppo_epochs=2", "callbacks=none")
    settings = ("rollout.group_size=4", "rollout.prompts_per_step=48", "critic.lr=1e-3", "objective.entropy_coef=0.02")
    given = (*given, *settings, "trainer.schedule=linear", "trainer.max_steps=300")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    lines = metrics(tmp_path / "run")
    assert fmean(line["reward_mean"] for line in lines[:5]) < 0.05
    assert fmean(line["reward_mean"] for line in lines[-50:]) >= 0.85
    assert fmean(line["critic/explained_variance"] for line in lines[-50:]) > 0.8
