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

from grpo_toolbox.models.attention import packed_layout

log = logging.getLogger(__name__)
_TOLERANCE = 2e-3
"""Largest difference from the gathered layout that is rounding: matrix units may multiply float32 as TF32."""


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
        output = self.kernel(query, key, value, block_mask=self.block_mask, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2)


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
def flex_works(device: torch.device) -> bool:
    """Whether the kernel runs on `device` and gives output and gradients of the gathered layout; says why not."""
    if device.type != "cuda":
        return False
    lengths = ([40, 7], [30, 1, 64, 12], [0, 0, 1, 1])
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 154, 64, generator=generator) for heads in (6, 2, 2)]

    def gradients(layout: Any) -> list[Tensor]:
        leaves = [one.to(device).requires_grad_() for one in states]
        output = layout.attend(0, *leaves, 0.125)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    try:
        pairs = zip(gradients(flex_layout(*lengths, device)), gradients(packed_layout(*lengths, device)), strict=True)
        gap = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    except Exception as error:  # the compiler and its kernels may fail in any way; the gathered layout needs neither
        log.warning(
            "flex attention does not run here (%s): packed rows are gathered instead.", str(error).split("\n")[0]
        )
        return False
    if gap > _TOLERANCE:
        log.warning("flex attention differs by %.2g here: packed rows are gathered instead.", gap)
    return gap <= _TOLERANCE
