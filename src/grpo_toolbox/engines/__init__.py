"""Rollout engines: prompts in, completions out, as token ids with the log-probs they were sampled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_toolbox.types import Prompt, Rollout, Sampling


class Engine(Protocol):
    """Whatever samples completions. Token ids in, token ids out: no engine tokenises a prompt or a completion again."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major; each keeps its stop token and its log-probs.

        `on_finished(row, rollout)` hears of each as soon as it ends, while others go on, so that it can be scored.
        """
        ...

    def sync(self, version: int | None = None) -> int:
        """Take over the policy's present weights as `version`, or as one more than before; return the new version."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...
