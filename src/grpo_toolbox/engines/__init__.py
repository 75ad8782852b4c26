"""Rollout engines: prompts in, completions out, as token ids with the log-probs they were sampled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_toolbox.types import LogpKind, Prompt, Rollout, Sampling

OnFinished = Callable[[int, Rollout], None]


@dataclass(frozen=True)
class Traits:
    """What an engine says of itself."""

    shares_weights: bool
    """It samples with the policy's own tensors: a sync moves nothing, and the policy must not be trained meanwhile."""
    exact: bool
    """It computes what the trainer does, so that its log-probs may stand for π_old."""
    logps: LogpKind
    """Of what distribution its log-probs are, where `Sampling.drawn_logps` does not ask for more."""
    drawn_logps: bool
    """Whether it can report log-probs of what is drawn from, cuts included."""


class Engine(Protocol):
    """Whatever samples completions. Token ids in, token ids out: no engine tokenises a prompt or a completion again."""

    @property
    def traits(self) -> Traits:
        """What the rest of the run needs to know of this engine."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major; each keeps its stop token and its log-probs.

        `on_finished(row, rollout)` hears of each as soon as it ends, while others go on, so that it can be scored; it
        is called in the thread that called `generate`. Raises Cancelled after `cancel`, EngineError for an outage that
        outlasts the engine's patience.
        """
        ...

    def cancel(self) -> None:
        """Make the `generate` that is under way, in this or another thread, raise Cancelled; the engine stays usable.

        Nothing happens where none is under way.
        """
        ...

    def sync(self, version: int | None = None) -> int:
        """Take over the policy's present weights as `version`, or as one more than before; return the new version."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


class InFlight(Protocol):
    """What an engine has beside that can go on with newer weights in the middle of its completions."""

    def in_flight(self, newer: Callable[[], int | None], *, recompute: bool) -> None:
        """From now on ask `newer` between two tokens: it changes the weights and returns their version, or None.

        With `recompute` the keys and values of what was read and drawn before are computed anew; else they are kept.
        """
        ...
