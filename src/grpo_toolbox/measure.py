"""What `toolbox verify` measures with: a few rollouts of the run, and the gradient that the run's own `update` has.

Nothing here moves the run: the optimizer only writes gradients down, and parameters that were moved are put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, written
from grpo_toolbox.experience import batch_of
from grpo_toolbox.models.forward import autocast, eval_mode, in_half_precision, plain_model
from grpo_toolbox.models.packing import FLOAT32_ROUNDING, HALF_ROUNDING
from grpo_toolbox.objectives import Objective
from grpo_toolbox.rollout import rollout
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.types import Prompt, Rollout, Scores
from grpo_toolbox.update import policy_logps, update

GROUPS, GROUP_SIZE, LONGEST, GRADED = 2, 3, 48, 32
"""What is looked at: prompts, completions of each, tokens of the longest, prompts that the grader is tried on."""


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient of one step."""

    loss: float
    parts: dict[str, Tensor]
    """By the name of the parameter."""
    ratio: float
    """Mean over the tokens."""


@dataclass(frozen=True)
class Sample:
    """What the checks look at."""

    rollouts: Sequence[Rollout]
    """Of a few prompts of different lengths, prompt-major."""
    advantages: Tensor
    """(P, G), made up so that every row has a gradient."""
    batch: Batch
    """The rollouts as the trainer collates them, with a made-up reference half a nat away: the KL has a gradient."""
    logps: Tensor
    """(B, T) as the update computes them, at the start."""
    whole: Gradient
    """Of the batch in one piece: what the others are compared with."""
    prompts: Sequence[Prompt]
    """More prompts, for the grader."""

    @property
    def real(self) -> Tensor:
        """(B, T) True where a completion has a token that the model wrote."""
        return written(self.rollouts)


# ---- what is looked at -----------------------------------------------------------------------------------------------


