"""The loop and the update on real runs of the tiny policy (cases i06, i08; hand numbers are derived where they stand).

Two ways to take the same step differ by rounding, and Adam's g / √g² makes steps of ±lr out of rounding around zero:
where parameters are compared up to rounding, adam_eps is far above it.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plugs
from grpo_toolbox.batch import Batch, collate, micro_batches
from grpo_toolbox.callbacks import Callback, Due
from grpo_toolbox.evaluation import evaluate
from grpo_toolbox.rewards import TrainerState, score_rollouts
from grpo_toolbox.rollout import rollout
from grpo_toolbox.trainer import Run, train, update
from grpo_toolbox.types import RunInfo, Step
from toolbox_runs import SMALL, all_metrics, built_run, checkpoints, differences, metrics, state, steps, toolbox_train

DIGITS = (
    *(*SMALL, "reward=custom", "reward.name=plugs:digits"),
    *("trainer.schedule=constant", "trainer.lr=0.01", "trainer.max_grad_norm=1"),
)
SMOOTH = (*DIGITS, "trainer.adam_eps=0.01")


@pytest.fixture(autouse=True)
def _counting_from_nothing() -> None:
    plugs.start_counting()


def parameters(run: Run) -> Tensor:
    return torch.cat([value.detach().flatten() for value in run.policy.parameters()])


def first_batch(run: Run) -> Batch:
    """The batch of step 1 as the loop makes it."""
    rollouts = rollout(run.engine, run.data.next(), run.group_size, run.sampling)
    scores = score_rollouts(run.reward, rollouts, run.group_size, TrainerState(1, 10))
    return collate(rollouts, run.advantage(scores.total))


class Listener(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.steps: list[Step] = []
        self.summary: Mapping[str, float] = {}

    def on_start(self, run: RunInfo) -> None:
        self.told.append(f"start {run.first_step}/{run.max_steps}")

    def on_step(self, step: Step) -> None:
        self.told.append(f"step {step.number}")
        self.steps.append(step)

    def on_end(self, summary: Mapping[str, float]) -> None:
        self.told.append("end")
        self.summary = summary


def trained(run_dir: Path, *overrides: str) -> tuple[Run, list[Mapping[str, float]]]:
    """The run after its last step, and the metrics of its steps."""
    run, listener = built_run(f"run_dir={run_dir}", *overrides), Listener()
    run.callbacks = [listener]
    train(run)
    return run, [step.metrics for step in listener.steps]


# ---- what a step does


def test_a_batch_without_spread_steps_like_the_forwarded_one(tmp_path: Path) -> None:
    """Its gradient is 0, but momentum and weight decay go on: skipping the rows must not skip the optimizer."""
    given = (*SMOOTH, "objective=ppo_clip", "trainer.weight_decay=0.1", "reward.name=plugs:spread_but_in_step_2")
    one, _ = trained(tmp_path / "one", *given, "trainer.max_steps=1")
    two, _ = trained(tmp_path / "two", *given, "trainer.max_steps=2")
    skipped, lines = trained(tmp_path / "skipped", *given, "trainer.max_steps=3")
    all_rows = (*given, "trainer.skip_zero_advantage=false")
    forwarded, others = trained(tmp_path / "forwarded", *all_rows, "trainer.max_steps=3")
    assert (lines[1]["rows_trained"], others[1]["rows_trained"]) == (0, 16)
    assert [line["grad_norm"] for line in (lines[1], others[1])] == [0, 0]
    assert (parameters(two) - parameters(one)).abs().max() > 1e-3
    assert (parameters(skipped) - parameters(forwarded)).abs().max() < 1e-6


def recording(run: Run) -> list[tuple[Tensor, Tensor]]:
    """Every (logps, old_logps) that the run's surrogate is called with from here on."""
    calls: list[tuple[Tensor, Tensor]] = []
    surrogate = run.objective.surrogate

    def record(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((logps.detach().clone(), old_logps.clone()))
        return surrogate(logps, old_logps, advantages)

    run.objective = replace(run.objective, surrogate=record)
    return calls


def counting(model: nn.Module) -> list[int]:
    """A list that grows by one with every forward pass of the model's decoder."""
    passes: list[int] = []
    decoder: Any = model
    decoder.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    return passes


def test_the_second_epoch_compares_with_the_first_and_nothing_is_forwarded_twice(tmp_path: Path) -> None:
    """Old log-probs are those of the first epoch's own forward pass; the reference runs once for both epochs."""
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "trainer.ppo_epochs=2", "trainer.micro_batch_tokens=40")
    batch = first_batch(run)
    parts = len(micro_batches(batch, range(len(batch)), 40))
    assert run.reference is not None
    with run.reference.model() as reference:
        policy_passes, reference_passes = counting(run.policy), counting(reference)
    calls = recording(run)
    updated = update(run, batch, 1)
    assert parts >= 2
    assert (len(policy_passes), len(reference_passes), len(calls)) == (2 * parts, parts, 2 * parts)
    for (logps, old), (later, old_later) in zip(calls[:parts], calls[parts:], strict=True):
        assert torch.equal(logps, old)
        assert torch.equal(logps, old_later)
        assert (later - old_later).abs().max() > 1e-3
    assert updated["ratio"] != 1


