"""A small Llama in float64, batches for it, the gradient of a step; equal means to 1e-10 of the largest entry."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_toolbox.batch import Batch, collate, denominators, micro_batches, prompt_lengths
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.objectives import Objective, clipped, loss_and_terms, reinforce
from grpo_toolbox.types import Prompt, Rollout

VOCABULARY = 13
TEMPERATURE = 0.7
LENGTH = 7.0
OBJECTIVES = {
    "grpo": Objective(partial(clipped, clip_eps=0.2), beta=0.04, kl="k3"),
    "dapo": Objective(partial(clipped, clip_eps=0.2, clip_eps_high=0.28), loss_agg="token_mean"),
    "dr_grpo": Objective(clipped, loss_agg="constant", beta=0.1, kl="k2"),
    "reinforce": Objective(reinforce, loss_agg="seq_mean_token_sum", beta=0.1, kl="k1"),
    "prompts": Objective(clipped, loss_agg="prompt_mean", beta=0.05, kl="k3"),
}

Shape = list[tuple[int, list[int]]]
"""(prompt length, completion lengths) of each group; equally many completions in each."""
PLAIN: Shape = [(4, [3, 5, 1]), (9, [2, 2, 6]), (1, [4, 1, 3])]


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,  # far from uniform: a wrong predictor must show
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(config).double()
    for layer in model.model.layers:  # LlamaRMSNorm rounds to float32 inside
        layer.input_layernorm, layer.post_attention_layernorm = _exact_norm(), _exact_norm()
    model.model.norm = _exact_norm()
    return model.eval()


def _exact_norm() -> nn.RMSNorm:
    return nn.RMSNorm(16, eps=1e-6, dtype=torch.float64)


@cache
def shared_llama() -> LlamaForCausalLM:
    return small_llama()


def random_rollouts(shape: Shape) -> list[Rollout]:
    """Random tokens, 0 (usually padding) and 1 (usually the stop token) among them at any place."""
    draw = random.Random(1)
    rollouts = []
    for number, (prompt_length, lengths) in enumerate(shape):
        prompt = Prompt(number, "", tuple(draw.randrange(VOCABULARY) for _ in range(prompt_length)))
        for length in lengths:
            ids = tuple(draw.randrange(VOCABULARY) for _ in range(length))
            rollouts.append(Rollout(prompt, ids, tuple(-draw.random() for _ in ids), "stop", ""))
    return rollouts


def full_batch(shape: Shape, *, per_token: bool = False) -> Batch:
    """A batch with all columns; ratios of about e^±.3, so that some tokens are clipped."""
    rollouts, group_size = random_rollouts(shape), len(shape[0][1])
    width = max(len(one.ids) for one in rollouts)
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(len(shape), group_size, *([width] if per_token else []), generator=generator)
    noise = torch.randn(2, len(rollouts), width, generator=generator, dtype=torch.float64)
    batch = collate(rollouts, advantages)
    with torch.no_grad():
        logps, _ = completion_logps(shared_llama(), batch, temperature=TEMPERATURE, packed=False)
    return replace(batch, old_logps=logps + 0.3 * noise[0], ref_logps=logps + noise[1])


def some_silent(batch: Batch) -> Batch:
    """Rows 1, 3, 4, 5 and 6 of nine, a whole group among them, get no advantage; they still count in every mean."""
    return replace(batch, advantages=batch.advantages * torch.tensor([[1.0], [0], [1], [0], [0], [0], [0], [1], [1]]))


def step_gradient(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    rows: Sequence[int] | None = None,
    tokens: int = 10**6,
    packed: bool = True,
) -> Tensor:
    """The gradient of one step over all parameters, summed over micro-batches of at most `tokens` tokens."""
    counts, batch = denominators(batch, LENGTH), replace(batch, prompt_length=prompt_lengths(batch))
    model.zero_grad()
    for part in micro_batches(batch, range(len(batch)) if rows is None else rows, tokens):
        micro = batch.select(part)
        logps, _ = completion_logps(model, micro, temperature=TEMPERATURE, packed=packed)
        loss, _ = loss_and_terms(
            objective,
            logps=logps,
            advantages=micro.advantages,
            mask=micro.mask,
            denominators=replace(counts, prompt_length=micro.prompt_length),
            old_logps=micro.old_logps,
            ref_logps=micro.ref_logps,
        )
        loss.backward()
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.isfinite().all()
    assert float((one - other).abs().max()) <= 1e-10 * max(float(other.abs().max()), 1e-30)
