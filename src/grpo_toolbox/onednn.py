"""Products of float32 matrices on a processor through oneDNN, which is faster there than what torch calls by itself.

torch has these operators for its own compiler; they are used only where a first product has come out right.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

log = logging.getLogger(__name__)
_WORTH_IT = 2**16
"""Weights of fewer numbers are multiplied by torch itself: calling through Python costs more than is gained."""


@cache
def works() -> bool:
    """Whether torch's oneDNN operators are there and multiply as torch does."""
    x, weight, bias = (torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(0, 2, 30).reshape(5, 6), torch.ones(5))
    try:
        gaps = [
            (multiply(x, form, bias) - linear(x, weight, bias)).abs().max() for form in (weight, blocked(weight, 4))
        ]
    except (AttributeError, RuntimeError) as error:
        log.info("torch's oneDNN products are not available here: %s", str(error).split("\n")[0])
        return False
    return float(max(gaps)) < 1e-5


def suits(weight: Tensor) -> bool:
    """Whether products with this weight gain by it: large, float32, on the processor."""
    large = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= _WORTH_IT
    return large and works()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b (…, M) for `x` (…, K) and `weight` (M, K), which may be a transposed view or `blocked`."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def blocked(weight: Tensor, rows: int) -> Tensor:
    """Return a copy of `weight` in the form that oneDNN likes for about `rows` rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return copy
