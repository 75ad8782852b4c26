"""A reward on trial before a run, without a model: each part is shown completions whose worth is known.

rows --texts_for--> {kind: completions} --ask--> scores --judge--> PartReport: rates, problems, examples
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards.calling import Batch
from grpo_toolbox.rewards.component import asks_elsewhere
from grpo_toolbox.rewards.contract import Component, Reward, TrainerState
from grpo_toolbox.rewards.scoring import rows_from_rollouts
from grpo_toolbox.rewards.signatures import unwrapped
from grpo_toolbox.rewards.trial_texts import (
    ACCEPT,
    OWN,
    REJECT,
    TOLERATED,
    Pairs,
    Texts,
    compares,
    last_message,
    texts_for,
)
from grpo_toolbox.types import Prompt, Rollout

CALL_LIMIT_S = 30.0
"""Seconds that one call may take here where the reward sets no limit of its own."""
MOST_REJECTED = 0.05
"""Share of right answers that a grader may reject: some data has answers that nobody can read."""
MOST_TOLERATED = 0.25
"""Share of prompts that may earn as much as an answer: a question may hold it by chance."""
THREADS = 4
ROUNDS = 3
"""Calls of each thread at least; fast functions are called for THREAD_SECONDS."""
THREAD_SECONDS = 0.4
SHOWN = 3
STATE = TrainerState(1, 100)


@dataclass(frozen=True)
class Answer:
    """What a part said about some completions."""

    scores: Sequence[float | None]
    failed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    error: str = ""
    """What the first failure was, and where; empty where there is none."""


@dataclass(frozen=True)
class Example:
    """A completion whose score is wrong."""

    prompt: str
    completion: str
    score: float | None


@dataclass(frozen=True)
class KindReport:
    """How one kind of completion came out."""

    name: str
    must: str
    """ACCEPT, REJECT, TOLERATED (some may be accepted), or empty where the reward's own rules decide."""
    rows: int
    accepted: int
    rejected: int
    failed: int
    """The rest are not applicable."""
    slowest: float


