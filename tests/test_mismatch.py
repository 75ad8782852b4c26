"""How far the engine is from the trainer is logged at every step, and shows an engine that was left behind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import train
from toolbox_runs import SMALL, all_metrics, built_run

WORDS = (*SMALL, "reward=custom", "reward.name=plugs:digits", "objective.beta=0", "trainer.lr=0.05")
"""A large learning rate: each step moves log-probs by tenths of a nat, and soon no group has spread."""
LOGGED = {"logp_gap_mean", "logp_gap_max", "kl", "ess", "ratio_min", "ratio_mean", "ratio_max"}


class Separate(LocalEngine):
    """An engine with weights of its own, which a sync overwrites; one that `forgets` stays as it was."""

    def __init__(self, policy: Any, forgets: bool, **shared: Any) -> None:
        super().__init__(copy.deepcopy(policy), **shared)
        self._policy, self._forgets = policy, forgets

    def sync(self, version: int | None = None) -> int:
        if not self._forgets:
            self._model.load_state_dict(self._policy.state_dict())
        return super().sync(version)


def gaps(run: Run, run_dir: Path) -> list[float]:
    """Mean |Δ log-prob| of each step of a whole run."""
    train(run)
    lines = all_metrics(run_dir)
    for line in lines:
        assert {name.removeprefix("sampler/") for name in line if name.startswith("sampler/")} >= LOGGED
    return [line["sampler/logp_gap_mean"] for line in lines]


@pytest.mark.parametrize("engine", ["local", "hf", "separate"])
def test_case_e09_1_the_engine_stays_as_near_as_at_the_first_step(engine: str, tmp_path: Path) -> None:
    name = "hf" if engine == "hf" else "local"
    run = built_run(*WORDS, f"rollout.engine={name}", "trainer.max_steps=3", f"run_dir={tmp_path / 'run'}")
    if engine == "separate":
        run.engine = separate(run, forgets=False)
    assert max(gaps(run, tmp_path / "run")) < 1e-5


def test_an_engine_that_is_left_behind_shows_at_the_second_step(tmp_path: Path) -> None:
    run = built_run(*WORDS, "trainer.max_steps=3", f"run_dir={tmp_path / 'run'}")
    run.engine = separate(run, forgets=True)
    first, second, third = gaps(run, tmp_path / "run")
    assert first < 1e-5
    assert min(second, third) > 0.01


NOTHING = "reward.name=test_mismatch:nothing"
CUT_OFF = ("objective.mask_truncated=true", "rollout.min_new_tokens=3", "rollout.max_new_tokens=3")
UNTRAINED = (
    [NOTHING],
    ["method=ppo", "critic.pretrain_steps=3"],
    # the second step of a generation is off-policy
    [NOTHING, "rollout.steps_per_generation=2", "rollout.prompts_per_step=2"],
    [NOTHING, "rollout.steps_per_generation=2", "rollout.prompts_per_step=2", "trainer.ppo_epochs=2"],
    # every group is dropped, and the batch empty
    [NOTHING, "rollout.dynamic_sampling=true"],
    # every completion is cut off and left out; with a KL their rows are forwarded, but no token of them counts
    [*CUT_OFF],
    [*CUT_OFF, "objective.beta=0.1"],
)


@pytest.mark.parametrize("words", UNTRAINED, ids=" ".join)
def test_steps_that_do_not_train_the_policy_measure_it_too(words: list[str], tmp_path: Path) -> None:
    run = built_run(*WORDS, *words, "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}")
    before = [one.detach().clone() for one in run.policy.parameters()]
    assert max(gaps(run, tmp_path / "run")) < 1e-5
    assert all(torch.equal(one, other) for one, other in zip(before, run.policy.parameters(), strict=True))


@pytest.mark.parametrize("words", [UNTRAINED[0], UNTRAINED[4]], ids=" ".join)
def test_where_nothing_is_trained_the_engine_is_measured_before_the_optimizer_moves(
    words: list[str], tmp_path: Path
) -> None:
    """Momentum moves the policy in a step without a gradient, too: what drew the rollouts is the policy before."""
    run = built_run(*WORDS, *words, "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}")
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            moments = {"exp_avg": torch.ones_like(parameter), "exp_avg_sq": torch.ones_like(parameter)}
            run.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    before = torch.cat([one.detach().flatten().clone() for one in run.policy.parameters()])
    assert max(gaps(run, tmp_path / "run")) < 1e-5
    after = torch.cat([one.detach().flatten() for one in run.policy.parameters()])
    assert float((after - before).abs().mean()) > 0.01


def nothing(completions: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


def separate(run: Run, forgets: bool) -> Separate:
    own: Any = run.engine
    return Separate(run.policy, forgets, decode=own._decode, stop_ids=own._stop_ids)


def test_one_step_moves_log_probs_further_than_rounding(tmp_path: Path) -> None:
    """What the cases above rest on: without it an engine that is left behind would not show."""
    run = built_run(*WORDS, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}")
    before = torch.cat([one.detach().flatten().clone() for one in run.policy.parameters()])
    train(run)
    after = torch.cat([one.detach().flatten() for one in run.policy.parameters()])
    assert float((after - before).abs().mean()) > 0.01
