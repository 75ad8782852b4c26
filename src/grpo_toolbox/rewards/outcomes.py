"""What a reward function said about each completion: a score, not applicable, an error, or no answer in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How one completion came out."""

    SCORE = "scored"
    NOT_APPLICABLE = "not_applicable"
    """The function returned None: the row counts neither for nor against the completion."""
    ERROR = "errors"
    """The function raised, or returned an exception in the row's place."""
    TIMEOUT = "timeouts"
    """It did not answer in time: the failure is a TimeoutError."""

    @classmethod
    def of(cls, failure: Exception) -> Kind:
        """Return the kind of a failure."""
        return cls.TIMEOUT if isinstance(failure, TimeoutError) else cls.ERROR


@dataclass(frozen=True)
class Outcome:
    """What one component said about some rows."""

    scores: Sequence[float | None]
    """None where the function does not apply, or failed."""
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """By row: what the function raised, a TimeoutError where it did not answer in time."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Every value logged under a name."""
    seconds: float = 0.0
    """Of all calls, added up."""
    slowest: float = 0.0
    """Seconds of the slowest call."""

    @property
    def kinds(self) -> list[Kind]:
        """How each row came out."""
        return [self._kind(row, score) for row, score in enumerate(self.scores)]

    def _kind(self, row: int, score: float | None) -> Kind:
        if row in self.failures:
            return Kind.of(self.failures[row])
        return Kind.NOT_APPLICABLE if score is None else Kind.SCORE


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Put the outcomes of calls on neighbouring rows together; an extra column has None where a part lacks it."""
    sizes = [len(part.scores) for part in parts]
    starts = [sum(sizes[:index]) for index in range(len(parts))]
    names = dict.fromkeys(name for part in parts for name in part.extras)
    metrics: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.metrics.items():
            metrics.setdefault(name, []).extend(values)
    return Outcome(
        scores=[score for part in parts for score in part.scores],
        failures={
            start + row: error
            for start, part in zip(starts, parts, strict=True)
            for row, error in part.failures.items()
        },
        extras={
            name: [
                value for part, size in zip(parts, sizes, strict=True) for value in part.extras.get(name, [None] * size)
            ]
            for name in names
        },
        metrics=metrics,
        seconds=sum(part.seconds for part in parts),
        slowest=max((part.slowest for part in parts), default=0.0),
    )
