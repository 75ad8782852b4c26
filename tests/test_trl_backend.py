"""The same config on TRL: what it trains with, that its gradients are ours, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

pytest.importorskip("trl")

from grpo_toolbox.advantages import estimate
from grpo_toolbox.backends.trl_steps import Steps
from grpo_toolbox.callbacks import CALLBACKS, Callback
from grpo_toolbox.experience import batch_of
from grpo_toolbox.models.load import load_model
from grpo_toolbox.run import Experience
from grpo_toolbox.types import Step
from grpo_toolbox.update import reward_penalty, update
from toolbox_runs import (
    SMALL,
    all_metrics,
    built_run,
    checkpoints,
    differences,
    metrics,
    one_thread,
    state,
    toolbox_train,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TRL = ("experiment=grpo_tiny", *SMALL, "trainer.name=trl")


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within a group of random completions."""
    return [(sum(ids) % 9) / 8 for ids in completion_ids]


def half(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Another one, which does not apply to completions of one token."""
    return [None if len(ids) == 1 else ids[0] / 20 for ids in completion_ids]


VARIED = ("reward=custom", f"reward.name={__name__}:varied")
ROUGH = ("rollout.max_new_tokens=5", "trainer.max_grad_norm=inf", "trainer.lr=1e-2")


@dataclass(frozen=True)
class Taken:
    """One step as TRL took it."""

    gradient: dict[str, Tensor]
    step: Step


def steps_on_trl(monkeypatch: pytest.MonkeyPatch, *words: object) -> list[Taken]:
    """Train on TRL, and return the gradient of each optimizer step beside what it was of."""
    gradients: list[dict[str, Tensor]] = []
    steps: list[Step] = []
    former = Steps.on_pre_optimizer_step

    def watch(self: Steps, *args: Any, **options: Any) -> None:
        former(self, *args, **options)
        moved = self._run.policy.named_parameters()
        gradients.append({name: one.grad.clone() for name, one in moved if one.grad is not None})

    class Watch(Callback):
        def on_step(self, step: Step) -> None:
            steps.append(step)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "on_pre_optimizer_step", watch)
        patch.setitem(CALLBACKS, "watch", f"{__name__}:watch_callback")
        patch.setattr(sys.modules[__name__], "watch_callback", Watch, raising=False)
        assert toolbox_train(*TRL, *words, "+callbacks.watch={}") == 0
    return [Taken(*pair) for pair in zip(gradients, steps, strict=True)]


def our_gradient(taken: Taken, *words: object) -> dict[str, Tensor]:
    """The gradient that the toolbox's own update has on the rollouts and scores of TRL's step."""
    run = built_run("experiment=grpo_tiny", *SMALL, "rollout.reuse_logps=false", *words)
    run.policy.eval()
    rollouts, scores = taken.step.rollouts, taken.step.scores
    assert scores is not None
    penalty = reward_penalty(run, rollouts, run.group_size)
    advantages = estimate(run.advantage, scores, penalty, None)
    torch.testing.assert_close(advantages, taken.step.advantages, rtol=1e-4, atol=1e-5)
    gradients: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        gradients.append({name: one.grad.clone() for name, one in run.policy.named_parameters() if one.requires_grad})

    run.optimizer.step = keep  # type: ignore[method-assign]
    update(run, batch_of(run, Experience(rollouts, scores, advantages, range(len(advantages)))), 1)
    (found,) = gradients
    return found


METHODS = {
    "grpo": ("objective=grpo",),
    "grpo, rows one by one": ("objective=grpo", "trainer.micro_batch_tokens=10"),
    "dapo": ("objective=dapo",),
    "dr_grpo": ("objective=dr_grpo", "advantage=dr_grpo", "objective.beta=0.1"),
    "luspo": ("objective=luspo",),
    "cispo": ("objective=cispo",),
    "sapo": ("objective=sapo",),
    "batch": ("objective=dapo", "advantage=batch_normalized", "objective.beta=0.1", "objective.kl_unbiased=true"),
    "entropy": ("objective=dapo", "objective.entropy_coef=0.1", "objective.top_entropy_quantile=1.0"),
    # a seed with which no completion is cut off at the pad token, which TRL takes for an end
    "truncated": ("objective=dapo", "objective.mask_truncated=true", "rollout.prompts_per_step=2", "trainer.seed=20"),
    "gdpo": (
        "advantage=gdpo",
        "objective=dapo",
        "reward=weighted_sum",
        f"reward.components=[{{name: '{__name__}:varied', weight: 1}}, {{name: '{__name__}:half', weight: 0.5}}]",
    ),
    "rloo": ("method=rloo", "objective.beta=0.2"),
    "rloo, clipped": (
        *("advantage=rloo", "advantage.normalize=true", "advantage.reward_max=0.7", "objective=ppo_clip"),
        *("objective.ratio_level=product", "objective.loss_agg=seq_mean_token_mean"),
    ),
    "lora": ("model.lora.r=2", "objective.beta=0.1"),
    "temperature": ("rollout.temperature=0.7",),
}


ALWAYS = ("grpo", "grpo, rows one by one", "gdpo", "rloo", "rloo, clipped", "cispo", "lora")


def always(names: Iterable[str], chosen: Sequence[str]) -> list[Any]:
    """All names; those that are not chosen are left to the slow tests."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", always(METHODS, ALWAYS))