def test_on_policy_there_is_one_forward_pass_per_micro_batch(tmp_path: Path) -> None:
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "objective=ppo_clip", "trainer.skip_zero_advantage=false")
    run.settings = replace(run.settings, micro_batch_tokens=40)
    batch = first_batch(run)
    passes, calls = counting(run.policy), recording(run)
    updated = update(run, batch, 1)
    assert run.reference is None
    assert len(passes) == len(calls) == len(micro_batches(batch, range(len(batch)), 40))
    assert (updated["ratio"], updated["clip_fraction"]) == (1, 0)


def test_parameters_do_not_depend_on_the_token_budget(tmp_path: Path) -> None:
    given = (*SMOOTH, "trainer.max_steps=2", "trainer.ppo_epochs=2")
    small, small_lines = trained(tmp_path / "small", *given, "trainer.micro_batch_tokens=64")
    large, large_lines = trained(tmp_path / "large", *given, "trainer.micro_batch_tokens=1000000")
    assert (parameters(small) - parameters(large)).abs().max() < 1e-6
    assert (parameters(small) - parameters(built_run(f"run_dir={tmp_path}", *given))).abs().max() > 1e-3
    for name in ("loss", "kl", "entropy", "grad_norm", "clip_fraction", "ratio"):
        assert small_lines[1][name] == pytest.approx(large_lines[1][name], abs=1e-5)


def gradient(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([value.grad.flatten() for group in optimizer.param_groups for value in group["params"]])


def test_the_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    """‖g‖ is logged, and what the optimizer sees is g · 0.01 / ‖g‖ where ‖g‖ is above max_grad_norm=0.01."""
    seen, norms = [], []
    for number, limit in enumerate(("inf", "0.01")):
        run = built_run(f"run_dir={tmp_path / str(number)}", *DIGITS, f"trainer.max_grad_norm={limit}")
        run.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(gradient(optimizer)))
        norms.append(update(run, first_batch(run), 1)["grad_norm"])
    free, clipped = seen
    assert norms == [pytest.approx(float(free.norm()), rel=1e-5)] * 2
    assert norms[0] > 0.02
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)
    assert torch.allclose(clipped, free * 0.01 / norms[0], rtol=1e-3, atol=1e-9)


def test_the_learning_rate_of_each_step(tmp_path: Path) -> None:
    """Warm-up 1/3, 2/3, then linear over the other 4 of 6 steps: 1, 3/4, 1/2, 1/4 of the peak; the optimizer has it."""
    used: list[float] = []
    given = (*DIGITS, "trainer.max_steps=6", "trainer.warmup_steps=2", "trainer.schedule=linear")
    run, listener = built_run(f"run_dir={tmp_path / 'run'}", *given), Listener()
    run.callbacks = [listener]
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    train(run)
    assert used == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.0075, 0.005, 0.0025])
    assert [step.metrics["lr"] for step in listener.steps] == used


def test_the_engine_reports_the_log_probs_that_are_trained_on(tmp_path: Path) -> None:
    """At a temperature other than 1, step after step: a stale or untempered log-prob would differ by tenths."""
    _, lines = trained(tmp_path / "run", *DIGITS, "trainer.max_steps=4", "rollout.temperature=0.7")
    assert all(0 <= line["sampler/logp_gap_mean"] <= line["sampler/logp_gap_max"] < 1e-4 for line in lines)


@pytest.mark.parametrize(("lora", "bound"), [(2, 0.0), (0, 1e-6)])
def test_the_kl_starts_at_zero(lora: int, bound: float, tmp_path: Path) -> None:
    """A fresh adapter adds exactly nothing; a frozen copy is the same model. From step 2 on they are apart."""
    _, lines = trained(tmp_path / "run", *DIGITS, "trainer.max_steps=2", f"model.lora.r={lora}")
    assert 0 <= lines[0]["kl"] <= bound
    assert lines[1]["kl"] > 1e-4


