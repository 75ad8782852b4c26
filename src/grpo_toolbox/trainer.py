"""The loop, and the update: the last room of the flow.

    prompts -> rollouts -> scores -> advantages -> batch -> update -> sync -> callbacks

One step of `train` reads from top to bottom; everything that varies (engine, reward, advantage, objective, callbacks)
is a value in `Run`, chosen once in `config/build.py`. No algorithm's name stands here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, collate, denominators, micro_batches, rows_with_gradient
from grpo_toolbox.callbacks import Callback
from grpo_toolbox.checkpoint import capture_rng, restore_rng, save_checkpoint
from grpo_toolbox.data import PromptStream
from grpo_toolbox.engines import Engine
from grpo_toolbox.errors import ToolboxError, TrainingError
from grpo_toolbox.evaluation import evaluate
from grpo_toolbox.interrupts import GracefulStop, Interrupted
from grpo_toolbox.metrics import step_metrics
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import Reference
from grpo_toolbox.objectives import Objective, loss_and_terms
from grpo_toolbox.rewards import Reward, TrainerState, score_rollouts
from grpo_toolbox.rollout import rollout
from grpo_toolbox.types import Prompt, RunInfo, Sampling, Step


@dataclass(frozen=True)
class UpdateSettings:
    """How a batch becomes an optimizer step."""

    ppo_epochs: int = 1
    micro_batch_tokens: int = 4096
    max_grad_norm: float = 1.0
    packed: bool = True
    skip_zero_advantage: bool = True
    """Leave out rows of exactly zero advantage where the objective allows it: same gradient, less work."""
    autocast: torch.dtype | None = None
    """Precision of the forward pass; None is that of the weights."""


@dataclass
class Run:
    """Everything one training run is made of, and how far it has come."""

    info: RunInfo
    policy: nn.Module
    reference: Reference | None
    engine: Engine
    reward: Reward
    advantage: Callable[[Tensor], Tensor]
    objective: Objective
    optimizer: torch.optim.Optimizer
    lr_at: Callable[[int], float]
    data: PromptStream
    eval_prompts: Sequence[Prompt]
    callbacks: Sequence[Callback]
    export: Callable[[Path], None]
    """Writes the model files of a checkpoint into a folder."""
    sampling: Sampling
    group_size: int
    settings: UpdateSettings
    eval_sampling: Sampling
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    finished: int = 0
    """The last finished step; parameters, optimizer and `snapshot` are its."""
    best: tuple[float, int] | None = None
    """Highest eval/reward so far, and its step."""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """RNG states and data position of the last finished step."""
    unreported: Step | None = None
    """The finished step that callbacks have not seen yet."""
    moving: bool = False
    """Whether the optimizer has begun to move the parameters of a step that is not finished: then nothing is saved."""
    saved: int | None = None
    """The step of the newest checkpoint."""
    owed: dict[str, float] = field(default_factory=dict)
    """Metrics of the last finished step while its evaluation is due: a run that stops in it evaluates when resumed."""


def train(run: Run) -> dict[str, float]:
    """Train until `max_steps`, a stop signal, or an error; the last finished step is saved in every case."""
    started = time.perf_counter()
    for callback in run.callbacks:
        callback.on_start(run.info)
    with GracefulStop() as stop:
        try:
            _before_training(run)
            for number in range(run.finished + 1, run.info.max_steps + 1):
                clock = _Clock()
                prompts = run.data.next()
                with clock("rollout"):
                    rollouts = rollout(run.engine, prompts, run.group_size, _seeded(run.sampling, number))
                with clock("reward"):
                    state = TrainerState(number, run.info.max_steps)
                    scores = score_rollouts(run.reward, rollouts, run.group_size, trainer_state=state)
                advantages = run.advantage(scores.total)
                batch = collate(rollouts, advantages)
                with stop.protect():
                    with clock("update"):
                        updated = update(run, batch, number)
                    run.engine.sync()
                    metrics = step_metrics(rollouts, scores) | updated | clock.metrics(rollouts)
                    _finish(run, Step(number, metrics, rollouts, scores, advantages))
                evaluated = _evaluate_when_due(run, number)
                with stop.protect():
                    _report(run, evaluated)
                    _save_when_due(run, number)
        except Interrupted:
            pass  # summed up below
        finally:
            with stop.shield():
                _report(run, {})
                _save(run)
                summary = {"steps": float(run.finished), "seconds": time.perf_counter() - started}
                summary["interrupted"] = float(stop.received or 0)
                for callback in run.callbacks:
                    callback.on_end(summary)
                run.engine.close()
    return summary


def update(run: Run, batch: Batch, number: int) -> dict[str, float]:
    """Take `ppo_epochs` optimizer steps on one batch and return the metrics of what was trained.

    The denominators are counted once, over the whole batch; the losses of the micro-batches then add up to the loss of
    the step, however it is split. A non-finite loss or gradient raises before the optimizer moves anything.
    """
    settings, objective = run.settings, run.objective
    counts = denominators(batch, objective.length or run.sampling.max_new_tokens)
    skip = settings.skip_zero_advantage and objective.zero_advantage_is_zero_gradient
    rows = rows_with_gradient(batch) if skip else list(range(len(batch)))
    micros = [
        _with_reference(run, batch.select(part).to(run.device))
        for part in micro_batches(batch, rows, settings.micro_batch_tokens)
    ]
    lr = run.lr_at(number)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    meter = _Meter()
    run.policy.train()
    for epoch in range(settings.ppo_epochs):
        for index, micro in enumerate(micros):
            logps, entropy = _policy_logps(run, micro)
            loss, terms = loss_and_terms(
                objective,
                logps=logps,
                advantages=micro.advantages,
                mask=micro.mask,
                denominators=counts,
                old_logps=micro.old_logps,
                ref_logps=micro.ref_logps,
            )
            loss.backward()
            meter.add(loss, terms | {"entropy": entropy.detach()}, micro.mask)
            if epoch == 0:
                meter.add_gap(logps.detach() - micro.sampler_logps, micro.mask)
                micros[index] = replace(micro, old_logps=_first(micro.old_logps, logps.detach()))
        meter.grad_norm = _step(run, meter, number)
    trained = {"rows_trained": float(len(rows)), "forward_tokens": float(sum(micro.forward_tokens for micro in micros))}
    return meter.metrics(settings.ppo_epochs) | trained | {"lr": lr}


def _first(value: Tensor | None, default: Tensor) -> Tensor:
    return default if value is None else value


def _policy_logps(run: Run, micro: Batch) -> tuple[Tensor, Tensor]:
    with _autocast(run):
        return completion_logps(
            run.policy, micro, temperature=run.sampling.temperature or 1.0, packed=run.settings.packed
        )


def _with_reference(run: Run, micro: Batch) -> Batch:
    """Add the reference's log-probs, once for all epochs."""
    if run.reference is None:
        return micro
    with torch.no_grad(), run.reference.model() as reference, _autocast(run):
        temperature = run.sampling.temperature or 1.0
        ref_logps, _ = completion_logps(reference, micro, temperature=temperature, packed=run.settings.packed)
    return replace(micro, ref_logps=ref_logps)


