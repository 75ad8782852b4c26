"""Drawing tokens: one pass over the vocabulary, and one random stream per row.

A row's random numbers depend on (seed, prompt id, place in its group, token position) alone, so that a rollout does
not depend on which other rows share its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_toolbox.types import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(seed: int, prompt_ids: Sequence[int], group_size: int) -> NDArray[np.uint64]:
    """Return one 64-bit key per row (P·G,), prompt-major; a prompt that stands in the batch twice gets other keys."""
    seen: dict[int, int] = {}
    keys = []
    for prompt in prompt_ids:
        repeat = seen[prompt] = seen.get(prompt, -1) + 1
        keys += [(prompt, repeat * group_size + place) for place in range(group_size)]
    ids, places = np.array(keys, dtype=np.int64).astype(np.uint64).T
    with np.errstate(over="ignore"):
        start = np.uint64(seed % 2**64) + _GOLDEN
    return _mix(_mix(_mix(start) ^ ids) ^ places)


def uniforms(keys: NDArray[np.uint64], position: int) -> Tensor:
    """Return one number of [0, 1) per row (N,) in float64 for the token at `position`."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.uint64(position + 1) * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(values: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        z = np.asarray(values, dtype=np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling, banned: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution; return tokens (N,) and their log-probs (N,).

    `logits` (N, V), `uniform` (N,). The log-prob is that of softmax(logits / temperature) over the whole vocabulary,
    which the trainer can compute again; `banned` tokens, top-k, top-p and min-p only restrict the draw. Temperature 0
    takes the most likely token and reports its log-prob at temperature 1.
    """
    log_probs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(dim=-1)
    allowed = log_probs
    if banned:
        allowed = log_probs.index_fill(1, torch.tensor(banned, device=logits.device), float("-inf"))
    greedy = sampling.temperature == 0
    tokens = allowed.argmax(dim=-1) if greedy else _invert(_cut(allowed, sampling).exp(), uniform)
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds `uniform` times the total (N,).

    Sums are in float64: in float32 a token below 6e-8 adds nothing to a sum near 1, and its neighbour is drawn for it.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    cumulative = probs.cumsum(dim=-1, dtype=exact)
    total = cumulative[:, -1:].contiguous()
    point = uniform.to(exact).to(probs.device).unsqueeze(1) * total
    drawn = torch.searchsorted(cumulative, point, right=True)
    # rounding may put the point on the total itself: then the token that reached the total is the one
    last = torch.searchsorted(cumulative, total).clamp(max=probs.shape[1] - 1)
    return drawn.minimum(last).squeeze(1)


def _cut(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probs with −inf on what top-k, top-p and min-p leave out; the most likely token always stays."""
    if sampling.top_k > 0:
        threshold = log_probs.topk(min(sampling.top_k, log_probs.shape[1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < threshold, float("-inf"))
    if sampling.min_p > 0:
        threshold = log_probs.amax(dim=-1, keepdim=True) + float(np.log(sampling.min_p))
        log_probs = log_probs.masked_fill(log_probs < threshold, float("-inf"))
    if sampling.top_p < 1:
        probs, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
        dropped = probs.cumsum(dim=-1) - probs >= sampling.top_p  # mass before this token already reaches top-p
        log_probs = log_probs.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))
    return log_probs