@dataclass
class PartReport:
    """One function of a reward: what was tried, what came out, and what is wrong with it."""

    name: str
    columns: str
    kinds: list[KindReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """By problem."""
    notes: list[str] = field(default_factory=list)
    threads: str = "not tried"
    compared: bool = False
    """Whether it tells right answers from wrong ones, so that it was judged by them."""
    constant: bool = False
    """Whether it said the same of everything, right answers among it where there are any."""


def check_reward(
    reward: Reward, prompts: Sequence[Prompt], watch: Callable[[str], None] = lambda name: None
) -> list[PartReport]:
    """Try every part of a reward, its held-out verifier's too, on completions of `prompts` (their ids may be empty).

    Judges that are asked over a network are not asked.
    """
    parts = (*reward.components, *(reward.heldout.reward.components if reward.heldout else ()))
    tried: dict[str, tuple[Component, PartReport, Texts, Callable[[float | None], bool]]] = {}
    reports = []
    for part in parts:
        report = PartReport(part.name, _columns(part, prompts))
        reports.append(report)
        if asks_elsewhere(part):
            report.notes.append("it is asked over a network, and was not asked")
            continue
        watch(part.name)
        texts, accepts = try_part(part, prompts, report)
        tried[part.name] = (part, report, texts, accepts)
    _compare(tried)
    if tried and len(tried) == len(reports) and all(one.constant for one in reports):
        reports[0].problems.append("the reward says the same of every completion: nothing can be learned from it")
    return reports


def try_part(
    part: Component, prompts: Sequence[Prompt], report: PartReport
) -> tuple[Texts, Callable[[float | None], bool]]:
    """Fill in the report of one part; return what it was shown, and which scores count as accepted."""

    def score(pairs: Pairs) -> Sequence[float | None]:
        return ask(part, pairs).scores

    report.compared = compares(part, prompts, score)
    texts = texts_for(part, prompts, score, report.compared)
    report.notes += texts.notes
    answers = {name: ask(part, pairs) for name, (_, pairs) in texts.kinds.items()}
    said = [score for one in answers.values() for score in one.scores if score is not None]
    own_scores = answers[OWN].scores if OWN in answers else []
    own = [score for score in own_scores if score is not None]
    accepts = _threshold(said, own)
    failed = any(one.failed for one in answers.values())
    report.constant = len(set(said)) <= 1 and not failed and (OWN in answers or not report.compared)
    right = {prompt.id: score for (prompt, _), score in zip(texts.pairs(OWN), own_scores, strict=True)}
    for name, (must, pairs) in texts.kinds.items():
        paid = _paid(must, answers[name].scores, [right.get(prompt.id) for prompt, _ in pairs], accepts)
        _judge(report, name, must, pairs, answers[name], paid, not part.tolerant)
    if getattr(unwrapped(part.function), "of_groups", False):
        report.constant = False
        report.notes.append("it compares the completions of a group with each other, and here each was alone")
    if said and not report.compared and report.constant and said[0] > 0:
        report.problems.append(f"every completion earns {said[0]:g}, whatever it says")
    report.threads = _try_threads(part, texts, report)
    return texts, accepts


def ask(part: Component, pairs: Pairs) -> Answer:
    """Score completions; a function that fails is asked row by row, unless it does not come back in time."""
    if not pairs:
        return Answer([])
    rollouts = [Rollout(prompt, tuple(text.encode("utf-8", "replace")), (), "stop", text) for prompt, text in pairs]
    rows = rows_from_rollouts(rollouts, 1, STATE)
    error = ""
    for on_error in dict.fromkeys((part.on_error, "skip")):
        limited = replace(part, on_error=on_error, timeout_s=part.timeout_s or CALL_LIMIT_S)
        try:
            with Batch([limited]) as batch:
                batch.add(rows)
                outcome = batch.outcomes(rows)[0]
        except RewardError as raised:
            error = error or str(raised)
            if isinstance(raised.__cause__, TimeoutError):
                break
            continue
        first = next(iter(outcome.failures.values()), None)
        error = error or (f"{type(first).__name__}: {first}" if first else "")
        return Answer(outcome.scores, len(outcome.failures), outcome.seconds, outcome.slowest, error)
    return Answer([None] * len(pairs), len(pairs), error=error)


def _threshold(said: Sequence[float], own: Sequence[float]) -> Callable[[float | None], bool]:
    """What counts as accepted: the upper half between the least that was said and the most that a right answer earned.

    A part that says the same of all accepts all where that is above 0, and nothing where it is not.
    """
    low, full = min(said, default=0.0), max(own or said, default=0.0)
    middle = (low + full) / 2 if full > low else math.nextafter(0.0, 1.0)
    return lambda score: score is not None and score >= middle


def _judge(
    report: PartReport,
    name: str,
    must: str,
    pairs: Pairs,
    answer: Answer,
    paid: Sequence[bool],
    stops: bool,
) -> None:
    """Add how one kind came out, and what is wrong with that, to a report."""
    scored = [score is not None for score in answer.scores]
    report.kinds.append(
        KindReport(name, must, len(pairs), sum(paid), sum(scored) - sum(paid), answer.failed, answer.slowest)
    )
    if answer.failed and stops:
        report.problems.append(f"{name}: it fails on {answer.failed} of {len(pairs)} ({answer.error:.300})")
    wrong = [s and (not p if must == ACCEPT else p) for s, p in zip(scored, paid, strict=True)]
    most = {ACCEPT: MOST_REJECTED, REJECT: 0.0, TOLERATED: MOST_TOLERATED}.get(must, 1.0)
    problem = ""
    if must == ACCEPT and not any(paid):
        problem = f"{name}: no right answer is ever paid ({len(pairs)} tried)"
        wrong = [not p for p in paid]
    elif sum(wrong) > most * max(1, sum(scored)):
        what = "right answers are rejected" if must == ACCEPT else "wrong answers are paid like right ones"
        problem = f"{name}: {sum(wrong)} of {sum(scored)} {what}"
    if problem:
        report.problems.append(problem)
        report.examples[problem] = [
            Example(last_message(prompt), text, score)
            for (prompt, text), score, bad in zip(pairs, answer.scores, wrong, strict=True)
            if bad
        ][:SHOWN]


def _paid(
    must: str, scores: Sequence[float | None], own: Sequence[float | None], accepts: Callable[[float | None], bool]
) -> list[bool]:
    """Which completions were accepted; a wrong one only where it earns as much as its row's right one (`own`)."""
    if must in (ACCEPT, ""):
        return [accepts(score) for score in scores]
    return [
        score is not None and accepts(score) and (right is None or not accepts(right) or score >= right)
        for score, right in zip(scores, own, strict=True)
    ]


def _columns(part: Component, prompts: Sequence[Prompt]) -> str:
    there = prompts[0].columns if prompts else {}
    used = [*part.signature.columns, *(name for name in part.signature.optional if name in there)]
    if part.signature.everything:
        used.append("all there are (**kwargs)")
    return ", ".join(used) or "none"


def _try_threads(part: Component, texts: Texts, report: PartReport) -> str:
    """Ask from several threads at once, each with the rows in another order, and compare with what one thread says."""
    short = {name: [pair for pair in pairs if len(pair[1]) < 2000] for name, (_, pairs) in texts.kinds.items()}
    mixed = [pair for name, pairs in short.items() for pair in pairs[: 16 if name == OWN else 2]][:32]
    if len(mixed) < 2:
        return "not tried: too few completions"
    first, again = ask(part, mixed), ask(part, mixed)
    if first.failed:
        return "not tried: it fails"
    if list(first.scores) != list(again.scores):
        report.notes.append("it does not say the same twice: its scores depend on more than the completion")
        return "not tried: it does not say the same twice"
    differing = _from_threads(part, mixed, first.scores)
    if not differing:
        return f"same from {THREADS} threads"
    problem = f"thread safety: called from {THREADS} threads at once, it says something else than from one"
    report.problems.append(problem)
    report.examples[problem] = [
        Example(last_message(mixed[index][0]), mixed[index][1], first.scores[index])
        for index in dict.fromkeys(differing)
    ][:SHOWN]
    return "differs between threads"


def _from_threads(part: Component, pairs: Pairs, expected: Sequence[float | None]) -> list[int]:
    """Return the rows on which a thread was told something else than `expected`; the first where one never ended."""
    size = len(pairs)
    found: list[int] = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        order = [(index + number * size // THREADS) % size for index in range(size)]
        start.wait()
        began, rounds = time.perf_counter(), 0
        while not found and (rounds < ROUNDS or time.perf_counter() < began + THREAD_SECONDS):
            rounds += 1
            answer = ask(part, [pairs[index] for index in order])
            found.extend(i for i, score in zip(order, answer.scores, strict=True) if score != expected[i])

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    with _switching_often():
        for one in threads:
            one.start()
        for one in threads:
            one.join(2 * CALL_LIMIT_S)
    return found if not any(one.is_alive() for one in threads) else [0]


@contextmanager
def _switching_often() -> Iterator[None]:
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(former)


def _compare(tried: Mapping[str, tuple[Component, PartReport, Texts, Callable[[float | None], bool]]]) -> None:
    """Note on which completions two verifiers of the reward disagree."""
    verifiers = [one for one in tried.values() if one[1].compared]
    for index, (part, report, texts, accepts) in enumerate(verifiers):
        for other, _, _, others_accept in verifiers[index + 1 :]:
            pairs = [pair for must, pairs in texts.kinds.values() if must in (ACCEPT, REJECT) for pair in pairs[:50]]
            said = zip(pairs, ask(part, pairs).scores, ask(other, pairs).scores, strict=True)
            apart = [pair for pair, one, two in said if None not in (one, two) and accepts(one) != others_accept(two)]
            shown = f"; the first: {apart[0][1]!r:.80}" if apart else ""
            report.notes.append(f"disagrees with {other.name} on {len(apart)} of {len(pairs)} completions{shown}")
