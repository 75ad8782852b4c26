"""TRL-shaped trainers: scripts written for TRL's GRPOTrainer and RLOOTrainer run after changing one import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_toolbox.api.configs import GRPOConfig, RLOOConfig

if TYPE_CHECKING:  # a config is made without loading torch
    from grpo_toolbox.api.rloo import RLOOTrainer
    from grpo_toolbox.api.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"]


def __getattr__(name: str) -> Any:
    if name in ("GRPOTrainer", "RLOOTrainer"):
        from grpo_toolbox.api import rloo

        return getattr(rloo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
