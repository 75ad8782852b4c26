"""The output head in float32 under mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_toolbox.errors import ConfigError


class Float32Head(nn.Linear):
    """A linear head that multiplies in float32 (or better), whatever the weights, its input and autocast are in.

    ScaleRL (Khatri et al., 2025; after MiniMax-M1): rounding logits to half precision moves log-probs by more than a
    small learning rate does, and not by the same in sampler and trainer.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) in float32 for `hidden` (…, H)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(self.weight.device, dtype), self.weight.to(dtype), bias)


def use_float32_head(model: Any) -> None:
    """Put a `Float32Head` on the same weight, tied or not, in the place of the model's head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            "model.fp32_head=true needs an output head that is one linear layer and carries no adapter. "
            "Leave the head out of model.lora.target_modules, or set model.fp32_head=false."
        )
    exact = Float32Head(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    exact.weight, exact.bias = head.weight, head.bias
    model.set_output_embeddings(exact.train(head.training))
