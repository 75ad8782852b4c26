"""GRPO Toolbox: online RL of language models, with numbers that are pinned.

Read these seven files in this order and you know the system:
`types.py` → `ops.py` → `advantages.py` → `objectives.py` → `rollout.py` → `batch.py` → `trainer.py`.
"""

__version__ = "0.1.0"
