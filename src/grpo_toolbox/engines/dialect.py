"""What differs between completion servers: how a completion is asked for, and how the answer is read; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import Control
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import Sampling


class Incomplete(EngineError):
    """A completion of which the server told a part: another one has to be drawn."""


@dataclass(frozen=True)
class Ask:
    """One completion, or the rest of one."""

    model: str
    ids: Sequence[int]
    """The prompt's, and behind them those drawn already."""
    max_new_tokens: int
    min_new_tokens: int
    sampling: Sampling
    """Whose limits on length and whose seed are those of the whole call."""
    seed: int
    """Below 2^31."""
    stop_ids: Sequence[int]
    version: int = 0
    """Of the weights that are to draw it; keys and values of others are not for it."""


@dataclass(frozen=True)
class Answer:
    """What a server drew."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    """abort: the server was told to stop, or is going down; the rest is asked for again."""
    stretches: tuple[tuple[str, int], ...] = ()
    """(weights version that the server states, number of tokens), in order; empty where it does not say."""


@dataclass(frozen=True)
class Served:
    """What a server says it runs."""

    name: str
    """What completions ask for."""
    about: str
    """Where it has the model from."""
    positions: int | None = None
    """Tokens that a prompt and its completion may have."""


class Dialect(Protocol):
    """One kind of server. Whatever has another form than expected raises LookupError, TypeError or ValueError."""

    name: str
    late: int
    """Tokens behind a change of weights that a server's answer may count as the newer's, and the older ones drew."""

    def joins(self, ask: Ask, former: Ask) -> bool:
        """Return whether a completion may be asked for together with the one before it, of the same group."""
        ...

    def request(self, asks: Sequence[Ask]) -> tuple[str, dict[str, Any]]:
        """Return path and JSON body for completions that join each other."""
        ...

    def read(self, answer: Any) -> list[Answer]:
        """Return what was drawn, in the order of the request. Raises EngineError where ids or log-probs are missing."""
        ...

    def served(self, server: Control) -> Served:
        """Return what the server says of its model."""
        ...

    def untouched(self, server: Control) -> bool:
        """Return whether the server still has the weights it was started with."""
        ...

    def tokenize(self, server: Control, model: str, text: str) -> list[int] | None:
        """Return the token ids of a text by the server's tokenizer, nothing added; None where it cannot be asked."""
        ...


def as_stretches(spans: Sequence[Mapping[str, Any]] | None, tokens: int) -> tuple[tuple[str, int], ...]:
    """Return stretches of spans `{"version": …, "start": …, "end": …}`, in which vLLM and SGLang say who drew what.

    Raises ValueError for spans that are not those of so many tokens.
    """
    found, end = [], 0
    for span in spans or ():
        start, end = end, int(span["end"])
        if int(span["start"]) != start or end < start:
            raise ValueError(f"weights versions {spans}")
        found.append((str(span["version"]), end - start))
    if spans and end != tokens:
        raise ValueError(f"weights versions of {end} of {tokens} tokens")
    return tuple(found)


def only_for_evaluation(missing: str) -> Refused:
    """Build the error for a server whose completions cannot be trained on."""
    return Refused(
        f"the server does not report {missing} of its completions: it may serve evaluation and judging, and no "
        "training. vLLM, SGLang and llama.cpp's server report both."
    )


FINISHES: Mapping[str | None, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    None: "abort",
}
"""By the reason servers give; None is an answer that was cut off."""


def as_logps(values: Sequence[float | None]) -> tuple[float, ...]:
    """Return log-probs as floats; null is how some servers write one that is not a number."""
    return tuple(math.nan if one is None else float(one) for one in values)