@contextmanager
def _autocast(run: Run) -> Iterator[None]:
    dtype = run.settings.autocast
    with torch.autocast(run.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def _step(run: Run, meter: _Meter, number: int) -> float:
    """Clip the gradient and let the optimizer move, unless something is not finite; return the norm before clipping."""
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # a batch without any gradient still decays momentum, skipped rows or not
            parameter.grad = torch.zeros_like(parameter)
    norm = float(nn.utils.clip_grad_norm_(parameters, run.settings.max_grad_norm))
    if not (meter.is_finite() and norm < float("inf")):
        run.optimizer.zero_grad(set_to_none=True)
        what = "loss" if not meter.is_finite() else "gradient"
        kept = (
            "earlier epochs of the step have moved the parameters, so the newest checkpoint is the one to go back to"
            if run.moving
            else f"the parameters are still those of step {number - 1}"
        )
        raise TrainingError(
            f"step {number}: the {what} is not finite, so the optimizer was not called; {kept}. "
            "Lower trainer.lr or trainer.max_grad_norm, or look at what the step was trained on."
        )
    run.moving = True
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


class _Meter:
    """Sums over the tokens of a step, whatever the split into micro-batches."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._sums: dict[str, float] = defaultdict(float)
        self._tokens = 0.0
        self._gap_sum = self._gap_tokens = self._gap_max = 0.0
        self.grad_norm = 0.0

    def add(self, loss: Tensor, terms: Mapping[str, Tensor], mask: Tensor) -> None:
        self._loss += float(loss.detach())
        self._tokens += float(mask.sum())
        for name, values in terms.items():
            self._sums[name] += float(values[mask].sum())

    def add_gap(self, difference: Tensor, mask: Tensor) -> None:
        gaps = difference[mask].abs()
        if gaps.numel():
            self._gap_sum += float(gaps.sum())
            self._gap_tokens += gaps.numel()
            self._gap_max = max(self._gap_max, float(gaps.max()))

    def is_finite(self) -> bool:
        return abs(self._loss) < float("inf")

    def metrics(self, epochs: int) -> dict[str, float]:
        means = {name: value / self._tokens for name, value in self._sums.items()} if self._tokens else {}
        if self._gap_tokens:
            means["sampler/logp_gap_mean"] = self._gap_sum / self._gap_tokens
            means["sampler/logp_gap_max"] = self._gap_max
        return means | {"loss": self._loss / epochs, "grad_norm": self.grad_norm}


class _Clock:
    """Seconds per stage of one step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - started

    def metrics(self, rollouts: Sequence[Any]) -> dict[str, float]:
        tokens = sum(len(one.ids) for one in rollouts)
        total = time.perf_counter() - self._started
        return {f"time/{stage}": value for stage, value in self._seconds.items()} | {
            "time/step": total,
            "tokens_per_s": tokens / total,
        }


def _seeded(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of step `number`: other random streams each step, the same ones after a resume."""
    return replace(sampling, seed=sampling.seed * 1_000_003 + number)


def _before_training(run: Run) -> None:
    """Evaluate the untrained policy, or make up for an evaluation that a stop cut short."""
    run.snapshot = _snapshot(run, run.finished)
    if run.eval_every and (run.owed or run.finished == 0):
        step = Step(run.finished, run.owed)
        evaluated = _evaluate(run, run.finished)
        run.unreported = step
        _report(run, evaluated)


def _finish(run: Run, step: Step) -> None:
    """The step is whole: parameters, optimizer and snapshot belong to it from here on."""
    snapshot, owed = _snapshot(run, step.number), dict(step.metrics) if _is_due(run, step.number) else {}
    # One statement without a call, which no second Ctrl-C can cut in two.
    run.finished, run.unreported, run.snapshot, run.owed, run.moving = step.number, step, snapshot, owed, False


def _snapshot(run: Run, number: int) -> dict[str, Any]:
    return {"step": number, "rng": capture_rng(), "data": run.data.state_dict()}


def _report(run: Run, evaluated: Mapping[str, float]) -> None:
    """Show the finished step to the callbacks, once; a step whose evaluation was cut short is shown without it."""
    step, run.unreported = run.unreported, None
    if step is None:
        return
    if evaluated:
        run.owed = {}
        run.snapshot = _snapshot(run, run.finished)  # a reward may have drawn random numbers during the evaluation
    for callback in run.callbacks:
        callback.on_step(replace(step, metrics={**step.metrics, **evaluated}))


def _evaluate(run: Run, number: int) -> dict[str, float]:
    metrics = evaluate(run.engine, run.reward, run.eval_prompts, run.eval_sampling)
    reward = metrics.get("eval/reward")
    if reward is not None and (run.best is None or reward > run.best[0]):
        run.best = (reward, number)
    return metrics


def _evaluate_when_due(run: Run, number: int) -> dict[str, float]:
    return _evaluate(run, number) if _is_due(run, number) else {}


def _is_due(run: Run, number: int) -> bool:
    return run.eval_every > 0 and (number % run.eval_every == 0 or number == run.info.max_steps)


def _save_when_due(run: Run, number: int) -> None:
    is_best = run.best is not None and run.best[1] == number
    if run.save_every and (number % run.save_every == 0 or is_best):
        _save(run)


def _save(run: Run) -> None:
    """Write a checkpoint of the last finished step, unless it is there already or the parameters have moved on."""
    if run.moving or run.saved == run.finished or not run.finished:
        return
    state = {
        **run.snapshot,
        "parameters": {name: value for name, value in run.policy.named_parameters() if value.requires_grad},
        "optimizer": run.optimizer.state_dict(),
        "best": run.best,
        "owed": run.owed,
    }
    best_step = run.best[1] if run.best else None
    root = run.info.run_dir / "checkpoints"
    save_checkpoint(root, run.finished, state=state, export=run.export, keep=run.keep_checkpoints, best_step=best_step)
    run.saved = run.finished


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put a checkpoint's state into a freshly built run; the next step continues as if it had never stopped."""
    parameters = {name: value for name, value in run.policy.named_parameters() if value.requires_grad}
    saved = {(name, value.shape) for name, value in state["parameters"].items()}
    foreign = saved ^ {(name, value.shape) for name, value in parameters.items()}
    if foreign:
        raise ToolboxError(
            f"the checkpoint's parameters are not this model's (first difference: {min(foreign)[0]}): resume with "
            "the model.* settings the run was started with."
        )
    with torch.no_grad():
        for name, value in state["parameters"].items():
            parameters[name].copy_(value)
    run.optimizer.load_state_dict(state["optimizer"])
    run.data.load_state_dict(state["data"])
    restore_rng(state["rng"])
    run.best = tuple(state["best"]) if state["best"] else None
    run.owed = dict(state["owed"])
    run.finished = run.saved = int(state["step"])