def draw_sample(run: Run) -> Sample:
    """Sample a few completions with the run's engine, and make up advantages and a reference for them."""
    state = run.data.state_dict()
    drawn = {prompt.id: prompt for _ in range(GRADED) for prompt in run.data.next(1)}
    run.data.load_state_dict(state)
    by_length = sorted(drawn.values(), key=lambda prompt: len(prompt.ids))
    chosen = [by_length[index * (len(by_length) - 1) // (GROUPS - 1)] for index in range(GROUPS)]
    # often all prompts are equally long, and then nothing would be padded: half of one is another length
    chosen.append(replace(chosen[0], ids=chosen[0].ids[len(chosen[0].ids) // 2 :]))
    longest = min(run.sampling.max_new_tokens, LONGEST)
    shortest = min(run.sampling.min_new_tokens, longest)
    sampling = replace(run.sampling, max_new_tokens=longest, min_new_tokens=shortest, drawn_logps=False)
    group_size = min(run.group_size, GROUP_SIZE)
    rollouts = _with_an_end(run, _not_all_as_long(rollout(run.engine, chosen, group_size, sampling)))
    count = len(rollouts)
    sizes = 0.5 + torch.arange(count) / count
    advantages = torch.where(torch.arange(count) % 3 == 1, -sizes, sizes).reshape(-1, group_size)
    batch = collated(run, rollouts, advantages)
    away = torch.where(torch.arange(batch.mask.shape[1]) % 2 == 0, 0.5, -0.5)
    batch = replace(batch, ref_logps=batch.sampler_logps + away)
    return Sample(rollouts, advantages, batch, trained_logps(run, batch), gradient(run, batch), [*drawn.values()])


def _not_all_as_long(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Cut the last completion to half where all are equally long: else nothing would be padded."""
    *others, last = rollouts
    half = len(last.ids) // 2
    if not half or len({len(one.ids) for one in rollouts}) > 1:
        return rollouts
    cut = replace(last, ids=last.ids[:half], logps=last.logps[:half], written=last.written[:half])
    return [*others, replace(cut, finish_reason="length")]


def _with_an_end(run: Run, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Let the first completion end where none does, as all are cut: half of it and the model's own stop token."""
    settings: Any = getattr(plain_model(run.policy), "generation_config", None)
    ends = settings and settings.eos_token_id
    if ends is None or any(one.finish_reason == "stop" for one in rollouts):
        return rollouts
    first, end = rollouts[0], ends[0] if isinstance(ends, list | tuple) else ends
    half = max(len(first.ids) // 2, 1)
    marks = (*first.written[:half], True) if first.written else ()
    made = replace(first, ids=(*first.ids[:half], end), logps=(*first.logps[:half], 0.0), written=marks)
    said = trained_logps(run, collated(run, [made], torch.ones(1, 1)))[0, half]
    return [replace(made, logps=(*made.logps[:half], float(said)), finish_reason="stop"), *rollouts[1:]]


def collated(run: Run, rollouts: Sequence[Rollout], advantages: Tensor) -> Batch:
    """Return the batch that the run makes of rollouts with these advantages (P, G)."""
    scores = Scores((), (), torch.zeros(*advantages.shape, 0), advantages)
    experience = Experience(rollouts, scores, advantages, range(len(advantages)))
    return batch_of(replace(run, objective=plain_objective(run)), experience)


def plain_objective(run: Run) -> Objective:
    """Return the run's objective without what depends on other runs of the policy or on the length limit.

    Completions are cut shorter here than in the run; which tokens are chosen hangs on roundings of half precision.
    """
    now = run.controlled_objective()
    whole = {"top_entropy_quantile": 1.0, "clip_cov": 0.0, "kl_cov": 0.0, "mask_truncated": False}
    return replace(now, kl_target=None, entropy_target=None, **whole)  # type: ignore[arg-type]


# ---- how it is looked at ---------------------------------------------------------------------------------------------


class _Recorder(torch.optim.Optimizer):
    """Writes the gradient down where another optimizer would move the parameters, and then lets `between` move them."""

    def __init__(self, parameters: Sequence[nn.Parameter], between: Callable[[], None] = lambda: None) -> None:
        super().__init__(parameters, {})
        self.gradients: list[Tensor] = []
        self._between = between

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Keep a copy of every gradient."""
        (group,) = self.param_groups
        self.gradients = [parameter.grad.detach().clone() for parameter in group["params"]]
        self._between()


def gradient(run: Run, batch: Batch, objective: Objective | None = None, **settings: Any) -> Gradient:
    """Return the unclipped gradient that the run's `update` has for `batch`, in one micro-batch unless `settings` say.

    The reference's log-probs are the batch's.
    """
    return _recorded(run, batch, objective or plain_objective(run), {"ppo_epochs": 1} | settings, lambda: None)


def second_gradient(run: Run, batch: Batch, share: float) -> Gradient:
    """Return the gradient of the second of two passes over `batch`, the parameters `moved` by `share` in between."""
    with restored(run.policy):
        return _recorded(run, batch, plain_objective(run), {"ppo_epochs": 2}, lambda: nudge(run.policy, share))


def _recorded(
    run: Run, batch: Batch, objective: Objective, settings: dict[str, Any], between: Callable[[], None]
) -> Gradient:
    named = {name: parameter for name, parameter in run.policy.named_parameters() if parameter.requires_grad}
    recorder = _Recorder(list(named.values()), between)
    whole = {"micro_batch_tokens": 10**9, "max_grad_norm": math.inf}
    probe = replace(
        run,
        objective=objective,
        optimizer=recorder,
        reference=None,
        entropy_control=None,
        kl_control=None,
        critic=None,
        settings=replace(run.settings, **(whole | settings)),
        generation=replace(run.generation, steps_per_generation=1),
    )
    metrics = update(probe, batch, 1)
    return Gradient(metrics["loss"], dict(zip(named, recorder.gradients, strict=True)), metrics.get("ratio", math.nan))


def difference(one: Gradient, other: Gradient) -> float:
    """Return ‖one − other‖ / ‖other‖ over all parameters; 0 where both are zero."""
    pairs = list(zip(one.parts.values(), other.parts.values(), strict=True))
    gap = sum(float((a.float() - b.float()).square().sum(dtype=torch.float64)) for a, b in pairs)
    size = sum(float(b.float().square().sum(dtype=torch.float64)) for _, b in pairs)
    return math.sqrt(gap / size) if size else math.sqrt(gap)


@torch.no_grad()
def trained_logps(run: Run, batch: Batch) -> Tensor:
    """Return log-probs (B, T) as the update computes them, the model in training mode."""
    run.policy.train()
    return policy_logps(run, batch.to(run.device))[0].cpu()


@torch.no_grad()
def plain_logps(run: Run, batch: Batch) -> Tensor:
    """Return log-probs (B, T) by Hugging Face's own forward: one row at a time, no padding, no cache, full logits."""
    model: Any = plain_model(run.policy)
    result = torch.zeros(batch.mask.shape)
    with eval_mode(run.policy), autocast(run.device, run.settings.autocast):
        for row, (group, ids) in enumerate(zip(batch.group, batch.completions, strict=True)):
            prompt = batch.prompts[group]
            tokens = torch.tensor([[*prompt, *ids]], device=run.device)
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0]
            scaled = logits[len(prompt) - 1 : -1].float() / run.sampling.temperature
            labels = torch.tensor(ids, device=run.device).unsqueeze(1)
            result[row, : len(ids)] = scaled.log_softmax(dim=-1).gather(1, labels).squeeze(1).cpu()
    return result


@contextmanager
def moved(policy: nn.Module, share: float) -> Iterator[None]:
    """Move the trainable parameters by `nudge` for the block."""
    with restored(policy):
        nudge(policy, share)
        yield


@contextmanager
def restored(policy: nn.Module) -> Iterator[None]:
    """Put the trainable parameters back after the block, bit for bit."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put every module back into the mode, training or not, that it was in before the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def nudge(policy: nn.Module, share: float) -> None:
    """Move trainable parameters at random by `share` of their size, and those that are all zero by 0.01.

    A `share` of 0 moves only the latter: half of a fresh adapter, without which the other half has no gradient.
    """
    random = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            size = share * float(parameter.float().abs().mean()) if bool(parameter.any()) else 0.01
            parameter.add_(size * torch.randn(parameter.shape, generator=random).to(parameter))


def limits(run: Run) -> tuple[float, float]:
    """Return the largest relative difference of gradients and absolute one of log-probs that is rounding.

    Thirty layers make 1e-4 of float32's 1e-7; a mistake makes 1e-2 and more.
    """
    return (5e-2, HALF_ROUNDING) if in_half_precision(run.policy, run.settings.autocast) else (1e-3, FLOAT32_ROUNDING)
