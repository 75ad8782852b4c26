"""The loop: the last room of the flow.

    prompts -> rollouts -> scores -> advantages -> batch -> update -> sync -> callbacks

One step of `train` reads from top to bottom; everything that varies (engine, reward, advantage, objective, callbacks)
is a value in `Run`, chosen once in `config/build.py`. No algorithm's name stands here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from grpo_toolbox.callbacks import Due
from grpo_toolbox.checkpoint import copy_parameters, restore_rng, save_checkpoint
from grpo_toolbox.clock import Clock
from grpo_toolbox.errors import ConfigError, suggest
from grpo_toolbox.evaluation import measure, sample
from grpo_toolbox.experience import batch_of, from_state, to_state
from grpo_toolbox.interrupts import GracefulStop, Interrupted
from grpo_toolbox.metrics import step_metrics
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.types import Step
from grpo_toolbox.update import update


def train(run: Run) -> dict[str, float]:
    """Train until `max_steps`, a stop signal, or an error; the last finished step is saved in every case."""
    return conduct(run, partial(_steps, run))


def _steps(run: Run, stop: GracefulStop) -> None:
    for number in range(run.finished + 1, run.info.max_steps + 1):
        begin(run, number)
        clock = Clock()
        learnt = run.source.next(run, number, clock)  # prompts -> rollouts -> scores -> advantages
        batch = batch_of(run, learnt)
        with stop.protect():
            with clock("update"):
                updated = update(run, batch, number, learnt.rollouts)
            refresh_reference(run, number)
            run.source.sync(run, number, clock)
            seen = step_metrics(learnt.rollouts, learnt.scores) | dict(learnt.metrics) | run.probed()
            metrics = seen | updated | clock.metrics(learnt.rollouts)
            metrics |= run.observe(metrics, completions=len(batch))
            finish(run, Step(number, metrics, learnt.rollouts, learnt.scores, learnt.advantages))
        if run.watch:
            run.watch.settle()
        evaluated = evaluate_when_due(run, number)
        with stop.protect():
            report(run, evaluated)
            save_when_due(run, number)
        if run.due.stop:
            break


def conduct(run: Run, steps: Callable[[GracefulStop], None]) -> dict[str, float]:
    """Take a run's `steps` between its beginning and its end: callbacks, evaluation, stop signals, the last checkpoint.

    Each step says `begin`, `finish`, `report` and `save_when_due`, and is the last where `run.due.stop` says so; an
    `Interrupted` ends them. Returns the run's summary.
    """
    started = time.perf_counter()
    for callback in run.callbacks:
        callback.on_start(run.info)
    with GracefulStop() as stop, _settled():
        try:
            _before_training(run)
            steps(stop)
        except Interrupted:
            pass  # summed up below
        finally:
            with stop.shield():
                report(run, {})
                _save(run)
                summary = {"steps": float(run.finished), "seconds": time.perf_counter() - started}
                summary["interrupted"] = float(stop.received or 0)
                if run.best:
                    summary["best_step"] = float(run.best[1])
                for callback in run.callbacks:
                    callback.on_end(summary)
                run.source.close(run)
    return summary


@contextmanager
def _settled() -> Iterator[None]:
    """Spare the garbage collector what was built before the block, which lives as long: half a million objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def refresh_reference(run: Run, number: int) -> None:
    """Take the policy over into the reference after step `number` where `reference_every` says so."""
    if run.reference is not None and run.reference_every and number % run.reference_every == 0:
        run.reference.refresh(run.policy, run.reference_mix)
        if run.reference_resets_optimizer:
            run.optimizer.state.clear()


def _before_training(run: Run) -> None:
    """Evaluate the untrained policy, or make up for an evaluation that a stop cut short."""
    due = bool(run.evaluation.every and (run.owed or (run.evaluation.at_start and run.finished == 0)))
    run.source.start(run)
    run.snapshot = _snapshot(run, run.finished)
    if due:
        evaluated = _evaluate(run, run.finished)
        run.unreported = Step(run.finished, run.owed)
        report(run, evaluated)
        run.saved = None  # what the checkpoint has still owes the evaluation
    run.source.release()


def begin(run: Run, number: int) -> None:
    """Tell the callbacks that a step begins."""
    for callback in run.callbacks:
        callback.on_begin(number)


def finish(run: Run, step: Step) -> None:
    """The step is whole: parameters, optimizer and snapshot belong to it from here on. Callbacks say what is due."""
    every = run.evaluation.every
    evaluate = every > 0 and (step.number % every == 0 or step.number == run.info.max_steps)
    snapshot, owed = _snapshot(run, step.number), dict(step.metrics) if evaluate else {}
    # One statement without a call, which no second Ctrl-C can cut in two.
    run.finished, run.unreported, run.snapshot, run.owed, run.moving = step.number, step, snapshot, owed, False
    run.due = Due(evaluate=evaluate, save=run.save_every > 0 and step.number % run.save_every == 0)
    for callback in run.callbacks:
        callback.on_update(step, run.due)
    run.due.evaluate = run.due.evaluate and bool(run.eval_prompts)
    run.owed = dict(step.metrics) if run.due.evaluate else {}


