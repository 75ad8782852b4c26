"""An engine that hands out given completions, so that two trainers learn from the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_toolbox.engines import Traits
from grpo_toolbox.types import Prompt, Rollout, Sampling


class Replay:
    """Completions by the prompt's text, the first `group_size` of each; one that ends in `end` has stopped."""

    traits = Traits(shares_weights=True, exact=False, logps="tempered", drawn_logps=False)

    def __init__(self, completions: Mapping[str, Sequence[Sequence[int]]], end: int) -> None:
        self._completions, self._end = completions, end

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, on_finished=lambda row, one: None
    ) -> list[Rollout]:
        rollouts = [
            Rollout(prompt, tuple(ids), (-1.0,) * len(ids), "stop" if ids[-1] == self._end else "length", "")
            for prompt in prompts
            for ids in self._completions[str(prompt.text)][:group_size]
        ]
        for row, one in enumerate(rollouts):
            on_finished(row, one)
        return rollouts

    def sync(self, version: int | None = None) -> int:
        return 0

    def close(self) -> None: ...
