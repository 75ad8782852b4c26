"""The judge: it hands a candidate's program to a sandbox, asks, and has the answers compared out of its reach.

What the program is to answer never enters its sandbox, so there is nothing in there to read, patch or print. Printed
output is compared here; calls and test code run in a second sandbox, the referee, whose questions this module carries
over. What a candidate answers to a referee is not even read here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from grpo_toolbox.rewards.code.box import Box, Ended, within
from grpo_toolbox.rewards.code.inside.wire import WIRE_ERRORS, encode
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.records import Call, Problem, Program, SandboxError, Suite, Table, Verdict

_ASK = b'{"ask": '
"""How a referee's line begins that is a question for the candidate: the rest is carried over as it is."""


class Finding:
    """What has been found out about one candidate so far."""

    def __init__(self) -> None:
        self.passed = 0
        self.asked = 0
        self.status = ""
        """Set where the candidate ended before the tests did."""
        self.reason = ""

    def note(self, passed: bool, reason: str) -> None:
        """Note one test."""
        self.asked += 1
        self.passed += passed
        if not passed and not self.reason:
            self.reason = reason

    def end(self, status: str, reason: str) -> None:
        """Note that the candidate ended; what has been noted before stands."""
        if not self.status:
            self.status, self.reason = status, reason

    def verdict(self, size: int, printed: bytes, seconds: float) -> Verdict:
        """What it comes to, of `size` tests."""
        passed = not self.status and self.passed == self.asked == size
        status = self.status or ("passed" if passed else "failed")
        share = size if passed else min(self.passed, size - 1)
        return Verdict(status, share, size, self.reason, printed.decode("utf-8", "replace"), seconds)


async def judge(pool: Pool, code: str, problem: Problem) -> Verdict:
    """Judge a program; SandboxError where there is no verdict because the sandbox, or the test code, failed."""
    async with pool.turn():
        verdict = await _judge_once(pool, code, problem)
        while verdict.status == "died" and verdict.seconds >= pool.limits.life_seconds:
            # its sandbox ended itself, as it does while this process is stopped: that says nothing of the program
            verdict = await _judge_once(pool, code, problem)
        return verdict


async def _judge_once(pool: Pool, code: str, problem: Problem) -> Verdict:
    found = Finding()
    box = await pool.take()
    began = time.monotonic()
    try:
        box.watch()
        tests = problem.tests
        if isinstance(tests, Suite):
            order = {"tests": tests.source, "entry_point": tests.entry_point}
            await _ask_objects(pool, box, code, problem.setup, order, found)
        elif isinstance(tests, Table):
            await _ask_objects(pool, box, code, problem.setup, {"calls": _calls(tests.calls)}, found)
        else:
            await _ask_programs(pool, box, code, problem.setup, tests.programs, found)
    except Ended as error:
        found.end("died", str(error))
    except TimeoutError:
        found.end("timeout", f"no end within {pool.limits.timeout:g} s")
    finally:
        await pool.discard(box)
    if box.fault:
        found.status, found.reason = box.fault, f"it went over the limit of {box.fault}"
    return found.verdict(problem.size, bytes(box.printed), time.monotonic() - began)


# ---- functions and objects -------------------------------------------------------------------------------------------


async def _ask_objects(pool: Pool, box: Box, code: str, setup: str, order: dict[str, Any], found: Finding) -> None:
    """Load a program as a module, and have the referee ask it."""
    referee = await pool.take_referee()
    over = None
    try:
        over = await within(
            pool.limits.timeout, (box, referee), _load_and_carry(referee, box, code, setup, order, found)
        )
    finally:
        if over is None:  # it is in the middle of something
            await pool.discard(referee)
        else:
            pool.give_referee(referee)
    if over != 0:
        await _blame(pool, order, found)


async def _load_and_carry(referee: Box, box: Box, code: str, setup: str, order: dict[str, Any], found: Finding) -> int:
    await box.send({"role": "objects", "setup": setup, "code": code})
    loaded = await box.receive()
    if "raised" in loaded:
        found.end("raised", _reason(loaded["raised"]))
        return 0
    return await _carry(referee, box, order, found)


