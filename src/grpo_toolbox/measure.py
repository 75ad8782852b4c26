"""What `toolbox verify` measures with: a few rollouts of the run, and the gradient that the run's own `update` has.

Nothing here moves the run: the optimizer only writes gradients down, and parameters that were moved are put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch
from grpo_toolbox.experience import batch_of
from grpo_toolbox.models.forward import HALF_ROUNDING, autocast, eval_mode, plain_model
from grpo_toolbox.objectives import Objective
from grpo_toolbox.rollout import rollout
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.types import Prompt, Rollout, Scores
from grpo_toolbox.update import policy_logps, update

GROUPS, GROUP_SIZE, LONGEST, GRADED = 3, 4, 64, 32
"""What is looked at: prompts, completions of each, tokens of the longest, prompts that the grader is tried on."""


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient of one step."""

    loss: float
    parts: dict[str, Tensor]
    """By the name of the parameter."""


@dataclass(frozen=True)
class Sample:
    """What the checks look at."""

    rollouts: Sequence[Rollout]
    """Of a few prompts of different lengths, prompt-major."""
    advantages: Tensor
    """(P, G), made up so that every row has a gradient."""
    batch: Batch
    """The rollouts as the trainer collates them, with a made-up reference half a nat away: the KL has a gradient."""
    whole: Gradient
    """Of the batch in one piece: what the others are compared with."""
    prompts: Sequence[Prompt]
    """More prompts, for the grader."""

    @property
    def real(self) -> Tensor:
        """(B, T) True where a completion has a token."""
        lengths = torch.tensor([len(one.ids) for one in self.rollouts])
        return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)


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
    sampling = replace(run.sampling, max_new_tokens=longest, min_new_tokens=shortest)
    group_size = min(run.group_size, GROUP_SIZE)
    rollouts = rollout(run.engine, chosen, group_size, sampling)
    count = len(rollouts)
    sizes = 0.5 + torch.arange(count) / count
    advantages = torch.where(torch.arange(count) % 3 == 1, -sizes, sizes).reshape(-1, group_size)
    batch = collated(run, rollouts, advantages)
    away = torch.where(torch.arange(batch.mask.shape[1]) % 2 == 0, 0.5, -0.5)
    batch = replace(batch, ref_logps=batch.sampler_logps + away)
    return Sample(rollouts, advantages, batch, gradient(run, batch), [*drawn.values()])


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
    """Writes the gradient down where another optimizer would move the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Keep a copy of every gradient."""
        (group,) = self.param_groups
        self.gradients = [parameter.grad.detach().clone() for parameter in group["params"]]


def gradient(run: Run, batch: Batch, objective: Objective | None = None, **settings: Any) -> Gradient:
    """Return the unclipped gradient that the run's `update` has for `batch`, in one micro-batch unless `settings` say.

    The reference's log-probs are the batch's.
    """
    named = {name: parameter for name, parameter in run.policy.named_parameters() if parameter.requires_grad}
    recorder = _Recorder(list(named.values()))
    whole = {"ppo_epochs": 1, "micro_batch_tokens": 10**9, "max_grad_norm": math.inf}
    probe = replace(
        run,
        objective=objective or plain_objective(run),
        optimizer=recorder,
        reference=None,
        entropy_control=None,
        kl_control=None,
        critic=None,
        settings=replace(run.settings, **(whole | settings)),
    )
    metrics = update(probe, batch, 1)
    return Gradient(metrics["loss"], dict(zip(named, recorder.gradients, strict=True)))


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
    """Move trainable parameters at random by `share` of their size, and those that are all zero by 0.01, for the block.

    A `share` of 0 moves only the latter: half of a fresh adapter, without which the other half has no gradient.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in parameters]
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            size = share * float(parameter.float().abs().mean()) if bool(parameter.any()) else 0.01
            parameter.add_(size * torch.randn(parameter.shape, generator=random).to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def limits(run: Run) -> tuple[float, float]:
    """Return the largest relative difference of gradients and absolute one of log-probs that is rounding."""
    dtypes = {parameter.dtype for parameter in run.policy.parameters()} | {run.settings.autocast or torch.float32}
    return (5e-2, HALF_ROUNDING) if dtypes & {torch.bfloat16, torch.float16} else (1e-5, 1e-4)
