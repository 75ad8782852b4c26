"""Check of the critic: it reads the state that predicts the token, and all of it learns, however the work is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.batch import Batch
from grpo_toolbox.critic import Critic
from grpo_toolbox.measure import Gradient, Sample, difference, limits, modes_kept, moved
from grpo_toolbox.models.forward import autocast
from grpo_toolbox.run import Run
from grpo_toolbox.verify.finding import Finding, compared, gap


def check_critic(run: Run, sample: Sample) -> Finding:
    """The critic's values are those of a plain forward, and all of it learns, in one micro-batch as in several."""
    meaning = (
        "values are read off another token, parts of the critic never learn, or memory settings change what it learns"
    )
    critic = run.critic
    if critic is None:
        return Finding("critic", "there is none: the advantage asks for no values", "", None, meaning)
    limit, rounding = limits(run)
    try:
        with modes_kept(critic.parts), moved(critic.parts, share=0.0):  # its head is zero at first, and hides the rest
            batch = _taught(critic, sample)
            whole, split = (critic_gradient(critic, batch, size) for size in (10**9, batch.forward_tokens // 3))
            off = gap(critic.values(batch), _plain_values(run, critic, batch), sample.real)
    finally:
        critic.parts.zero_grad(set_to_none=True)
    silent = [name for name, part in whole.parts.items() if not bool(part.any())]
    measured = {"values": (off, rounding), "gradient": (difference(split, whole), limit)}
    found = compared("critic", measured, meaning)
    shown = f"{found.measured}, {len(silent)} of {len(whole.parts)} parameters without"
    shown += f": {', '.join(silent[:3])}" if silent else ""
    return replace(found, measured=shown, allowed=f"{found.allowed}, 0", passed=bool(found.passed) and not silent)


def critic_gradient(critic: Critic, batch: Batch, tokens: int) -> Gradient:
    """Return the gradient of the critic's loss on a batch, in micro-batches of at most about `tokens` tokens."""
    critic.parts.zero_grad(set_to_none=True)
    loss, _ = critic.backward(batch, max(tokens, 1))
    grads = {name: value.grad for name, value in critic.parts.named_parameters()}
    parts = {name: torch.zeros(()) if grad is None else grad.detach().clone() for name, grad in grads.items()}
    return Gradient(loss, parts, ratio=1.0)


def _taught(critic: Critic, sample: Sample) -> Batch:
    """Return the sample with the critic's own values, and made-up returns that are none of them."""
    values = critic.values(sample.batch)
    away = torch.where(torch.arange(values.shape[1]) % 2 == 0, 0.7, -0.4)
    return replace(sample.batch, values=values, returns=values + away)


@torch.no_grad()
def _plain_values(run: Run, critic: Critic, batch: Batch) -> Tensor:
    """Return values (B, T) by Hugging Face's own forward: one row at a time, no padding, no cache."""
    body: Any = critic.parts["decoder"]
    head: Any = critic.parts["head"]
    result = torch.zeros(batch.mask.shape)
    with autocast(run.device, critic.settings.autocast):
        for row, (group, ids) in enumerate(zip(batch.group, batch.completions, strict=True)):
            prompt = batch.prompts[group]
            tokens = torch.tensor([[*prompt, *ids]], device=run.device)
            hidden = body(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).last_hidden_state[
                0
            ]
            predicting = hidden[len(prompt) - 1 : -1].to(head.weight.dtype)
            result[row, : len(ids)] = head(predicting).squeeze(-1).float().cpu()
    return result
