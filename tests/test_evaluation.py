"""Evaluations: the loss is the one that training would begin with, nothing that training goes on with is touched."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import plugs
from grpo_toolbox.checkpoint import capture_rng
from grpo_toolbox.evaluation import evaluate, sample
from grpo_toolbox.experience import batch_of, estimated
from grpo_toolbox.run import Run
from grpo_toolbox.update import update
from toolbox_runs import SMALL, built_run, checkpoints, differences, metrics, state, toolbox_train

BASE = (
    *(*SMALL, "data.path=builtin:additions?max_sum=3", "data.eval_size=4", "reward=custom"),
    *("trainer.schedule=constant", "trainer.lr=0.01"),
)
DIGITS = (*BASE, "reward.name=plugs:digits")
AS_TRAINED = ("trainer.eval_temperature=null", "trainer.eval_loss=true", "trainer.eval_completions=3")


@pytest.fixture(autouse=True)
def _counting_from_nothing() -> None:
    plugs.start_counting()


@pytest.mark.parametrize("more", [(), ("model.lora.r=2", "model.lora.dropout=0.3", "objective.beta=0.1")])
def test_training_goes_on_as_if_there_had_been_none(more: tuple[str, ...], tmp_path: Path) -> None:
    """The reward draws random numbers, an adapter's dropout does, and every step is evaluated, loss included."""
    given = (*BASE, "reward.name=plugs:noisy", "trainer.max_steps=3", *AS_TRAINED, *more)
    for every in (0, 1):
        assert toolbox_train(*given, f"trainer.eval_every={every}", f"run_dir={tmp_path / str(every)}") == 0
    plain, evaluated = metrics(tmp_path / "0"), metrics(tmp_path / "1")
    assert all(math.isfinite(line["eval/loss"]) for line in evaluated)
    assert plain == [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in evaluated[1:]]
    assert differences(state(tmp_path / "0")["parameters"], state(tmp_path / "1")["parameters"]) == []


def kept(run: Run) -> dict[str, Any]:
    """All that training goes on with."""
    return {
        "parameters": {name: value.detach().clone() for name, value in run.policy.named_parameters()},
        "gradients": [value.grad for value in run.policy.parameters()],
        "learning": [value.requires_grad for value in run.policy.parameters()],
        "mode": [module.training for module in run.policy.modules()],
        "optimizer": copy.deepcopy(run.optimizer.state_dict()),
        "rng": capture_rng(),
        "data": run.data.state_dict(),
        "reward": copy.deepcopy(run.reward_state()),
        "controls": {name: control.state_dict() for name, control in run.controls().items()},
    }


ADAPTIVE = ("objective.kl_target=0.1", "objective.entropy_target=0.2", "objective.beta=0.1")


def test_nothing_moves(tmp_path: Path) -> None:
    run = built_run(*BASE, "reward.name=plugs:noisy", *AS_TRAINED, *ADAPTIVE, f"run_dir={tmp_path / 'run'}")
    run.policy.train()
    before = kept(run)
    evaluate(run, run.eval_prompts)
    assert differences(before, kept(run)) == []


METHODS: Mapping[str, tuple[str, ...]] = {
    "method=dapo": (),
    "method=dr_grpo": (),
    "method=rloo": ("objective.beta=0.05",),
    "method=gspo": (),
    "objective=grpo": ("objective.beta=0.1", "objective.entropy_coef=0.05", "objective.top_entropy_quantile=0.5"),
    "advantage=gae": ("objective.beta=0.1", "objective.kl_in=reward", "objective.kl=k1"),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_is_that_of_a_step_on_the_same_completions(method: str, tmp_path: Path) -> None:
    """No row is left out of the step, so that its means are over all tokens, too."""
    drawn = ("trainer.eval_temperature=null", "trainer.eval_loss=true", "trainer.eval_completions=4")
    given = (*DIGITS, method, *METHODS[method], *drawn, "trainer.skip_zero_advantage=false", "rollout.temperature=0.9")
    run = built_run(
        *given, "rollout.dynamic_sampling=false", "rollout.steps_per_generation=1", f"run_dir={tmp_path / 'run'}"
    )
    with torch.no_grad():  # the reference is left where it is
        for parameter in run.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found = evaluate(run, run.eval_prompts)
    learnt = estimated(run, sample(run, run.eval_prompts))
    step = update(run, batch_of(run, learnt), 1, learnt.rollouts) | dict(learnt.metrics)
    shared = {name for name in step if f"eval/{name}" in found}
    assert {"loss", "entropy", "clip_fraction", "ratio", "sampler/kl"} <= shared
    assert ("kl" in shared) == (run.reference is not None)
    assert {name: found[f"eval/{name}"] for name in shared} == pytest.approx({name: step[name] for name in shared})


def test_one_completion_without_others_has_no_advantage(tmp_path: Path) -> None:
    """What is left of the loss is the KL: 0.1 times its mean over tokens; without one it is 0."""
    one = ("trainer.eval_temperature=null", "trainer.eval_loss=true", "objective.loss_agg=token_mean")
    for beta in (0.0, 0.1):
        run = built_run(*DIGITS, *one, f"objective.beta={beta}", f"run_dir={tmp_path / str(beta)}")
        with torch.no_grad():
            for parameter in run.policy.parameters():
                parameter.mul_(1.1)
        found = evaluate(run, run.eval_prompts)
        assert found["eval/loss"] == pytest.approx(beta * found.get("eval/kl", 0.0), rel=1e-5)
        assert (found["eval/loss"] > 0) == (beta > 0)


def test_the_best_may_be_the_lowest_of_any_metric(tmp_path: Path) -> None:
    given = (*DIGITS, *AS_TRAINED, "trainer.max_steps=4", "trainer.eval_every=1", "trainer.save_every=1")
    chosen = ("trainer.best_metric=eval/entropy", "trainer.best_is=lowest", "trainer.keep_checkpoints=1")
    assert toolbox_train(*given, *chosen, "trainer.eval_at_start=false", f"run_dir={tmp_path / 'run'}") == 0
    seen = {line["step"]: line["eval/entropy"] for line in metrics(tmp_path / "run")}
    assert list(seen) == [1, 2, 3, 4]  # none before the first step
    best = min(seen, key=seen.__getitem__)
    assert state(tmp_path / "run")["best"] == (seen[best], best)
    assert checkpoints(tmp_path / "run") == sorted({best, 4})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trainer.eval_loss=true",), "trainer.eval_temperature=0.0: set it to null"),
        (("trainer.eval_completions=0",), "trainer.eval_completions=0 must be at least 1"),
        (("trainer.best_is=most",), "trainer.best_is='most' is not an option: highest, lowest"),
        (("trainer.best_metric=eval/entropi",), "trainer.best_metric=eval/entropi is not measured: an evaluation says"),
        (("trainer.eval_loss=true", "trainer.eval_temperature=null", "trainer.name=trl"), "cannot run on TRL"),
    ],
)
def test_what_cannot_be_had_is_said(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*DIGITS, "trainer.max_steps=1", "trainer.eval_every=1", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*given, *words) == 1
    assert said in capsys.readouterr().err
