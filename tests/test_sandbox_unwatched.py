"""What holds a sandbox while the process that watches it is stopped or gone: the kernel, and its first process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_toolbox
from grpo_toolbox.rewards.code.records import LAST_SECONDS, MOST_PATIENCE, Limits
from grpo_toolbox.rewards.code.sandbox import Confined, birth, may_become_others
from sandboxes import KINDS, sandboxes

ROOT = Path(grpo_toolbox.__file__).parents[1]
USERS = {
    "as we are": [],
    "ordinary": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
}

SUPERVISOR = """
import sys
from grpo_toolbox.rewards.code import records
from grpo_toolbox.rewards.code.canary import open_pool
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Limits
records.LAST_SECONDS = {last_seconds}
pool = open_pool({kind!r}, Limits(timeout=1.0), 1)
verdict = pool.submit(judge(pool, {code!r}, read_problem("assert double(4) == 8")))
print("judging", flush=True)
print(verdict.result().status, flush=True)
pool.close()
"""
"""Judges one program, in a process that can be stopped and killed."""

FORKING = """
import os, signal, subprocess, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
for _ in range(500):
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "{token}"])
            time.sleep({token})
    except OSError:
        time.sleep(0.002)
os.execvp("sleep", ["sleep", "{token}"])
"""
"""Tries to become a thousand sleeping processes in sessions of their own, which are deaf to what can be ignored."""

both = pytest.mark.parametrize("kind", KINDS)
users = pytest.mark.parametrize("user", ["as we are", pytest.param("ordinary", marks=pytest.mark.slow)])


@contextlib.contextmanager
def supervised(kind: str, user: str, code: str, last_seconds: float = LAST_SECONDS) -> Iterator[subprocess.Popen[str]]:
    """A process that judges `code`, which has just been sent to its sandbox."""
    sandboxes(kind)
    python = sys.executable
    if USERS[user]:
        python = "/usr/bin/python3"
        if not may_become_others() or shutil.which("setpriv") is None:
            pytest.skip("only root can try what somebody else can do")
    program = SUPERVISOR.format(kind=kind, code=code, last_seconds=last_seconds)
    running = subprocess.Popen(
        [*USERS[user], python, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/tmp"},
    )
    assert running.stdout is not None
    assert running.stderr is not None
    try:
        if running.stdout.readline() != "judging\n":
            said = running.stderr.read()
            if USERS[user] and ("No module named" in said or "Permission denied" in said):
                pytest.skip(f"{python} cannot run the package as another user: {said.strip()[-200:]}")
            raise AssertionError(said)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        running.communicate()


def bearing(token: str) -> list[str]:
    """The processes whose command line has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if token in path.read_text().split("\0") else []
    return found


def until(seconds: float, token: str, gone: bool) -> list[str]:
    """Wait until processes with a word are there, or until none is; what is there then."""
    last = time.monotonic() + seconds
    while bool(found := bearing(token)) == gone and time.monotonic() < last:
        time.sleep(0.05)
    return found


@both
@users
def test_a_stopped_supervisor_s_candidate_cannot_multiply_and_comes_to_its_end(kind: str, user: str) -> None:
    """No process of ours looks at the tree; the limit of processes holds, and after 1 s · (1 + 3) + 1 s all is gone."""
    token = f"9{uuid.uuid4().int % 10**8}"
    with supervised(kind, user, FORKING.replace("{token}", token), last_seconds=1.0) as running:
        assert until(20, token, gone=False), running.communicate(timeout=60)
        running.send_signal(signal.SIGSTOP)
        most = 0
        last = time.monotonic() + 60
        while (found := bearing(token)) and time.monotonic() < last:
            most = max(most, len(found))
            time.sleep(0.1)
        assert found == []
        assert 4 < most <= Limits().processes
        running.send_signal(signal.SIGCONT)
        # the first verdict says nothing, for nobody could see how it came about: the second one is the candidate's
        assert running.communicate(timeout=60)[0] == "timeout\n"


@both
@users
def test_a_killed_supervisor_s_candidate_ends_at_once(kind: str, user: str) -> None:
    token = f"9{uuid.uuid4().int % 10**8}"
    with supervised(kind, user, FORKING.replace("{token}", token), last_seconds=3600.0) as running:
        assert until(20, token, gone=False)
        running.kill()
        assert until(60, token, gone=True) == []  # not by the alarm, which is an hour away


@both
@users
def test_the_first_process_is_out_of_its_candidate_s_reach(kind: str, user: str) -> None:
    """It cannot be written to, nor be stopped; the candidate's own memory is its own."""
    look = (
        "import os, signal\nfor name, how in (('mem', 'r+b'), ('mem', 'rb'), ('maps', 'rb'), ('environ', 'rb')):\n"
        "    try: open(f'/proc/1/{name}', how).read(1)\n    except OSError: continue\n    raise AssertionError(name)\n"
        "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):\n    try: os.kill(1, number)\n"
        "    except PermissionError: pass\n"
        "assert open('/proc/self/maps').read()\ndef double(n): return 2 * n"
    )
    with supervised(kind, user, look) as running:
        assert running.communicate(timeout=60) == ("passed\n", "")


def test_a_sandbox_s_own_end_comes_after_every_end_that_the_judge_sets() -> None:
    """The judge waits 10 s, and up to 3 · 10 s more for a busy machine."""
    assert Limits(timeout=10.0).life_seconds == 50
    assert Limits(timeout=0.1).life_seconds > 0.1 * (1 + MOST_PATIENCE)


# ---- numbers that come again


def test_a_number_that_is_another_s_by_now_is_not_killed() -> None:
    """The kernel gives the number of a process that has ended to a new one, before its end is known here."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root can choose the number of the next process")

    async def try_it() -> bool:
        process = await asyncio.create_subprocess_exec("true")
        confined = Confined(process, None)
        stranger = None
        try:
            while Path(f"/proc/{confined.pid}").exists():  # without a turn for the event loop, which would say it ended
                time.sleep(0.01)
            for _ in range(50):
                last.write_text(str(confined.pid - 1))
                stranger = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
                if stranger.pid == confined.pid:
                    break
                os.killpg(stranger.pid, signal.SIGKILL)
                stranger.wait()
            else:
                return False
            while not Path(f"/proc/{stranger.pid}/task/{stranger.pid}/children").read_text():
                time.sleep(0.01)
            assert process.returncode is None
            confined.kill()
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.3)
            return True
        finally:
            if stranger is not None and stranger.poll() is None:
                os.killpg(stranger.pid, signal.SIGKILL)
                stranger.wait()
            await process.wait()

    if not asyncio.run(try_it()):
        pytest.skip("the number did not come again")


def test_birth_tells_processes_apart() -> None:
    assert birth(os.getpid()) == birth(os.getpid()) != ""
    assert birth(2**22 + 1) == ""
    assert birth(1) != birth(os.getpid())
