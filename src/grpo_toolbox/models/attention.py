"""Attention where the completions of a group share one copy of their prompt.

transformers lets a model's attention be replaced by name (`AttentionInterface`). Ours hands query, key and value to
the `layout` that the caller passed into the forward pass, so that one mechanism serves the packed training forward
(`PackedLayout`, here) and the rollout engine's prefill and decoding (`engines/local.py`). The rest of the model —
projections, norms, rotary embeddings — is the untouched Hugging Face module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from grpo_toolbox.models.shelf import Shelf

ATTENTION_NAME = "grpo_toolbox"
_WORTH_RECOMPUTING = 2**17
"""Numbers in the queries of a layer from which on what attention keeps is worth a second run of it."""
_OTHER_MATHS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Options by which some models ask for another attention than softmax(q·kᵀ)·v over everything before."""


class Layout(Protocol):
    """Who attends to whom in one forward pass."""

    @property
    def span(self) -> int:
        """An upper bound on the tokens of a row: nothing looks further back than this."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the output (N, S, heads, D) for `query` (N, heads, S, D), `key` and `value` (N, kv, S, D)."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    other = [name for name in _OTHER_MATHS if options.get(name) is not None]
    if attention_mask is not None:  # transformers makes none for this attention, so the model has one of its own
        other.append("a mask that the model makes")
    if other:
        raise NotImplementedError(f"attention with {', '.join(other)}")
    if sliding_window and layout.span > sliding_window:
        raise NotImplementedError(f"rows of up to {layout.span} tokens and a window of {sliding_window}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(int(module.layer_idx), query, key, value, scale), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _attention)


@contextmanager
def layout_attention(model: Any) -> Iterator[None]:
    """Run `model` with layout attention inside the block; afterwards it is the plain Hugging Face model again."""
    with _attention_named(model, ATTENTION_NAME):
        yield


def same_attention_again(model: Any) -> AbstractContextManager[None]:
    """Return a context in which `model` has the attention that it has in the block around this call."""
    return _attention_named(model, model.config._attn_implementation)


@contextmanager
def _attention_named(model: Any, name: str) -> Iterator[None]:
    former = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = former


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return softmax(q·kᵀ·scaling + mask)·v, causal where `mask` is None; heads of q share those of k and v."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@dataclass(frozen=True)
class PackedLayout:
    """Prompts and completions of several groups in one sequence of N tokens, each prompt once.

    Attention itself runs on small padded views that are gathered from the sequence: U prompts of at most S tokens
    causally, then B completions of at most T tokens against their own prompt and themselves.
    """

    prompt_index: Tensor
    """(U, S) position in the sequence of each prompt token; 0 where a prompt is shorter."""
    completion_index: Tensor
    """(B, T) position of each completion token; 0 where a completion is shorter."""
    group: Tensor
    """(B,) which prompt a completion belongs to."""
    mask: Tensor
    """(B, 1, T, S + T) True where a completion token may look."""
    prompt_source: Tensor
    """(n,) flat places in (U, S) that hold real tokens, in the order of the sequence."""
    completion_source: Tensor
    """(m,) the same in (B, T)."""
    shelf: Shelf | None = field(default=None, kw_only=True)
    """With one backward gathers the views again, each row's copy of its prompt among them, from what is put on it."""

    @property
    def span(self) -> int:
        """Tokens of the longest prompt and the longest completion together."""
        return self.mask.shape[-1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return (1, N, heads, D) for the packed sequence of `query` (1, heads, N, D), `key`, `value` (1, kv, N, D)."""
        if not (self.shelf is not None and torch.is_grad_enabled() and query.numel() >= _WORTH_RECOMPUTING):
            return self._attend(query, key, value, scaling)
        with saved_tensors_hooks(self.shelf.put, lambda put: put):
            output: Tensor = checkpoint(
                self._attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False
            )
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # (N, heads, D)
        prompt_k, prompt_v = gathered(k, self.prompt_index), gathered(v, self.prompt_index)  # (U, kv, S, D)
        prompts = grouped_attention(gathered(q, self.prompt_index), prompt_k, prompt_v, None, scaling)
        parts = [flat(prompts)[self.prompt_source]]
        if self.completion_index.shape[1] > 0:
            keys = torch.cat([prompt_k[self.group], gathered(k, self.completion_index)], dim=2)  # (B, kv, S + T, D)
            values = torch.cat([prompt_v[self.group], gathered(v, self.completion_index)], dim=2)
            rows = grouped_attention(gathered(q, self.completion_index), keys, values, self.mask, scaling)
            parts.append(flat(rows)[self.completion_source])
        return torch.cat(parts).unsqueeze(0)  # as the sequence has them: prompts, then completions


def gathered(states: Tensor, index: Tensor) -> Tensor:
    """(N, heads, D) gathered by (R, S) -> (R, heads, S, D)."""
    return states[index].transpose(1, 2)


def flat(states: Tensor) -> Tensor:
    """(R, heads, S, D) -> (R·S, heads, D)."""
    return states.transpose(1, 2).flatten(0, 1)


def packed_layout(
    prompt_lengths: list[int], completion_lengths: list[int], group: list[int], device: Any
) -> PackedLayout:
    """Lay out U prompts and then B completions, one behind the other, as one sequence without padding."""
    lengths = torch.tensor([*prompt_lengths, *completion_lengths])
    starts = lengths.cumsum(0) - lengths
    count = len(prompt_lengths)
    prompt_index, prompt_real = _places(starts[:count], lengths[:count])
    completion_index, completion_real = _places(starts[count:], lengths[count:])
    owner = torch.tensor(group, dtype=torch.long)
    width = completion_index.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    sees_prompt = prompt_real[owner].unsqueeze(1).expand(-1, width, -1)  # (B, T, S)
    sees_itself = (causal & completion_real.unsqueeze(1)) | torch.eye(
        width, dtype=torch.bool
    )  # padding sees itself: no NaN
    mask = torch.cat([sees_prompt, sees_itself], dim=2).unsqueeze(1)
    sources = [real.flatten().nonzero().squeeze(1) for real in (prompt_real, completion_real)]
    tensors = (part.to(device) for part in (prompt_index, completion_index, owner, mask, *sources))
    return PackedLayout(*tensors)


def _places(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions (R, longest) of R runs of tokens, and which of them are real."""
    steps = torch.arange(int(lengths.max()) if len(lengths) else 0)
    real = steps < lengths.unsqueeze(1)
    return torch.where(real, starts.unsqueeze(1) + steps, 0), real