def test_the_gradients_of_both_trainers_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step, and where the policy has left its reference: same prompts, completions and rewards."""
    words = (*(() if name == "gdpo" else VARIED), *ROUGH, *METHODS[name])
    run_dir = tmp_path / "run"
    first, _ = steps_on_trl(monkeypatch, *words, "trainer.max_steps=2", f"run_dir={run_dir}")
    shutil.copytree(run_dir, tmp_path / "copy")
    (third,) = steps_on_trl(monkeypatch, *words, "trainer.max_steps=3", f"resume={run_dir}")
    for taken, where in ((first, f"run_dir={tmp_path / 'ours'}"), (third, f"resume={tmp_path / 'copy'}")):
        ours = our_gradient(taken, *words, "trainer.max_steps=4", where)
        norm = math.sqrt(sum(float(part.square().sum()) for part in ours.values()))
        apart = sum(float((part - taken.gradient[name]).square().sum()) for name, part in ours.items())
        assert norm > 1e-3
        assert math.sqrt(apart) < 1e-5 * norm


# ---- the run


def test_it_leaves_the_folder_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("callbacks=default", "callbacks.display=null", "data.eval_size=2", "trainer.eval_every=2")
    assert toolbox_train(*TRL, *words, "trainer.max_steps=3", "trainer.save_every=1", f"run_dir={run_dir}") == 0
    names = ("config.yaml", "metrics.jsonl", "samples.jsonl", "memory.sqlite", "traces/actions.jsonl")
    assert all((run_dir / name).is_file() for name in names)
    assert OmegaConf.load(run_dir / "config.yaml").trainer.name == "trl"
    assert checkpoints(run_dir) in ([2, 3], [0, 2, 3], [1, 2, 3])  # the two newest, and the best
    assert load_model(str(run_dir / "checkpoints" / "step-00000003" / "model")) is not None
    lines = all_metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [sorted(name for name in line if name.startswith("eval/")) != [] for line in lines] == [
        True,
        False,
        True,
        True,
    ]
    ours = tmp_path / "ours"
    assert toolbox_train("experiment=grpo_tiny", *SMALL, "trainer.max_steps=1", f"run_dir={ours}") == 0
    # what TRL does not say: its sampler's log-probs, the mean ratio, the bounded KL
    unsaid = {"ratio", "kl_bounded_fraction"}
    missing = {name for name in all_metrics(ours)[0] if not name.startswith("sampler/")} - set(lines[1])
    assert missing == unsaid
    actions = [json.loads(line) for line in (run_dir / "traces" / "actions.jsonl").read_text().splitlines()]
    assert len(actions) == 3 * 16
    for number, line in enumerate(lines[1:], start=1):  # a row is as long as the longest prompt and completion
        rows = [one for one in actions if one["step"] == number]
        longest = [max(len(one[name]) for one in rows) for name in ("prompt_ids", "token_ids")]
        assert line["forward_tokens"] == 16 * sum(longest)
    assert {one["weights_version"] for one in actions} == {0, 1, 2}
    for one in actions:
        assert one["rewards"]["exact_match"] == float(one["completion"] == one["columns"]["answer"])


def test_prompts_are_those_of_the_toolbox_in_its_order(tmp_path: Path) -> None:
    """Token for token, across the end of an epoch, whatever the chat template and the columns."""
    seen = {}
    for name in ("toolbox", "trl"):
        run_dir = tmp_path / name
        words = ("callbacks.trace_rollouts={every: 1}", "trainer.max_steps=4", f"trainer.name={name}")
        assert toolbox_train("experiment=grpo_tiny", *SMALL, "+" + words[0], *words[1:], f"run_dir={run_dir}") == 0
        lines = (run_dir / "traces" / "actions.jsonl").read_text().splitlines()
        fields = ("step", "prompt_id", "group", "index", "prompt", "prompt_ids", "columns")
        seen[name] = [{field: json.loads(line)[field] for field in fields} for line in lines]
    assert seen["toolbox"] == seen["trl"]


RESUMED = {
    "plain": ("objective.beta=0.1",),
    "passes": ("trainer.ppo_epochs=2", "trainer.schedule=linear"),
    "generations": ("rollout.steps_per_generation=2", "rollout.prompts_per_step=2", "objective=dapo"),
    "reference": ("trainer.reference_every=1", "trainer.reference_mix=0.5", "objective.beta=0.3"),
    "lora": ("model.lora.r=2", "objective.beta=0.3"),
    "entropy": ("objective.entropy_target=2.9", "objective.entropy_coef=0.1"),
    "rloo": ("method=rloo",),
}


@pytest.mark.parametrize("name", always(RESUMED, ("plain", "generations", "reference", "lora")))
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, tmp_path: Path) -> None:
    words = (*VARIED, *ROUGH, *RESUMED[name], "trainer.max_steps=4", "trainer.save_every=2")
    assert toolbox_train(*TRL, *words, f"run_dir={tmp_path / 'whole'}") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    assert toolbox_train(*TRL, *words, f"resume={tmp_path / 'cut'}") == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert differences(state(tmp_path / "cut"), state(tmp_path / "whole")) == []


def test_steps_that_share_a_generation(tmp_path: Path) -> None:
    """Two passes over a generation of two steps: four steps, each of as many groups, saved at its end alone."""
    words = ("rollout.steps_per_generation=2", "trainer.ppo_epochs=2", "objective=dapo", "objective.clip_eps=1e-4")
    words += ("trainer.max_steps=8", "trainer.save_every=3", "trainer.keep_checkpoints=9", "rollout.prompts_per_step=2")
    assert toolbox_train(*TRL, *VARIED, *ROUGH, *words, f"run_dir={tmp_path}") == 0
    lines = all_metrics(tmp_path)
    assert [line["rows_trained"] for line in lines] == [8.0] * 8
    rewards = [line["reward_mean"] for line in lines]
    assert rewards[0:2] == rewards[2:4]
    assert rewards[4:6] == rewards[6:8] != rewards[0:2]
    assert [line["clip_fraction"] > 0 for line in lines] == [False, True, True, True] * 2
    assert checkpoints(tmp_path) == [4, 8]


def test_either_trainer_goes_on_with_the_other_s_run(tmp_path: Path) -> None:
    words = (*VARIED, *ROUGH)
    for first, second in (("trl", "toolbox"), ("toolbox", "trl")):
        run_dir = tmp_path / first
        run = ("experiment=grpo_tiny", *SMALL, *words)
        assert toolbox_train(*run, f"trainer.name={first}", "trainer.max_steps=2", f"run_dir={run_dir}") == 0
        assert toolbox_train(*run, f"trainer.name={second}", "trainer.max_steps=3", f"resume={run_dir}") == 0
        assert [line["step"] for line in all_metrics(run_dir)] == [1, 2, 3]


def failing(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    if trainer_state.step == 3:
        raise LookupError("no third step")
    return varied(completion_ids)


def test_a_failing_reward_stops_the_run_with_its_state_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("reward=custom", f"reward.name={__name__}:failing", *ROUGH, "trainer.max_steps=4")
    assert toolbox_train(*TRL, *words, f"run_dir={tmp_path}") == 1
    assert "reward 'failing' failed on prompt" in capsys.readouterr().err
    assert checkpoints(tmp_path) == [2]


def endless(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [3e38 if ids[0] % 2 else -3e38 for ids in completion_ids]


def test_nothing_that_is_not_finite_reaches_the_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reward=custom", f"reward.name={__name__}:endless", "advantage=dr_grpo", "trainer.max_steps=2")
    assert toolbox_train(*TRL, *words, f"run_dir={tmp_path / 'run'}") == 1
    assert "step 1: the gradient is not finite" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # as after any run that ends before its first step


async def slow(
    completion_ids: list[list[int]], answer: list[str], log_extra: Any, log_metric: Any
) -> list[float | None]:
    await asyncio.sleep(0)
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("longest", max(map(len, completion_ids)))
    return [None if len(ids) == 2 else float(text) for ids, text in zip(completion_ids, answer, strict=True)]


def test_rewards_are_ours_unchanged(tmp_path: Path) -> None:
    """Coroutines, columns, None, what they log, the held-out verifier and a weight that moves."""
    parts = f"[{{name: '{__name__}:slow', weight: {{0: 1.0, 2: 0.5}}}}, {{name: '{__name__}:varied', weight: 2}}]"
    words = ("reward=weighted_sum", f"reward.components={parts}", "+reward.heldout=exact_match", "trainer.max_steps=2")
    assert toolbox_train(*TRL, *words, "rollout.max_new_tokens=5", f"run_dir={tmp_path}") == 0
    first, second = all_metrics(tmp_path)
    assert first["longest"] == 5.0
    assert (first["rewards/slow/weight"], second["rewards/slow/weight"]) == (0.75, 0.5)
    assert first["rewards/slow/not_applicable"] + first["rewards/slow/scored"] == 16
    assert 0 <= first["heldout/score"] <= 1
    scored = first["rewards/slow/scored"] / 16
    total = 0.75 * scored * first["rewards/slow/mean"] + 2 * first["rewards/varied/mean"]
    assert first["reward_mean"] == pytest.approx(total, rel=1e-5)


def test_a_signal_lets_the_step_finish_and_saves_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_toolbox.cli.main", "train", *TRL, f"run_dir={tmp_path}"]
    with subprocess.Popen([*command, "trainer.max_steps=9999"], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 900
            while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").stat().st_size:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(900) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert checkpoints(tmp_path) == [all_metrics(tmp_path)[-1]["step"]]


def test_the_tiny_policy_learns(tmp_path: Path) -> None:
    words = ("experiment=grpo_tiny", "trainer.name=trl", "callbacks=none", "trainer.micro_batch_tokens=4096")
    assert toolbox_train(*words, "trainer.lr=2e-3", "trainer.max_steps=90", f"run_dir={tmp_path}") == 0
    rewards = [line["reward_mean"] for line in all_metrics(tmp_path)]
    assert sum(rewards[:10]) / 10 < 0.05
    assert sum(rewards[-10:]) / 10 > 0.5
