"""The packed layout as one block-sparse attention kernel, for CUDA: nothing is gathered, nothing is padded.

Last run on a GPU: never. The kernel is therefore used only after `flex_works` has compared it, gradients included, with
the gathered layout on the device at hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from grpo_toolbox.models.attention import Layout, packed_layout

log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest difference from the gathered layout that is rounding: matrix units may multiply float32 as TF32."""
_PROBE = ([40, 7], [30, 1, 64, 12], [0, 0, 1, 1])
"""Lengths of prompts and of completions, and whose completions they are."""


@dataclass(frozen=True)
class FlexLayout:
    """Prompts and then completions, one behind the other; a completion sees its own prompt and itself."""

    block_mask: BlockMask
    span: int
    """Tokens of the longest prompt and the longest completion together."""
    kernel: Callable[..., Any]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return (1, N, heads, D) for the packed sequence of `query` (1, heads, N, D), `key`, `value` (1, kv, N, D)."""
        grouped = query.shape[1] != key.shape[1]
        states = _in_one_precision(query, key, value)
        output = self.kernel(*states, block_mask=self.block_mask, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2)


def _in_one_precision(*states: Tensor) -> list[Tensor]:
    """Under autocast rotary embeddings leave queries and keys in float32 beside values in half precision."""
    kind = states[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states[0].dtype
    return [one.to(dtype) for one in states]


def flex_layout(
    prompt_lengths: list[int],
    completion_lengths: list[int],
    group: list[int],
    device: torch.device,
    compiled: bool = True,
) -> FlexLayout:
    """Lay out U prompts and B completions as `packed_layout` does, as a mask over blocks of the sequence."""
    count = len(prompt_lengths)
    lengths = torch.tensor([*prompt_lengths, *completion_lengths], device=device)
    run = torch.arange(len(lengths), device=device).repeat_interleave(lengths)  # (N,) which run a token belongs to
    prompt_of_run = torch.tensor([*range(count), *group], device=device)
    prompt = prompt_of_run[run]  # (N,) which prompt it may look at, besides its own run

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((run[k] == run[q]) | (run[k] == prompt[q]))

    total = len(run)
    mask = create_block_mask(sees, None, None, total, total, device=str(device), _compile=compiled)
    span = max(prompt_lengths, default=0) + max(completion_lengths, default=0)
    return FlexLayout(mask, span, _kernel(compiled))


@cache
def _kernel(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


@cache
def flex_works(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernel runs on `device` and gives output and gradients of the gathered layout; says why not."""
    if device.type != "cuda":
        return False
    try:
        gap = gap_to_gathered(flex_layout(*_PROBE, device), device, dtype)
    except Exception as error:  # the compiler and its kernels may fail in any way; the gathered layout needs neither
        log.warning(
            "flex attention does not run here (%s): packed rows are gathered instead.", str(error).split("\n")[0]
        )
        return False
    if gap > _TOLERANCE[dtype]:
        log.warning("flex attention differs by %.2g here: packed rows are gathered instead.", gap)
    return gap <= _TOLERANCE[dtype]


def gap_to_gathered(layout: Layout, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference, relative to the largest entry, of output and gradients on the probe's lengths.

    Wherever it is asked: the first pass over a model may be one without gradients, or under autocast.
    """
    generator = torch.Generator().manual_seed(0)
    count = sum(_PROBE[0]) + sum(_PROBE[1])

    def gradients(layout: Layout) -> list[Tensor]:
        leaves = [one.to(device, dtype).requires_grad_() for one in states]
        output = layout.attend(0, leaves[0], leaves[1], leaves[2], 0.125)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        states = [torch.randn(1, heads, count, 64, generator=generator) for heads in (6, 2, 2)]
        pairs = zip(gradients(layout), gradients(packed_layout(*_PROBE, device)), strict=True)
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