async def _carry(referee: Box, box: Box, order: dict[str, Any], found: Finding) -> int:
    """Carry questions and answers until the tests are over; the exit status of the process that ran them."""
    try:
        await referee.send(order)
        while True:
            line = await referee.receive_line()
            if line.startswith(_ASK):
                await referee.send_line(await _answer(box, line[len(_ASK) : -2] + b"\n", found))
                continue
            message = json.loads(line)
            if "passed" in message:
                found.note(message["passed"], message["reason"])
            elif "unusable" in message:
                raise SandboxError(f"the tests cannot be run ({message['unusable']}): {_shown(order)}")
            else:
                return int(message["over"])
    except Ended as error:
        raise SandboxError(f"the tests' own sandbox ended: {error}") from error


async def _answer(box: Box, question: bytes, found: Finding) -> bytes:
    """The candidate's answer to a question as it stands; that it is lost, where there is none."""
    try:
        await box.send_line(question)
        return await box.receive_line()
    except Ended as error:
        found.end("died", str(error))
        return json.dumps({"lost": str(error)}).encode("ascii") + b"\n"


async def _blame(pool: Pool, order: dict[str, Any], found: Finding) -> None:
    """Where tests broke off, see whether they do so without a candidate, too: then it is not the candidate's fault."""
    nobody = await pool.take()
    referee = await pool.take_referee()
    try:
        over = await within(
            pool.limits.timeout, (nobody, referee), _load_and_carry(referee, nobody, "", "", order, Finding())
        )
    except (Ended, TimeoutError):
        over = 1
    finally:
        await asyncio.gather(pool.discard(nobody), pool.discard(referee))
    if over != 0:
        raise SandboxError(f"the tests break off whatever the candidate is: {_shown(order)}")
    found.end("died", "its answers make the tests break off")


def _calls(tests: Sequence[Call]) -> list[list[Any]]:
    return [
        [
            test.function,
            [encode(one, _refuse) for one in test.arguments],
            {name: encode(one, _refuse) for name, one in test.keywords.items()},
            encode(test.expected, _refuse),
        ]
        for test in tests
    ]


def _refuse(value: Any) -> Any:
    raise SandboxError(f"{value!r:.60} in a table of calls is no plain data.")


def _reason(raised: Any) -> str:
    """What a candidate says that it raised, as far as that can be read."""
    try:
        return f"{raised[0][0]}: {raised[1]}".rstrip(": ")[:300]
    except WIRE_ERRORS:
        return "it raised something unreadable"


def _shown(order: dict[str, Any]) -> str:
    return f"{order.get('tests') or order.get('calls')!r:.100}"


# ---- programs --------------------------------------------------------------------------------------------------------


async def _ask_programs(pool: Pool, box: Box, code: str, setup: str, tests: Sequence[Program], found: Finding) -> None:
    """Feed a program with one input after the other, and compare what it prints."""
    limit = box.limits.output_kb << 10

    async def run_all() -> None:
        await box.send({"role": "programs", "setup": setup, "code": code, "output_bytes": limit})
        for test in tests:
            await box.send({"input": test.stdin})
            found.note(*_compared(await box.receive(), test, limit))

    await within(pool.limits.timeout, (box,), run_all())


def _compared(answer: dict[str, Any], test: Program, limit: int) -> tuple[bool, str]:
    """Whether a program printed what is expected, and came to its end; what is wrong, where not."""
    output, status, complaint = (answer.get(name) for name in ("output", "status", "complaint"))
    if not isinstance(output, str) or status != 0:
        return False, str(complaint or f"it ended with status {status}")[:300]
    if len(output) > limit:
        return False, f"it printed more than {limit >> 10} KiB"
    passed = same_output(output, test.stdout)
    return passed, "" if passed else f"it printed {output.strip()!r:.80}, not {test.stdout.strip()!r:.80}"


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are the same but for blanks at the ends of lines and empty lines at the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
