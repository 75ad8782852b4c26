"""Prompts to rollouts: ask the engine, and check that it kept its contract."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_toolbox.engines import Engine
from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.types import Prompt, Rollout, Sampling


def rollout(engine: Engine, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Rollout]:
    """Return P·G rollouts in prompt-major order, each with one finite log-prob per token."""
    rollouts = engine.generate(prompts, group_size, sampling)
    if len(rollouts) != len(prompts) * group_size:
        raise ToolboxError(
            f"the engine returned {len(rollouts)} rollouts for {len(prompts)} prompts × {group_size} completions."
        )
    for row, one in enumerate(rollouts):
        if one.prompt is not prompts[row // group_size] or len(one.ids) != len(one.logps):
            raise ToolboxError(
                f"the engine's rollout {row} is out of order, or has ids and log-probs of unequal number."
            )
        if not all(map(math.isfinite, one.logps)):
            raise ToolboxError(
                f"the engine reported a log-prob that is not finite for prompt {one.prompt.id}: its weights or its "
                "logits are broken; nothing of this step is trained."
            )
    return rollouts
