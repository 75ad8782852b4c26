"""GRPO Toolbox: online RL of language models, with numbers that are pinned.

Read these seven files in this order and you know the system:
`types.py` → `ops.py` → `advantages.py` → `objectives.py` → `rollout.py` → `batch.py` → `trainer.py`.

In programs: `from grpo_toolbox import GRPOTrainer, GRPOConfig`, with TRL's arguments; see docs/library.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package itself loads nothing
    from grpo_toolbox.api import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer"):
        from grpo_toolbox import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
