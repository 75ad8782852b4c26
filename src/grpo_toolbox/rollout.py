"""Prompts to rollouts: ask the engine, and check that it kept its contract."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from grpo_toolbox.engines import Engine
from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.types import Prompt, Rollout, Sampling

OnGroup = Callable[[int, Sequence[Rollout]], None]


def rollout(
    engine: Engine, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, on_group: OnGroup | None = None
) -> list[Rollout]:
    """Return P·G rollouts in prompt-major order, each with one finite log-prob per token that the model wrote.

    `on_group(group, rollouts)` is given each group as soon as its last member has ended, while others are still being
    sampled; every group exactly once, in whatever order they end.
    """
    if on_group is None:
        rollouts = engine.generate(prompts, group_size, sampling)
        _check(rollouts, prompts, group_size)
        return rollouts
    unfinished: dict[int, dict[int, Rollout]] = {group: {} for group in range(len(prompts))}
    reported: dict[int, Rollout] = {}

    def finished(row: int, one: Rollout) -> None:
        group = row // group_size
        members = unfinished[group]
        members[row] = one
        reported[row] = one
        if len(members) == group_size:
            whole = [member for _, member in sorted(unfinished.pop(group).items())]
            _check(whole, prompts[group : group + 1], group_size)
            on_group(group, whole)

    rollouts = engine.generate(prompts, group_size, sampling, finished)
    _check_number(rollouts, prompts, group_size)
    if unfinished:
        raise ToolboxError(f"the engine returned, but did not report the end of group {min(unfinished)}.")
    if any(one is not reported[row] for row, one in enumerate(rollouts)):
        raise ToolboxError("the engine returned other rollouts than the ones that it reported.")
    return rollouts


def _check_number(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], group_size: int) -> None:
    if len(rollouts) != len(prompts) * group_size:
        raise ToolboxError(
            f"the engine returned {len(rollouts)} rollouts for {len(prompts)} prompts × {group_size} completions."
        )


def _check(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], group_size: int) -> None:
    _check_number(rollouts, prompts, group_size)
    for row, one in enumerate(rollouts):
        count, marked = len(one.ids), len(one.written) or len(one.ids)
        if one.prompt is not prompts[row // group_size] or not count == len(one.logps) == marked:
            raise ToolboxError(
                f"the engine's rollout {row} is out of order, or has ids, log-probs and marks of who wrote them of "
                "unequal number."
            )
        logps = itertools.compress(one.logps, one.written) if one.written else one.logps
        if not math.isfinite(sum(logps)):
            raise ToolboxError(
                f"the engine reported a log-prob that is not finite for prompt {one.prompt.id}: its weights or its "
                "logits are broken; nothing of this step is trained."
            )
