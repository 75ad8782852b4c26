"""The in-process engine: the policy's own weights, each prompt prefilled once per group, finished rows leave the batch.

Keys and values live in buffers of fixed size that the engine owns (no growing concatenations); the model runs as the
plain Hugging Face module with its attention handed to the layouts below. Models that do not take a layout are served
by `engines/hf.py` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.engines.sampling import row_keys, sample, uniforms
from grpo_toolbox.models.attention import grouped_attention, layout_attention
from grpo_toolbox.models.forward import autocast, decoder, eval_mode, plain_model
from grpo_toolbox.types import Prompt, Rollout, Sampling


class KeyValues:
    """Keys and values of N rows, per layer (N, kv, places, D); places: prompt, padded on the left, then completion."""

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible
        """(N, places) True where a place holds a token of its row."""
        self.layers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By layer and call: a layer of differential attention attends twice, with other values."""
        self.used = 0
        self._calls: Counter[int] = Counter()

    @property
    def span(self) -> int:
        """Tokens of the longest prompt and the longest completion together."""
        return self.visible.shape[1]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.visible = self.visible[rows]
        self.layers = {place: (keys[rows], values[rows]) for place, (keys, values) in self.layers.items()}

    def advance(self, new: int) -> None:
        """A forward pass is over, and `new` more places are in use."""
        self.used += new
        self._calls.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new tokens' keys and values behind the old ones, and attend to all that a row can see."""
        new, place = key.shape[2], (layer, self._calls[layer])
        self._calls[layer] += 1
        if place not in self.layers:
            self.layers[place] = (self._buffer(key), self._buffer(value))
        keys, values = self.layers[place]
        end = self.used + new
        keys[:, :, self.used : end] = key
        values[:, :, self.used : end] = value
        mask = self.visible[:, None, None, :end]
        if new > 1:
            causal = torch.ones(new, end, dtype=torch.bool, device=key.device).tril(diagonal=self.used)
            itself = torch.eye(new, end, dtype=torch.bool, device=key.device)  # left padding sees itself: no NaN
            mask = (mask & causal) | itself
        attended = grouped_attention(query, keys[:, :, :end], values[:, :, :end], mask, scaling)
        return attended.transpose(1, 2)

    def _buffer(self, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        return states.new_zeros(rows, heads, self.span, size)


class LocalEngine:
    """Samples with the policy itself; `decode(ids, finish_reason)` turns a completion into text.

    `weights_version` is how many syncs a resumed run has seen before.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Callable[[Sequence[int], str], str],
        stop_ids: Sequence[int],
        max_rows: int = 256,
        autocast_dtype: torch.dtype | None = None,
        weights_version: int = 0,
    ) -> None:
        self._model = model
        self._decode = decode
        self._stop_ids = tuple(stop_ids)
        self._max_rows = max_rows
        self._autocast_dtype = autocast_dtype
        self._version = weights_version

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major.

        At most `max_rows` rows are decoded at a time, or one group where that is larger: it shares its prompt.
        """
        keys = row_keys(sampling.seed, [prompt.id for prompt in prompts], group_size)
        at_once = max(self._max_rows // group_size, 1)
        rollouts: list[Rollout] = []
        device = next(self._model.parameters()).device
        # in the precision of the training forward, or the two would disagree about log-probs
        with eval_mode(self._model), torch.inference_mode(), autocast(device, self._autocast_dtype):
            for start in range(0, len(prompts), at_once):
                part = prompts[start : start + at_once]
                rows = slice(start * group_size, (start + len(part)) * group_size)
                drawn = _decode_groups(plain_model(self._model), part, group_size, sampling, keys[rows], self._stop_ids)
                rollouts += [
                    self._rollout(part[row // group_size], ids, logps) for row, (ids, logps) in enumerate(drawn)
                ]
        return rollouts

    def sync(self) -> int:
        """The weights are shared, so nothing has to move; count the version."""
        self._version += 1
        return self._version

    def close(self) -> None:
        """Nothing to release."""

    def _rollout(self, prompt: Prompt, ids: list[int], logps: list[float]) -> Rollout:
        finish = "stop" if ids and ids[-1] in self._stop_ids else "length"
        text = self._decode(ids, finish)
        return Rollout(prompt, tuple(ids), tuple(logps), finish, text, self._version)  # type: ignore[arg-type]


def _decode_groups(
    model: nn.Module,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    keys: object,
    stop_ids: tuple[int, ...],
) -> list[tuple[list[int], list[float]]]:
    """Return (ids, log-probs) for each of P·G rows: prefill P prompts once, then decode all rows together."""
    device = next(model.parameters()).device
    rows = torch.arange(len(prompts) * group_size, device=device)  # which row stands where in the shrinking batch
    stops = torch.tensor(stop_ids, device=device)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    cache, logits = _prefill(model, prompts, sampling.max_new_tokens, device)
    owner = rows // group_size
    cache.select(owner)
    logits, positions = logits[owner], lengths[owner]
    tokens = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(len(rows), sampling.max_new_tokens, device=device)
    drawn = torch.full((len(rows),), sampling.max_new_tokens, device=device)
    alive = torch.ones(len(rows), dtype=torch.bool, device=device)
    with layout_attention(model):
        for place in range(sampling.max_new_tokens):
            banned = stop_ids if place < sampling.min_new_tokens else ()
            uniform = uniforms(keys[rows.cpu().numpy()], place)  # type: ignore[index]
            token, logp = sample(logits, uniform, sampling, banned)
            tokens[rows, place], logps[rows, place] = token, logp
            ended = alive & torch.isin(token, stops)
            drawn[rows[ended]] = place + 1
            alive &= ~ended
            if place + 1 == sampling.max_new_tokens or not alive.any():
                break
            if alive.sum() <= 0.75 * len(alive):  # moving the cache costs about as much as a few wasted rows
                stay = alive.nonzero().squeeze(1)
                cache.select(stay)
                rows, positions, token, alive = rows[stay], positions[stay], token[stay], alive[stay]
            logits = _forward(model, token.unsqueeze(1), (positions + place).unsqueeze(1), cache)
    return [
        (ids[:count], values[:count])
        for ids, values, count in zip(tokens.tolist(), logps.tolist(), drawn.tolist(), strict=True)
    ]


def _prefill(
    model: nn.Module, prompts: Sequence[Prompt], max_new_tokens: int, device: torch.device
) -> tuple[KeyValues, Tensor]:
    """Run the prompts, padded on the left, and return their cache and the logits (P, V) of their first new token."""
    width = max(len(prompt.ids) for prompt in prompts)
    pads = torch.tensor([width - len(prompt.ids) for prompt in prompts], device=device)
    ids = torch.tensor([[*([0] * (width - len(prompt.ids))), *prompt.ids] for prompt in prompts], device=device)
    places = torch.arange(width + max_new_tokens, device=device)
    cache = KeyValues(visible=places >= pads.unsqueeze(1))
    positions = (places[:width] - pads.unsqueeze(1)).clamp(min=0)
    with layout_attention(model):
        logits = _forward(model, ids, positions, cache)
    return cache, logits


def _forward(model: Any, ids: Tensor, positions: Tensor, cache: KeyValues) -> Tensor:
    """Run new tokens (N, S) behind the cache and return the logits (N, V) of the last."""
    output = decoder(model)(input_ids=ids, position_ids=positions, use_cache=False, layout=cache)
    cache.advance(ids.shape[1])
    logits: Tensor = model.get_output_embeddings()(output.last_hidden_state[:, -1])
    return logits