def test_only_the_adapter_is_trained(tmp_path: Path) -> None:
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "trainer.max_steps=2", "model.lora.r=2")
    before = {name: value.detach().clone() for name, value in run.policy.named_parameters()}
    train(run)
    moved = {name for name, value in run.policy.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_bfloat16_in_the_forward_pass_trains_float32_weights(tmp_path: Path) -> None:
    """It rounds to 3 digits: the entropy is that of float32 up to them, and not the same number."""
    _, exact = trained(tmp_path / "exact", *DIGITS, "trainer.max_steps=1")
    run, lines = trained(tmp_path / "run", *DIGITS, "trainer.max_steps=2", "trainer.precision=bfloat16")
    assert {value.dtype for value in run.policy.parameters()} == {torch.float32}
    assert lines[0]["entropy"] == pytest.approx(exact[0]["entropy"], rel=1e-2)
    assert lines[0]["entropy"] != exact[0]["entropy"]
    assert lines[0]["sampler/logp_gap_max"] < 0.1


# ---- evaluation, metrics, callbacks


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    given = (*DIGITS, "trainer.max_steps=3", "data.eval_size=2")
    for every in (0, 1):
        assert toolbox_train(*given, f"trainer.eval_every={every}", f"run_dir={tmp_path / str(every)}") == 0
    plain, evaluated = metrics(tmp_path / "0"), metrics(tmp_path / "1")
    assert evaluated[0].keys() >= {"step", "eval/reward", "eval/pass@1"}
    assert plain == [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in evaluated[1:]]
    assert differences(state(tmp_path / "0")["parameters"], state(tmp_path / "1")["parameters"]) == []


def test_evaluations_come_before_the_first_every_nth_and_after_the_last_step(tmp_path: Path) -> None:
    given = (*DIGITS, "trainer.max_steps=5", "data.eval_size=2", "trainer.eval_every=2")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "eval/reward" in line] == [0, 2, 4, 5]


def test_prompts_without_a_reward_are_left_out_of_the_evaluation(tmp_path: Path) -> None:
    """0+0= has the answer 0 (solved), 0+1= and 1+0= have 1 (not), the other three 2 (not applicable): 1 of 3."""
    run = built_run(f"run_dir={tmp_path / 'run'}", *SMALL, "reward=custom", "reward.name=plugs:only_some")
    prompts = list({prompt.id: prompt for _ in range(3) for prompt in run.data.next()}.values())
    assert sorted(prompt.columns["answer"] for prompt in prompts) == list("011222")
    found = evaluate(run, prompts)
    assert found["eval/reward"] == found["eval/pass@1"] == pytest.approx(1 / 3)
    without = [prompt for prompt in prompts if prompt.columns["answer"] == "2"]
    found = evaluate(run, without)
    means = ("eval/reward", "eval/reward_std", "eval/pass@1", "eval/rewards/only_some/mean")
    assert not found.keys() & {*means}
    assert found["eval/rewards/only_some/not_applicable"] == 3  # a count, as in training
    assert found.keys() >= {"eval/completion_tokens", "eval/clipped_ratio", "time/eval"}


PROMISED = """
    step reward_mean reward_std rewards/exact_match/mean kl entropy clip_fraction completion_tokens
    completions/clipped_ratio frac_reward_zero_std grad_norm lr pass_rate invalid_format_rate duplicate_rate
    group_reward_std tokens_per_s time/rollout time/reward time/update eval/reward eval/pass@1
"""


def test_every_promised_metric_is_in_the_file(tmp_path: Path) -> None:
    given = ("trainer.max_steps=1", "data.eval_size=2", "trainer.eval_every=1")
    assert toolbox_train("experiment=grpo_tiny", *SMALL, *given, f"run_dir={tmp_path / 'run'}") == 0
    before, first = all_metrics(tmp_path / "run")
    assert before.keys() >= {"step", "eval/reward", "eval/pass@1"}
    assert first.keys() >= set(PROMISED.split())
    assert all(isinstance(value, (int, float)) for value in first.values())
    assert first["entropy"] == pytest.approx(math.log(21), rel=0.05)
    assert first["time/rollout"] + first["time/reward"] + first["time/update"] <= first["time/step"]


