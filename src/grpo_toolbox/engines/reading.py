"""From what an engine drew to the rollout that travels on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from grpo_toolbox.types import Convention, LogpKind, Prompt, Rollout, Sampling

Decode = Callable[[Sequence[int], str], str]
"""`decode(ids, finish_reason)` turns a completion into text."""


class Reader:
    """Makes the rollouts of one `generate` call; equal completions are decoded once."""

    def __init__(self, decode: Decode, stop_ids: Sequence[int], sampling: Sampling, kind: LogpKind) -> None:
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)
        self._convention = Convention.of(kind, sampling)
        self._texts: dict[tuple[int, ...], str] = {}

    def rollout(
        self, prompt: Prompt, drawn: Sequence[int], logps: Sequence[float], versions: Sequence[tuple[int, int]]
    ) -> Rollout:
        """Return the rollout of a completion that ended: by a stop token where that is its last, else by its length.

        `versions` are stretches of (weights version, number of tokens), at least one.
        """
        ids = tuple(drawn)
        finish: Literal["stop", "length"] = "stop" if ids and ids[-1] in self._stop_ids else "length"
        if ids not in self._texts:
            self._texts[ids] = self._decode(ids, finish)
        return Rollout(
            prompt,
            ids,
            tuple(logps),
            finish,
            self._texts[ids],
            weights_version=versions[-1][0],
            versions=tuple(versions) if len(versions) > 1 else (),
            convention=self._convention,
        )
