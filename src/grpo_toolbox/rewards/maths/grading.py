"""Grading answers: what digits and spelling decide at once, the rest in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache

from grpo_toolbox.rewards.maths.equality import NoAlgebra, same_answer
from grpo_toolbox.rewards.maths.latex import Unreadable
from grpo_toolbox.rewards.maths.nodes import Node, Value, Words
from grpo_toolbox.rewards.maths.reading import readings
from grpo_toolbox.rewards.workers import JobFailed, TooMuch, shared_pool

GRADER = "grpo_toolbox.rewards.maths.grader:grade"
LONGEST_WORDS = 200
"""Characters of a gold answer in words; a longer one is a solution, and no answer."""

Graded = bool | TooMuch | JobFailed | None
"""Right or wrong; None where the gold answer cannot be read; or why there is no verdict."""

_read: dict[str, Graded] = {}


async def grade(pairs: Sequence[tuple[str | None, str | None]], timeout: float) -> list[Graded]:
    """Grade (gold answer, answer) pairs, equal ones once; an answer of None is wrong. Works on any event loop.

    Each comparison may take `timeout` seconds. WorkerFailed where no worker starts.
    """
    golds = list(dict.fromkeys(gold for gold, _ in pairs))
    read = dict(zip(golds, await asyncio.gather(*(_readable(gold, timeout) for gold in golds)), strict=True))
    asked = list(dict.fromkeys(pair for pair in pairs if read[pair[0]] is True))
    verdicts = dict(zip(asked, await asyncio.gather(*(_verdict(*pair, timeout) for pair in asked)), strict=True))
    return [verdicts[pair] if pair in verdicts else read[pair[0]] for pair in pairs]


def ask(job: list[str], timeout: float) -> Future[str]:
    """Have a worker grade [gold answer, answer], or try to read [gold answer]: `right`, `wrong` or `unread`."""
    return shared_pool(GRADER).submit(job, timeout)


@lru_cache(maxsize=8192)
def gold_nodes(gold: str) -> tuple[Node, ...]:
    """What a gold answer may mean; empty where it is neither a formula nor a short text."""
    try:
        nodes = readings(gold)
    except Unreadable:
        return ()
    return tuple(node for node in nodes if not isinstance(node, Words) or len(node.text) <= LONGEST_WORDS)


def read_without_algebra(gold: str) -> bool:
    """Whether a gold answer is digits or words, so that no parser has to be asked whether it can read it."""
    nodes = gold_nodes(gold)
    return all(isinstance(node, Words) or (isinstance(node, Value) and node.number is not None) for node in nodes)


async def _readable(gold: str | None, timeout: float) -> Graded:
    if gold is None or not gold_nodes(gold):
        return None
    if read_without_algebra(gold):
        return True
    if gold not in _read:
        read = await _asked([gold], timeout)
        if isinstance(read, Exception):  # it may do better another time
            return read
        _read[gold] = read
    return _read[gold]


async def _verdict(gold: str | None, answer: str | None, timeout: float) -> Graded:
    if gold is None or answer is None:
        return False
    try:
        verdict = same_answer(gold_nodes(gold), readings(answer), NoAlgebra())
    except Unreadable:  # a model may write anything
        return False
    return await _asked([gold, answer], timeout) if verdict is None else verdict


async def _asked(job: list[str], timeout: float) -> Graded:
    try:
        said = await asyncio.wrap_future(ask(job, timeout))
    except (TooMuch, JobFailed) as error:
        return error
    return {"right": True, "wrong": False}.get(said)