def _snapshot(run: Run, number: int) -> dict[str, Any]:
    return {
        "step": number,
        **run.source.state_dict(run),
        "pending": to_state(run.pending),
        "empty_steps": run.empty_steps,
    }


def report(run: Run, evaluated: Mapping[str, float]) -> None:
    """Show the finished step to the callbacks, once; a step whose evaluation was cut short is shown without it."""
    step, run.unreported = run.unreported, None
    if step is None:
        return
    if evaluated:
        run.owed = {}
        run.snapshot = _snapshot(run, run.finished)  # rewards that failed in the evaluation count
    for callback in run.callbacks:
        callback.on_step(replace(step, metrics={**step.metrics, **evaluated}))


def _evaluate(run: Run, number: int) -> dict[str, float]:
    metrics = measure(run, run.source.evaluate(run, partial(sample, run, run.eval_prompts)))
    name = run.evaluation.best_metric
    value = metrics.get(name)
    if value is None and name != "eval/reward" and run.best is None:  # no reward may apply to any prompt
        raise ConfigError(
            f"trainer.best_metric={name} is not measured: an evaluation says {', '.join(sorted(metrics))}."
            f"{suggest(name, metrics)}"
        )
    if number and value is not None and (run.best is None or run.evaluation.better(value, run.best[0])):
        run.best = (value, number)
    return metrics


def evaluate_when_due(run: Run, number: int) -> dict[str, float]:
    """Evaluate the policy after step `number` where the settings or a callback say so; nothing otherwise."""
    evaluated = _evaluate(run, number) if run.due.evaluate else {}
    run.source.release()
    return evaluated


def save_when_due(run: Run, number: int) -> None:
    """Write a checkpoint of step `number` where the settings or a callback say so, or where it is the best so far."""
    is_best = run.best is not None and run.best[1] == number
    if run.due.save or (run.save_every and is_best):
        _save(run)


def _save(run: Run) -> None:
    """Write a checkpoint of the last finished step, unless it is there already or the parameters have moved on."""
    if run.moving or run.saved == run.finished or not run.finished:
        return
    state = {
        **run.snapshot,
        "parameters": _trained(run),
        "optimizer": run.optimizer.state_dict(),
        "best": run.best,
        "owed": run.owed,
        "controls": {name: control.state_dict() for name, control in run.controls().items()},
        "reference": run.reference.state_dict() if run.reference else None,
        "critic": run.critic.state_dict() if run.critic else None,
    }
    best_step = run.best[1] if run.best else None
    root = run.info.run_dir / "checkpoints"
    keep = run.keep_checkpoints
    folder = save_checkpoint(root, run.finished, state=state, export=run.export, keep=keep, best_step=best_step)
    run.saved = run.finished
    for callback in run.callbacks:
        callback.on_save(run.finished, folder)


def _trained(run: Run) -> dict[str, nn.Parameter]:
    """Return by name what the optimizer moves; `requires_grad` is off for an instant while an adapter is disabled."""
    moved = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    return {name: value for name, value in run.policy.named_parameters() if id(value) in moved}


def restore(run: Run, state: Mapping[str, Any], *, load_optimizer: bool = True) -> None:
    """Put a checkpoint's state into a freshly built run; the next step continues as if it had never stopped.

    Without `load_optimizer` its moments start from zero.
    """
    copy_parameters(_trained(run), state["parameters"], "model", "model.* settings")
    if load_optimizer:
        run.optimizer.load_state_dict(state["optimizer"])
    run.data.load_state_dict(state["data"])
    restore_rng(state["rng"])
    for name, control in run.controls().items():
        if name in state["controls"]:  # one that is switched on with the resume starts from its settings
            control.load_state_dict(state["controls"][name])
    if run.reference and state["reference"] is not None:
        copy_parameters(run.reference.own_weights(), state["reference"], "reference", "model.* settings")
    if run.critic and state.get("critic"):  # one that is switched on with the resume starts untrained
        run.critic.load_state_dict(state["critic"], load_optimizer=load_optimizer)
    if "reward" in state:  # not in checkpoints of old
        run.load_reward_state(state["reward"])
    run.pending, run.empty_steps = from_state(state["pending"], Experience), state["empty_steps"]
    if state.get("ahead"):
        run.source.load_state_dict(state["ahead"])
    run.best = tuple(state["best"]) if state["best"] else None
    run.owed = dict(state["owed"])
    run.finished = run.saved = int(state["step"])