def test_callbacks_hear_every_step_once_and_in_order(tmp_path: Path) -> None:
    given = (*DIGITS, "trainer.max_steps=3", "data.eval_size=2", "trainer.eval_every=3", "trainer.save_every=2")
    run, listener = built_run(f"run_dir={tmp_path / 'run'}", *given), Listener()
    run.callbacks = [listener]
    summary = train(run)
    assert listener.told == ["start 1/3", "step 0", "step 1", "step 2", "step 3", "end"]
    assert listener.summary == summary
    assert (summary["steps"], summary["interrupted"]) == (3, 0)
    assert summary["seconds"] > 0
    before, *rest = listener.steps
    assert (before.rollouts, before.scores) == ((), None)
    for step in rest:
        assert step.scores is not None
        assert step.advantages is not None
        assert (len(step.rollouts), step.scores.total.shape, step.advantages.shape) == (16, (4, 4), (4, 4))
        assert {one.weights_version for one in step.rollouts} == {step.number - 1}
    assert rest[0].rollouts[0].ids != rest[1].rollouts[0].ids


# ---- what is saved


def test_the_best_checkpoint_outlives_the_last_ones(tmp_path: Path) -> None:
    """keep=1, the best after step 2 and the last after step 3: both are kept (i06.2)."""
    given = (*DIGITS, "reward.name=plugs:best_second", "data.eval_size=2", "trainer.eval_every=1")
    given = (*given, "trainer.keep_checkpoints=1", "trainer.max_steps=3")
    for save_every in (1, 3):  # the best is saved also where no save is due
        plugs.start_counting()
        run_dir = tmp_path / str(save_every)
        assert toolbox_train(*given, f"trainer.save_every={save_every}", f"run_dir={run_dir}") == 0
        assert [line["eval/reward"] for line in metrics(run_dir)] == pytest.approx([0.1, 0.5, 1.0, 0.2])
        assert checkpoints(run_dir) == [2, 3]
        assert state(run_dir)["best"] == (1.0, 2)


def test_checkpoints_every_nth_and_the_last_step(tmp_path: Path) -> None:
    given = (*DIGITS, "trainer.max_steps=5", "trainer.save_every=2", "trainer.keep_checkpoints=9")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    assert checkpoints(tmp_path / "run") == [2, 4, 5]


def test_a_step_with_a_loss_that_is_not_finite_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One call of the surrogate before the run, one a step: call 6 is step 5's (i08.3)."""
    run_dir = tmp_path / "run"
    broken = ("objective.name=plugs:nan_in_call", "+objective.call=6")
    assert toolbox_train(*DIGITS, *broken, "trainer.max_steps=8", f"run_dir={run_dir}") == 1
    said = capsys.readouterr().err
    assert said.startswith("toolbox train: step 5: the loss is not finite, so the optimizer was not called; ")
    assert "the parameters are still those of step 4" in said
    assert (steps(run_dir), checkpoints(run_dir)) == ([1, 2, 3, 4], [4])
    assert toolbox_train(*DIGITS, "trainer.max_steps=4", f"run_dir={tmp_path / 'whole'}") == 0
    assert differences(state(run_dir), state(tmp_path / "whole")) == []


def test_a_step_that_breaks_in_its_second_epoch_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first epoch has moved the parameters: they are no step's, so the newest checkpoint stays that of step 3.

    One call of the surrogate before the run, two a step: call 11 is the second of step 5.
    """
    run_dir = tmp_path / "run"
    broken = ("objective.name=plugs:nan_in_call", "+objective.call=11", "trainer.ppo_epochs=2", "trainer.save_every=3")
    assert toolbox_train(*DIGITS, *broken, "trainer.max_steps=8", f"run_dir={run_dir}") == 1
    said = capsys.readouterr().err
    assert "step 5: the loss is not finite" in said
    assert "so the newest checkpoint, that of step 3, is the one to go back to" in said
    assert (steps(run_dir), checkpoints(run_dir)) == ([1, 2, 3, 4], [3])
    given = (*DIGITS, "trainer.ppo_epochs=2", "trainer.max_steps=3")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'whole'}") == 0
    assert differences(state(run_dir), state(tmp_path / "whole")) == []


@pytest.mark.parametrize(
    ("call", "left"), [(2, "no parameter has moved yet"), (3, "and there is no checkpoint to go back to")]
)
def test_a_first_step_that_breaks_says_that_there_is_nothing_to_go_back_to(
    call: int, left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Call 2 of the surrogate is the first epoch of step 1, in which nothing has moved; call 3 its second."""
    broken = ("objective.name=plugs:nan_in_call", f"+objective.call={call}", "trainer.ppo_epochs=2")
    assert toolbox_train(*DIGITS, *broken, "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}") == 1
    said = capsys.readouterr().err
    assert left in said
    assert "newest" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_gradient_that_is_not_finite_does_not_reach_the_parameters(tmp_path: Path) -> None:
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "objective.name=plugs:endless_slope", "objective.beta=0")
    before, batch = parameters(run), first_batch(run)
    with pytest.raises(Exception, match=r"^step 7: the gradient is not finite, so the optimizer was not called"):
        update(run, batch, 7)
    assert torch.equal(parameters(run), before)
    assert not run.optimizer.state


