"""The records that travel from stage to stage: all frozen, none is ever written into by a later stage.

    prompts -> rollouts -> scores -> advantages -> batch -> update -> sync -> callbacks

Notation, used everywhere: P prompts of a step, G completions per prompt (a group), B = P·G rows in prompt-major
order (row p·G + g is completion g of prompt p), T tokens of a completion, V vocabulary, R reward components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the command line reads this module without loading torch
    from torch import Tensor

Message = dict[str, Any]
"""One chat message: `{"role": "user", "content": "..."}`."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, tokenised."""

    id: int
    """Index of the row in its data set. Groups are keyed by it, never by text: equal prompts stay separate groups."""
    text: str | list[Message]
    """The prompt as the data has it: plain text, or the message list of a conversation. Rewards receive it as is."""
    ids: tuple[int, ...]
    """Token ids exactly as they are sent to the engine (chat template applied, generation prompt included)."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; rewards receive them as keyword arguments."""

    @property
    def conversational(self) -> bool:
        """Whether the prompt is a message list; then rewards receive completions as message lists, too."""
        return not isinstance(self.text, str)


@dataclass(frozen=True)
class Sampling:
    """How an engine draws tokens."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """The stop token cannot be drawn before this many tokens."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    drawn_logps: bool = False
    """Ask for log-probs of what is drawn from, cut by top-k, top-p, min-p and min_new_tokens, not of all tokens."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """What restricts the draw to a part of the vocabulary, as `name=value`."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}
        return tuple(f"{name}={getattr(self, name)}" for name in off if getattr(self, name) != off[name])


LogpKind = Literal["raw", "tempered", "processed"]
"""Of what distribution a sampler's log-probs are: `raw` softmax(logits), `tempered` softmax(logits / temperature),
`processed` the latter after the cuts, scaled up to 1 again: what the token was drawn from."""


@dataclass(frozen=True)
class Convention:
    """What the log-probs of a rollout are log-probs of, and how its tokens were drawn."""

    kind: LogpKind = "tempered"
    temperature: float = 1.0
    """0 is greedy; its log-probs are those at temperature 1."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, kind: LogpKind, sampling: Sampling) -> Convention:
        """The convention of log-probs of this kind under `sampling`."""
        cuts = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.min_new_tokens)
        return cls(kind, sampling.temperature, *cuts)

    @property
    def is_cut(self) -> bool:
        """Whether tokens were drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.min_new_tokens > 0

    @property
    def is_trainers(self) -> bool:
        """Whether they mean what the trainer's do: the whole softmax at the sampling temperature."""
        if self.kind == "raw":
            return self.temperature in (0, 1)
        return self.kind == "tempered" or not self.is_cut


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt.

    Example: ids=(12, 4, 2), logps=(-0.1, -1.2, -0.3), finish_reason="stop", text="12", with 2 the stop token.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    """Exactly the sampled tokens; the stop token is the last one when finish_reason is "stop"."""
    logps: tuple[float, ...]
    """Log-probability of each token under the sampler, in nats; of which distribution, `convention` says. Of a token
    that the model did not write anything, such as NaN, which is never read."""
    finish_reason: Literal["stop", "length"]
    text: str
    """The decoded completion: stop and padding tokens removed, every other special token kept."""
    weights_version: int = 0
    """Of the weights that drew the last token: the step that made them, 0 for those training began with."""
    versions: tuple[tuple[int, int], ...] = ()
    """(weights version, number of tokens) of each stretch, where weights changed on the way; empty: all tokens are of
    `weights_version`."""
    convention: Convention = Convention()
    written: tuple[bool, ...] = ()
    """Which tokens the model wrote; empty is all of them. Others, as of a tool's answer, are read and never trained."""

    @property
    def oldest_version(self) -> int:
        """The version of the oldest weights that drew a token."""
        return min((version for version, _ in self.versions), default=self.weights_version)

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that drew each token."""
        stretches = self.versions or ((self.weights_version, len(self.ids)),)
        return [version for version, count in stretches for _ in range(count)]

    @property
    def written_tokens(self) -> int:
        """How many tokens the model wrote: those that are trained and counted."""
        return sum(self.written) if self.written else len(self.ids)


@dataclass(frozen=True)
class Scores:
    """What the reward said about P·G rollouts. NaN means "not applicable" (the reward returned None)."""

    names: tuple[str, ...]  # R
    weights: tuple[float, ...]  # R
    components: Tensor  # (P, G, R)
    total: Tensor
    """(P, G): weighted sum over the applicable components; NaN where none applies."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Extra columns a reward logged, one value per row (B), None where it had nothing to say."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars a reward logged (`invalid_format_rate`, reward errors, ...)."""
    token_rewards: Tensor | None = None
    """(P, G, T) the part of `total` that is earned at single tokens, weighted; NaN where the model wrote nothing. None
    where no reward pays per token."""


@dataclass(frozen=True)
class Step:
    """One finished optimizer step, as callbacks see it."""

    number: int
    """Counts from 1; 0 is the evaluation before training, which has no rollouts."""
    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout] = ()
    """B rollouts, prompt-major."""
    scores: Scores | None = None
    advantages: Tensor | None = None
    """(P, G), or (P, G, T) where the estimator is per token."""


@dataclass(frozen=True)
class RunInfo:
    """What callbacks need to know about the run before its first step."""

    name: str
    run_dir: Path
    max_steps: int
    first_step: int
    """1 for a new run, n + 1 for a run resumed after step n."""
    config: Mapping[str, Any]
    """The resolved configuration as plain dicts and lists."""
