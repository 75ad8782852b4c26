"""Large linear layers in float8 while completions are sampled: half the bytes and twice the rate of bfloat16 on a GPU.

Weights (e4m3, one scale per output) and inputs (one scale per row) are rounded; sums are not. The sampler is then
another policy than the one that is trained, by a gap that is logged and that `objective.correction` takes into account.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from grpo_toolbox.models.linear import merged_layers, replaced_forwards

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = 1e-12
"""Of a scale: a row of zeros stays one."""
_ALIGNED = 16
"""Both sides of a weight must be multiples of it."""
_WORTH_IT = 2**16


def refusal(device: torch.device) -> str | None:
    """Say why `device` has no float8 products; None where it has."""
    if device.type == "cpu":  # an emulation, slower than float32: good for trying it out
        return None
    if device.type != "cuda":
        return f"{device.type} has none"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has none: they came with compute capability 8.9"
    return None


@contextmanager
def float8_linear(model: Any) -> Iterator[None]:
    """Run the large linear layers of `model`, the output head excepted, on float8 copies made of them now.

    For inference with weights that stay as they are; adapters of plain LoRA are merged into the copies, and layers
    under other adapters run as they are.
    """
    head = model.get_output_embeddings()

    def quantize(module: nn.Module, weight: Tensor, bias: Tensor | None) -> _Float8Forward | None:
        rows, columns = weight.shape
        fits = weight.numel() >= _WORTH_IT and rows % _ALIGNED == columns % _ALIGNED == 0
        return _Float8Forward(weight, bias) if fits and module is not head else None

    with replaced_forwards(model, merged_layers(quantize)):
        yield


class _Float8Forward:
    """What a linear layer does in place of its own `forward`: y = s·t∘(round(x/s)·round(W/t)ᵀ) + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scale = rounded(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        rows, scale = rounded(x.flatten(0, -2))
        product = scaled_mm(
            rows,
            self._weight.T,
            scale,
            ScalingType.RowWise,
            self._scale.T,
            ScalingType.RowWise,
            output_dtype=torch.bfloat16,  # the only one that row-wise scales come with on a GPU
        )
        output = product.to(dtype).unflatten(0, x.shape[:-1])
        return output if self._bias is None else output + self._bias.to(dtype)


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 numbers (N, K) and float32 scales (N, 1) whose product is nearly `values` (N, K)."""
    exact = values.detach().float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST)
    return (exact / scale).to(torch.float8_e4m3fn), scale
