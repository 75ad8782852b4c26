"""Whether an engine has the trainer's weights: canary rows of token ids that both put log-probs on.

An engine is asked in two ways. It *draws* a few tokens behind each row, as in a rollout, with whatever it has cached.
And it *scores*, where it can: the likeliest next tokens behind each row, computed without a cache. The trainer's
forward pass is the measure of both.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from grpo_toolbox.models.packing import FLOAT32_ROUNDING

log = logging.getLogger(__name__)

Row = tuple[int, ...]
Scores = Mapping[int, float]
"""Log-probs at temperature 1 of some tokens that may come next."""

DRAWN = 4
"""Tokens drawn behind each canary."""
SCORED = 16
"""Tokens scored behind each canary; servers answer at most 20 unless told otherwise."""
MARGIN = 4.0
"""How many times the noise measured with equal weights a gap may be: noise grows as a policy sharpens."""
FEW = 3.0
"""How many standard errors the mean of n tokens may lie higher, where one token's spread is about as large as its mean:
a completion that ends at once leaves one."""
FLOOR_MEAN, FLOOR_MAX = FLOAT32_ROUNDING / 10, FLOAT32_ROUNDING
"""No gap below these counts, in nats: rounding grows with the logits, and noise may be measured as 0 at first."""
MOVED = 1e-5
"""How far, on average, log-probs must have moved for an engine that says exactly what it said before to be suspect."""


@dataclass(frozen=True)
class Reading:
    """What an engine says of the canary rows."""

    drawn: tuple[tuple[Row, tuple[float, ...]], ...]
    """For each row the tokens drawn behind it at temperature 1, and the log-probs reported."""
    scored: tuple[Scores, ...] | None = None
    """For each row what the engine says of the likeliest next tokens; None where it cannot do so without its cache."""
    seen: tuple[Row, ...] | None = None
    """The rows as the engine says it read them; None where it does not say."""


class Target(Protocol):
    """Something that is probed: an engine in this process, or one of several servers."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    def read(self, rows: Sequence[Row]) -> Reading | None:
        """Draw DRAWN tokens behind each row, and score what may come next; None where it went away meanwhile."""
        ...


@dataclass(frozen=True)
class Gap:
    """|Δ log-prob| over some tokens, in nats."""

    mean: float
    max: float
    count: int = 0
    """Of how many tokens; 0 is of so many that their number does not matter."""

    @classmethod
    def of(cls, differences: Sequence[Tensor]) -> Gap:
        """Sum up differences of log-probs."""
        distance = torch.cat([one.double().abs() for one in differences])
        if not torch.isfinite(distance).all():
            return cls(float("inf"), float("inf"))
        return cls(float(distance.mean()), float(distance.max()), len(distance)) if len(distance) else cls(0.0, 0.0)

    @classmethod
    def of_scores(cls, scored: Sequence[Scores], expected: Tensor) -> Gap:
        """Compare scores behind each row with all log-probs (R, V) there."""
        pairs = zip(scored, expected, strict=True)
        return cls.of([torch.tensor(list(one.values())) - row[list(one)] for one, row in pairs])

    def within(self, other: Gap) -> bool:
        """Whether neither mean nor maximum is above what the other allows: of few tokens the mean varies more."""
        few = FEW / self.count**0.5 if self.count else 0.0
        return self.mean <= (1 + few) * other.mean and self.max <= other.max

    def limit(self) -> Gap:
        """Return what is allowed where this is the noise."""
        return Gap(max(MARGIN * self.mean, FLOOR_MEAN), max(MARGIN * self.max, FLOOR_MAX))

    def __str__(self) -> str:
        return f"mean {self.mean:.2g}, max {self.max:.2g}"


Cause = Literal["delivery", "adapter", "delivery or adapter", "cache", "precision", "tokens", "unknown"]
CAUSES: dict[Cause, str] = {
    "delivery": "it has the weights from before the update: they were not delivered",
    "adapter": "it has the base model's weights: the adapter is not active",
    "delivery or adapter": "it has the weights from before the update, which are those of the base model: they were "
    "not delivered, or the adapter is not active",
    "cache": "it has the new weights and answers with keys and values of the former ones: its prefix cache is stale",
    "precision": "it has these weights in a lower precision than the trainer",
    "tokens": "it reads other tokens than it is sent: a template or a start token is put around them",
    "unknown": "its weights are neither the new ones nor the former: part of them came, under other names, or from "
    "another model",
}


@dataclass(frozen=True)
class Finding:
    """One target after one sync."""

    target: str
    gap: Gap
    """Of scored tokens where the engine scores, else of drawn ones."""
    drawn: Gap
    limit: Gap
    cause: Cause | None
    """None: the gaps are within the limit."""

    def __str__(self) -> str:
        if self.cause is None:
            return f"{self.target} has the trainer's weights (|Δ log-prob| {self.gap})"
        return (
            f"{self.target}: {CAUSES[self.cause]}. |Δ log-prob| against the trainer: scored {self.gap}; drawn "
            f"{self.drawn}; allowed {self.limit}."
        )


@dataclass(frozen=True)
class Expected:
    """The trainer's log-probs (R, V) behind each row, and what they would be in states that an engine may be in."""

    now: Tensor
    former: Tensor | None = None
    """With the weights before the update."""
    base: Tensor | None = None
    """Without the adapter."""
    half: Tensor | None = None
    """Computed in bfloat16."""

    def half_gap(self) -> Gap:
        """What bfloat16 changes of the likeliest tokens."""
        if self.half is None:
            return Gap(0.0, 0.0)
        likeliest = self.now.topk(min(SCORED, self.now.shape[1])).indices
        return Gap.of([(self.half - self.now).gather(1, likeliest).flatten()])


