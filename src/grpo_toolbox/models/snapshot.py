"""Copies of the weights that training moves: for sampling with one version of them while the next is being made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings are checked without loading torch
    from torch import Tensor, nn

Weights = Mapping[str, "Tensor"]
"""What training moves, by the parameter's name."""


def own_copy(policy: nn.Module) -> Any:
    """Return a copy whose trainable parameters are its own; those that never move are the policy's.

    They stay trainable, though nothing trains them: torch multiplies frozen weights by other kernels, which round
    otherwise, also where no gradient is asked for.
    """
    shared = {id(parameter): parameter for parameter in policy.parameters() if not parameter.requires_grad}
    return copy.deepcopy(policy, shared)


def frozen_copy(policy: nn.Module) -> Any:
    """Return such a copy in eval mode, and frozen."""
    return own_copy(policy).requires_grad_(False).eval()


def snapshot(policy: nn.Module) -> Weights:
    """Return a copy of the weights that training moves."""
    return {name: value.detach().clone() for name, value in policy.named_parameters() if value.requires_grad}


def adopt(model: nn.Module, weights: Weights) -> None:
    """Let an `own_copy` hold a snapshot's tensors themselves in place of its own: no copy is made."""
    for name, value in model.named_parameters():
        if name in weights:
            value.data = weights[name].to(value.device)