def test_a_reward_that_fails_leaves_the_steps_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 2 is saved; with the reward mended the run goes on as if it had never failed."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert toolbox_train(*DIGITS, "reward.name=plugs:failing_at_3", "trainer.max_steps=4", f"run_dir={run_dir}") == 1
    assert "reward 'failing_at_3' failed on prompt" in capsys.readouterr().err
    assert (steps(run_dir), checkpoints(run_dir)) == ([1, 2], [2])
    assert toolbox_train(f"resume={run_dir}", "reward.name=plugs:digits") == 0
    assert toolbox_train(*DIGITS, "trainer.max_steps=4", f"run_dir={whole}") == 0
    renamed = [
        {name.replace("failing_at_3", "digits"): value for name, value in line.items()} for line in metrics(run_dir)
    ]
    assert renamed == metrics(whole)
    assert differences(state(run_dir), state(whole)) == []


def sending(*signals: signal.Signals) -> Callable[..., None]:
    """A function that sends this process signals, whatever it is called with."""

    def send(*_: object) -> None:
        for one in signals:
            os.kill(os.getpid(), one)

    return send


def test_a_signal_during_the_last_save_does_not_cut_it_off(tmp_path: Path) -> None:
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "trainer.max_steps=2")
    export, stop = run.export, sending(signal.SIGTERM)

    def stopped_export(folder: Path) -> None:
        stop()
        export(folder)

    run.export = stopped_export
    assert train(run)["interrupted"] == signal.SIGTERM
    assert checkpoints(tmp_path / "run") == [2]
    assert steps(tmp_path / "run") == [1, 2]


def test_a_second_ctrl_c_while_the_parameters_move_saves_nothing(tmp_path: Path) -> None:
    """The first one lets the step finish, the second one does not: what is in memory then is no step's."""
    run = built_run(f"run_dir={tmp_path / 'run'}", *DIGITS, "trainer.max_steps=2")
    run.optimizer.register_step_post_hook(sending(signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert steps(tmp_path / "run") == []


class Director(Callback):
    """Says what happens after which step, and writes down what did."""

    def __init__(self, **wishes: dict[int, bool]) -> None:
        self.wishes = wishes
        self.seen: list[Any] = []

    def on_begin(self, number: int) -> None:
        self.seen.append(("begin", number))

    def on_update(self, step: Step, due: Due) -> None:
        for name, by_step in self.wishes.items():
            setattr(due, name, by_step.get(step.number, getattr(due, name)))
        self.seen.append(("update", step.number))

    def on_step(self, step: Step) -> None:
        self.seen.append(("evaluated" if "eval/reward" in step.metrics else "step", step.number))

    def on_save(self, number: int, folder: Path) -> None:
        self.seen.append(("save", int(folder.name.removeprefix("step-"))))


def test_a_callback_may_evaluate_save_and_stop(tmp_path: Path) -> None:
    run = built_run(*SMALL, "trainer.max_steps=9", "data.eval_size=2", f"run_dir={tmp_path / 'run'}")
    director = Director(evaluate={2: True}, save={1: True}, stop={3: True})
    run.callbacks = [*run.callbacks, director]
    assert train(run)["steps"] == 3
    first, second, third = [[(what, step) for what in ("begin", "update")] for step in (1, 2, 3)]
    expected = [*first, ("step", 1), ("save", 1), *second, ("evaluated", 2), *third, ("step", 3), ("save", 3)]
    assert director.seen == expected


def test_a_callback_may_leave_out_what_the_settings_have(tmp_path: Path) -> None:
    every = ("trainer.max_steps=2", "data.eval_size=2", "trainer.eval_every=1", "trainer.save_every=1")
    run = built_run(*SMALL, *every, f"run_dir={tmp_path / 'run'}")
    director = Director(evaluate={1: False}, save={1: False})
    run.callbacks = [*run.callbacks, director]
    train(run)
    assert ("step", 1) in director.seen
    assert ("save", 1) not in director.seen
    assert director.seen[-2:] == [("evaluated", 2), ("save", 2)]
