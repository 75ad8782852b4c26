"""TRL's trainer seen as a run: its completions become rollouts, our reward its reward functions, its steps ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from grpo_toolbox.checkpoint import restore_rng
from grpo_toolbox.clock import Clock, tokens_of
from grpo_toolbox.config.fields import METRIC_MAP
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.experience import take
from grpo_toolbox.interrupts import GracefulStop
from grpo_toolbox.metrics import step_metrics
from grpo_toolbox.rewards import HeldOutScoring, Scoring, TrainerState
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.trainer import begin, evaluate_when_due, finish, refresh_reference, report, save_when_due
from grpo_toolbox.types import Prompt, Rollout, Step

FROM_TRL = {ours: theirs for ours, theirs in METRIC_MAP.items() if not ours.startswith(("eval/", "time/"))}
CISPO_CLIP = "cispo_clip_ratio"
"""TRL's name of what CISPO caps, which is all that it says of CISPO's clip."""


class Generation:
    """What TRL has sampled last, as our records: its rollouts, what our reward said, the advantages TRL made of it.

    TRL knows a prompt by its key, the number of its row; `prompt_ids` and the reward functions look it up.
    """

    def __init__(
        self, run: Run, prompts: Sequence[Prompt], decode: Callable[..., str], stop_ids: Sequence[int]
    ) -> None:
        self._run = run
        self._prompts = {key_of(prompt): prompt for prompt in prompts}
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self._portions: list[Experience] = []
        self._whole: Experience | None = None
        self.width = 0
        """Tokens of a row as TRL pads it: the longest prompt and the longest completion of the generation."""
        self.clock = Clock()
        self.trainer: Any = None
        """TRL's, once it is there."""
        self.logps: Sequence[Sequence[float | None]] | None = None
        """What the sampler said of each completion's tokens; None where it is transformers' generate."""

    @property
    def used_up(self) -> bool:
        """Whether every step that learns from the generation has been taken."""
        return not self._portions

    def prompt_ids(self, keys: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts exactly as the toolbox encodes them."""
        return [list(self._prompts[key].ids) for key in keys]

    def reward_functions(self) -> list[Callable[..., list[float | None]]]:
        """Return one function of TRL's signature per component of the reward; the first one scores for all."""
        return [self._function(index, part.name) for index, part in enumerate(self._run.reward.components)]

    def _function(self, index: int, name: str) -> Callable[..., list[float | None]]:
        def component(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
            if index == 0:
                with self.clock("reward"):
                    self._score(prompts, completion_ids)
            assert self._whole is not None
            values = self._whole.scores.components[..., index].flatten().tolist()
            return [None if math.isnan(value) else value for value in values]

        component.__name__ = name
        return component

    def _score(self, keys: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> None:
        """Score completions, prompt-major, as a step of the toolbox's own trainer is scored."""
        run, size = self._run, self._run.group_size
        logps = self.logps or [[None] * len(ids) for ids in completion_ids]
        rows = zip(keys, completion_ids, logps, strict=True)
        rollouts = [self._rollout(self._prompts[key], ids, said) for key, ids, said in rows]
        run.data.next(len(rollouts) // size)  # these very prompts: the data set was drawn from it
        state = TrainerState(run.finished + 1, run.info.max_steps)
        with (
            Scoring(run.reward, size, state, run.error_budget) as scoring,
            HeldOutScoring(run.reward.heldout, size, state, run.error_budget) as check,
        ):
            for group in range(len(rollouts) // size):
                check.add(group, rollouts[group * size : (group + 1) * size])
            scoring.add(0, rollouts)
            scores = scoring.scores()
            settled = run.reward.settled(run.info.max_steps)
            checked = check.checked(scores.components, [part.weight for part in settled.components])
        metrics = run.reward.moving_weights(state)
        run.reward.observe(scores.components.flatten(0, 1).T.tolist())
        metrics |= run.divergence.observe([checked]) if run.divergence else {}
        self.trainer.reward_weights = torch.tensor(scores.weights)
        kept = range(scores.total.shape[0])
        self.width = max(len(one.prompt.ids) for one in rollouts) + max(len(one.ids) for one in rollouts)
        self._whole = Experience(rollouts, scores, torch.zeros_like(scores.total), kept, metrics)

    def _rollout(self, prompt: Prompt, ids: Sequence[int], logps: Sequence[float | None]) -> Rollout:
        ended = bool(ids) and ids[-1] in self._stop_ids
        text = self._decode(ids, "stop" if ended else "length")
        known = tuple(math.nan if one is None else one for one in logps)
        return Rollout(prompt, tuple(ids), known, "stop" if ended else "length", text, self._run.finished)

    def deal(self, advantages: Tensor) -> None:
        """Take the advantages (B,) that TRL has made of the scores, and deal the generation out to its steps."""
        assert self._whole is not None
        whole = replace(self._whole, advantages=advantages.reshape(-1, self._run.group_size).cpu())
        steps, size = self._run.generation.steps_per_generation, self._run.prompts_per_step
        if steps == 1:
            self._portions = [whole]
            return
        first = [take(whole, range(step * size, (step + 1) * size)) for step in range(steps)]
        again = [replace(one, scores=replace(one.scores, metrics={}), metrics={}) for one in first]
        self._portions = first + again * (self._run.settings.ppo_epochs - 1)

    def next(self) -> Experience:
        """Return the groups that stand for the step just taken; where steps share a generation, TRL mixes its rows."""
        return self._portions.pop(0)


def key_of(prompt: Prompt) -> str:
    """Return what TRL knows a prompt by."""
    return str(prompt.id)


class Steps(TrainerCallback):
    """Makes each batch that TRL has trained on a finished step: metrics, evaluation, checkpoint, all callbacks."""

    def __init__(self, run: Run, generation: Generation, stop: GracefulStop, rng: Mapping[str, Any]) -> None:
        """`rng` are the random states that the first step begins with."""
        self._run = run
        self._generation = generation
        self._stop = stop
        self._rng: Mapping[str, Any] | None = rng
        self._passes = run.settings.ppo_epochs if run.generation.steps_per_generation == 1 else 1
        self._logs: list[Mapping[str, Any]] = []
        self._save_owed = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock where a batch is new."""
        if self._rng is not None:  # building a trainer and reading data draw random numbers
            restore_rng(self._rng)
            self._rng = None
        if not self._logs:
            begin(self._run, self._run.finished + 1)
            self._generation.clock = Clock()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop the run before a gradient that is not finite reaches the parameters."""
        gradients = [
            parameter.grad
            for group in self._run.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._check_finite(float(nn.utils.get_total_norm(gradients)))
        self._run.moving = True

    def _check_finite(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {self._run.finished + 1}: the gradient is not finite, so the step is given up. "
                "Lower trainer.lr or trainer.max_grad_norm, or look at what the step was trained on."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Finish the step whose last pass this is: TRL logs after each time that the optimizer has moved."""
        if "grad_norm" not in logs:  # the summary of the whole training
            return
        self._check_finite(logs["grad_norm"])  # clipping to a norm beyond float32 has left zeros
        self._logs.append(logs)
        if len(self._logs) < self._passes:
            return
        learnt = self._generation.next()
        self._finish(learnt)
        self._logs = []
        ends = self._generation.used_up
        if ends and (self._run.due.stop or self._stop.received is not None):
            control.should_training_stop = True

    def _finish(self, learnt: Experience) -> None:
        run, number = self._run, self._run.finished + 1
        refresh_reference(run, number)
        run.source.sync(run, number, self._generation.clock)
        seen = step_metrics(learnt.rollouts, learnt.scores) | dict(learnt.metrics)
        metrics = trl_metrics(self._logs) | seen | _work(self._generation, learnt)
        metrics |= run.observe(metrics, completions=len(learnt.rollouts))
        finish(run, Step(number, metrics, learnt.rollouts, learnt.scores, learnt.advantages))
        report(run, evaluate_when_due(run, number))
        if not self._generation.used_up and number < run.info.max_steps:
            # what TRL keeps of a generation cannot be saved, so checkpoints wait for its last step
            self._save_owed |= run.due.save
            run.moving = True
            return
        run.due.save |= self._save_owed
        self._save_owed = False
        save_when_due(run, number)


def trl_metrics(logs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what TRL logged in the passes over one batch under our names: means, and the last gradient's norm."""
    found = {}
    for ours, theirs in FROM_TRL.items():
        values = [one[theirs] for one in logs if one.get(theirs) is not None]
        if values:
            found[ours] = values[-1] if ours == "grad_norm" else sum(values) / len(values)
    if CISPO_CLIP in logs[-1]:
        found["clip_fraction/high"] = sum(one[CISPO_CLIP] for one in logs) / len(logs)
    return found


def _work(generation: Generation, learnt: Experience) -> dict[str, float]:
    """Return the step's times and what was forwarded; whatever is neither sampling nor scoring is the update."""
    found = generation.clock.metrics(learnt.rollouts)
    update = found["time/step"] - found.get("time/rollout", 0.0) - found.get("time/reward", 0.0)
    found |= {"time/update": update, "tokens_per_s/update": tokens_of(learnt.rollouts) / update}
    rows = float(len(learnt.rollouts))
    return found | {"rows_trained": rows, "forward_tokens": rows * generation.width}
