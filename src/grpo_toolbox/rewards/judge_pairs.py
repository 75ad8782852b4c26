"""Judging by comparison: each completion against others of its group, or against the reference, in both orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.judge_form import Form
from grpo_toolbox.rewards.judge_panel import Found, Opinion, Panel

_TIE = 0.5


@dataclass(frozen=True)
class Pair:
    """Two texts to compare: that of a row, and that of another row or the reference."""

    row: int
    other: int | None
    """None is the reference."""
    texts: tuple[str, str]

    @property
    def tied(self) -> bool:
        """Whether there is nothing to choose."""
        return self.texts[0].strip() == self.texts[1].strip()


def check_opponents(pairwise: str | None, opponents: int | None) -> None:
    """ConfigError for a number of opponents that cannot be."""
    if opponents is not None and (opponents < 1 or pairwise != "group"):
        raise ConfigError(
            f"reward.opponents={opponents} must be at least 1 and goes with reward.pairwise=group; null is every other"
            " completion of the group."
        )


def pairs_within_groups(groups: Sequence[Any], texts: Sequence[str], opponents: int | None) -> list[Pair]:
    """Every two rows of the same group; with `opponents`, each row with the next so many of its group, in a ring."""
    members: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return [
        Pair(one, other, (texts[one], texts[other]))
        for rows in members.values()
        for one, other in sorted(set(_ring(rows, opponents)))
    ]


def _ring(rows: Sequence[int], opponents: int | None) -> Iterator[tuple[int, int]]:
    reach = len(rows) - 1 if opponents is None else min(opponents, len(rows) - 1)
    for place, row in enumerate(rows):
        for step in range(1, reach + 1):
            other = rows[(place + step) % len(rows)]
            yield min(row, other), max(row, other)


def pairs_with_reference(references: Sequence[str], texts: Sequence[str]) -> list[Pair]:
    """Each row with the reference of its own."""
    return [Pair(row, None, pair) for row, pair in enumerate(zip(texts, references, strict=True))]


async def judge_pairs(panel: Panel, form: Form, rows: Sequence[Mapping[str, Any]], pairs: Sequence[Pair]) -> Found:
    """The share of its comparisons that each completion won, a tie counting half.

    A pair is asked in both orders and its result is the mean of the two, so that a judge who prefers a place adds
    nothing; where one order has no verdict, the pair has none. Equal texts tie unasked. None for a row that was
    compared with nothing, or of whose comparisons none has a verdict.
    """
    questions = [
        form.messages(rows[pair.row], {"first": first, "second": second})
        for pair in pairs
        for first, second in (pair.texts, pair.texts[::-1])
        if not pair.tied
    ]
    opinions, account = await panel.ask(questions, form.read)
    answers = iter(zip(opinions[::2], opinions[1::2], strict=True))
    tally = _Tally(len(rows))
    for pair in pairs:
        if pair.tied:
            tally.add(pair, _TIE)
        else:
            tally.judged(pair, form, *next(answers))
    return tally.found(account.metrics(panel.priced), single=len(panel.judges) == 1)


class _Tally:
    """Who won what."""

    def __init__(self, rows: int) -> None:
        self._results: list[list[float]] = [[] for _ in range(rows)]
        self._failures: list[Exception | None] = [None] * rows
        self._replies: list[list[Any]] = [[] for _ in range(rows)]
        self._abstained = [False] * rows
        self._decided = 0
        self._by_place = 0

    def add(self, pair: Pair, result: float) -> None:
        self._results[pair.row].append(result)
        if pair.other is not None:
            self._results[pair.other].append(1 - result)

    def judged(self, pair: Pair, form: Form, forth: Opinion, back: Opinion) -> None:
        rows = [row for row in (pair.row, pair.other) if row is not None]
        self._replies[pair.row].append(forth.replies)
        self._replies[rows[-1]].append(back.replies)
        if forth.scores is None or back.scores is None:
            for row in rows:
                self._failures[row] = self._failures[row] or forth.failure or back.failure
                self._abstained[row] = True
            return
        ahead, behind = form.score(forth.scores), 1 - form.score(back.scores)
        self._decided += 1
        self._by_place += abs(ahead - behind) == 1  # whoever stood first won both times, or lost both times
        self.add(pair, (ahead + behind) / 2)

    def found(self, counted: Mapping[str, float], single: bool) -> Found:
        scores: list[float | Exception | None] = [
            sum(results) / len(results) if results else failure
            for results, failure in zip(self._results, self._failures, strict=True)
        ]
        abstained = sum(score is None and left for score, left in zip(scores, self._abstained, strict=True))
        metrics = {**counted, "judge/abstained_total": float(abstained)}
        if self._decided:
            metrics["judge/won_by_place"] = self._by_place / self._decided
        replies = [[one[0] for one in own] if single else [[*one] for one in own] for own in self._replies]
        return Found(scores, replies, metrics)
