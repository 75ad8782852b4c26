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
_BLOCK = 128
_LIKELY = 1024


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


def row_seeds(seed: int, prompt_ids: Sequence[int], group_size: int) -> list[int]:
    """Return one seed below 2^31 per row (P·G,) for engines with generators of their own.

    Those of a group follow one another, as vLLM gives them to the completions of one request.
    """
    starts = [int(key) >> 33 for key in row_keys(seed, prompt_ids, 1)]
    return [(start + place) % 2**31 for start in starts for place in range(group_size)]


def uniforms(keys: NDArray[np.uint64], positions: int | NDArray[np.int64]) -> Tensor:
    """Return one number of [0, 1) per row (N,) in float64 for the token at `positions`, one for all rows or (N,)."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.asarray(positions + 1).astype(np.uint64) * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(values: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        z = np.asarray(values, dtype=np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sample(
    logits: Tensor, uniform: Tensor, sampling: Sampling, banned: Sequence[int] = (), where: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution; return tokens (N,) and their log-probs (N,).

    `logits` (N, V), `uniform` (N,). The log-prob is that of softmax(logits / temperature) over the whole vocabulary,
    which the trainer can compute again; tokens `banned` (in the rows `where` (N,) is True), top-k, top-p and min-p only
    restrict the draw, unless `sampling.drawn_logps` asks for the log-prob of what they leave. Temperature 0 takes the
    most likely token and reports its log-prob at temperature 1.
    """
    scaled = logits.float() if sampling.temperature in (0, 1) else logits.float() / sampling.temperature
    if sampling.temperature > 0 and not (banned or sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        probs = scaled.softmax(
            dim=-1
        )  # one pass over the vocabulary: what is drawn has a probability to take the log of
        tokens = _invert(probs, uniform)
        return tokens, probs.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    log_probs = scaled.log_softmax(dim=-1)
    allowed = log_probs
    if banned:
        forbidden = torch.zeros_like(log_probs, dtype=torch.bool)
        forbidden[:, list(banned)] = True
        allowed = log_probs.masked_fill(forbidden if where is None else forbidden & where.unsqueeze(1), float("-inf"))
    greedy = sampling.temperature == 0
    left = allowed if greedy else _cut(allowed, sampling)
    tokens = left.argmax(dim=-1) if greedy else _invert(left.exp(), uniform)
    if sampling.drawn_logps and not greedy:
        log_probs = left.log_softmax(dim=-1)
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds `uniform` times the total (N,).

    First among blocks of the vocabulary, then inside one block. Sums are in float64: in float32 a token below 6e-8
    adds nothing to a sum near 1, and its neighbour is drawn for it.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    size = probs.shape[1]
    if size <= _BLOCK:
        ends = probs.cumsum(dim=-1, dtype=exact)
        token = _passing(ends, uniform.to(exact).to(probs.device).unsqueeze(1) * ends[:, -1:])
        return token.squeeze(1).clamp(max=size - 1)
    whole = size - size % _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1, dtype=exact)
    rest = probs[:, whole:].sum(dim=-1, dtype=exact, keepdim=True)
    ends = torch.cat([sums, rest], dim=1).cumsum(dim=-1)
    point = uniform.to(exact).to(probs.device).unsqueeze(1) * ends[:, -1:]
    block = _passing(ends, point)
    places = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, places.clamp(max=size - 1)).to(exact).masked_fill(places >= size, 0)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0)
    token = block * _BLOCK + _passing(before + inside.cumsum(dim=-1), point)
    return token.squeeze(1).clamp(max=size - 1)


def _passing(cumulative: Tensor, point: Tensor) -> Tensor:
    """Return the first place (N, 1) whose cumulative sum passes `point` (N, 1)."""
    passing = torch.searchsorted(cumulative, point, right=True)
    # rounding may put the point on the last sum itself: then the place that reached that sum is the one
    return passing.minimum(torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))


def _cut(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probs with −inf on what top-k, top-p and min-p leave out; the most likely token always stays."""
    if sampling.top_k > 0:
        threshold = log_probs.topk(min(sampling.top_k, log_probs.shape[1]), dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < threshold, float("-inf"))
    if sampling.min_p > 0:
        threshold = log_probs.amax(dim=-1, keepdim=True) + float(np.log(sampling.min_p))
        log_probs = log_probs.masked_fill(log_probs < threshold, float("-inf"))
    return _nucleus(log_probs, sampling.top_p) if sampling.top_p < 1 else log_probs


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until their mass reaches `top_p`: among the first thousand, where that is enough."""
    probs = log_probs.softmax(dim=-1)
    size = probs.shape[1]
    likely, order = probs.topk(min(_LIKELY, size), dim=-1)
    if size > _LIKELY and bool((likely.sum(dim=-1) < top_p).any()):
        likely, order = probs.sort(dim=-1, descending=True)
    kept = likely.cumsum(dim=-1) - likely < top_p  # mass before this token has not reached top-p yet
    inside = log_probs.gather(1, order).masked_fill(~kept, float("-inf"))
    return torch.full_like(log_probs, float("-inf")).scatter(1, order, inside)