def judge(target: str, rows: Sequence[Row], reading: Reading, drawn: Gap, expected: Expected, limit: Gap) -> Finding:
    """Compare a reading with what is expected, and name the likely cause of a gap beyond the limit."""
    scored = drawn if reading.scored is None else Gap.of_scores(reading.scored, expected.now)
    finding = Finding(target, scored, drawn, limit, None)
    if scored.within(limit) and drawn.within(limit):
        return finding
    return replace(finding, cause=_cause(rows, reading, finding, expected))


def _cause(rows: Sequence[Row], reading: Reading, finding: Finding, expected: Expected) -> Cause:
    limit = finding.limit
    if reading.seen is not None and list(reading.seen) != list(rows):
        return "tokens"
    if reading.scored is not None:
        if finding.gap.within(limit):
            return "cache"
        is_former, is_base = (
            state is not None and Gap.of_scores(reading.scored, state).within(limit)
            for state in (expected.former, expected.base)
        )
        if is_former or is_base:
            return "delivery or adapter" if is_former and is_base else "delivery" if is_former else "adapter"
    in_half = expected.half_gap().limit()
    return "precision" if finding.gap.within(in_half) else "unknown"


class Trainer(Protocol):
    """Whose log-probs count, at temperature 1."""

    def logps(self, rows: Sequence[Row], first: Sequence[int]) -> list[Tensor]:
        """Return the log-probs of the tokens of each row from its place in `first` on."""
        ...

    def next_logps(self, rows: Sequence[Row]) -> Tensor:
        """Return all log-probs (R, V) behind each row."""
        ...

    def next_base_logps(self, rows: Sequence[Row]) -> Tensor | None:
        """Return them without the adapter; None where there is none."""
        ...

    def next_half_logps(self, rows: Sequence[Row]) -> Tensor:
        """Return them computed in bfloat16."""
        ...


class Probe:
    """Asks every target after a sync; the first time, with equal weights by design, measures its noise."""

    def __init__(self, rows: Sequence[Row], trainer: Trainer, limit: float | None = None) -> None:
        self._rows = list(rows)
        self._trainer = trainer
        self._limit = limit
        self._noise: dict[str, Gap] = {}
        self._former: Tensor | None = None
        self._now: Tensor | None = None
        self._said: dict[str, tuple[Scores, ...] | None] = {}
        self._said_before: dict[str, tuple[Scores, ...] | None] = {}

    def check(self, targets: Sequence[Target], *, moved: bool) -> list[Finding]:
        """Return a finding for each target that answers; `moved` says that the trainer's weights have changed since the
        last call."""
        if moved or self._now is None:
            self._former, self._now = self._now, self._trainer.next_logps(self._rows)
            self._said_before, self._said = self._said, {}
        found = [self._check(target, self._now) for target in targets]
        return [one for one in found if one is not None]

    def _check(self, target: Target, now: Tensor) -> Finding | None:
        reading = target.read(self._rows)
        if reading is None:
            return None
        drawn = self._drawn_gap(reading)
        noise = self._noise.get(target.name)
        expected = Expected(now)
        if noise is None:
            expected = Expected(now, half=self._trainer.next_half_logps(self._rows))
        limit = self._allowed(noise, expected)
        finding = judge(target.name, self._rows, reading, drawn, expected, limit)
        self._said[target.name] = reading.scored
        if finding.cause is not None:
            return judge(target.name, self._rows, reading, drawn, self._everything(now), limit)
        if self._stands_still(target.name, now, noise):
            return replace(finding, cause="delivery")
        if noise is None:
            noise = Gap(max(finding.gap.mean, drawn.mean), max(finding.gap.max, drawn.max))
            self._noise[target.name] = noise
            log.info("%s: |Δ log-prob| with equal weights is %s", target.name, noise)
        return finding

    def _stands_still(self, target: str, now: Tensor, noise: Gap | None) -> bool:
        """Whether a target says to the last digit what it said before, though the trainer has moved past the noise."""
        said = self._said[target]
        if said is None or noise is None or self._former is None or said != self._said_before.get(target):
            return False
        moved = Gap.of([now[row, list(one)] - self._former[row, list(one)] for row, one in enumerate(said)])
        return moved.mean > max(2 * noise.mean, MOVED)

    def _allowed(self, noise: Gap | None, expected: Expected) -> Gap:
        """Before noise is known, what a lower precision explains is allowed; afterwards a few times the noise."""
        if self._limit is not None:
            return Gap(self._limit, self._limit)
        if noise is None:
            return expected.half_gap().limit()
        return noise.limit()

    def _drawn_gap(self, reading: Reading) -> Gap:
        rows = [(*row, *ids) for row, (ids, _) in zip(self._rows, reading.drawn, strict=True)]
        found = self._trainer.logps(rows, [len(row) for row in self._rows])
        pairs = zip(reading.drawn, found, strict=True)
        return Gap.of([torch.tensor(logps) - expected for (_, logps), expected in pairs])

    def _everything(self, now: Tensor) -> Expected:
        base = self._trainer.next_base_logps(self._rows)
        return Expected(now, self._former, base, self._trainer.next_half_logps(self._rows))


def canary_rows(prompts: Sequence[Row], count: int, length: int) -> list[Row]:
    """Return `count` rows of `length` tokens: prompts one behind the other, each row from another one on.

    Real text of the task, long enough that a server keeps blocks of it.
    """
    rows = []
    for start in range(count):
        ids: list[int] = []
        for place in itertools.count(start):
            ids += prompts[place % len(prompts)]
            if len(ids) >= length:
                break
        rows.append(tuple(ids[:length]))
    return rows
