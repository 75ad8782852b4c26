"""Workers: processes that can be killed, asked from anywhere, and gone when this process is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from grpo_toolbox.rewards import workers
from grpo_toolbox.rewards.workers import JobFailed, Pool, TooMuch, WorkerFailed

FOREVER = "7**9**9**8"


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Up to two workers that evaluate Python."""
    pool = Pool("builtins:eval", size=2, megabytes=600)
    yield pool
    pool.close()


def gone(pid: int, seconds: float = 120.0) -> bool:
    """Whether a process ends within some seconds; it may still wait for its parent, or init, to notice."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if state.strip()[:1] in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


def test_workers_start_with_the_first_job_and_no_more_than_needed(pool: Pool) -> None:
    assert pool.process_ids == []
    assert [pool.submit("1 + 1", 120.0).result() for _ in range(3)] == [2, 2, 2]
    assert len(pool.process_ids) == 1
    jobs = [pool.submit(f"__import__('time').sleep(0.2) or {n}", 120.0) for n in range(6)]
    assert [job.result() for job in jobs] == [0, 1, 2, 3, 4, 5]
    assert len(pool.process_ids) == 2


def test_a_job_that_takes_too_long_is_killed_and_the_others_go_on(pool: Pool) -> None:
    first = pool.submit("__import__('os').getpid()", 120.0).result()
    endless = pool.submit(FOREVER, 0.5)
    while not endless.running() and not endless.done():
        time.sleep(0.001)
    assert pool.submit("'short'", 120.0).result() == "short"
    with pytest.raises(TooMuch, match=r"no answer within 0\.5 s"):
        endless.result()
    assert gone(first)
    assert pool.submit("'again'", 120.0).result() == "again"


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ("'a' * 10**9", TooMuch, "memory"),
        ("1 / 0", JobFailed, "ZeroDivisionError"),
        ("__import__('os')._exit(3)", TooMuch, r"two workers ended at it \(exit code 3\)"),
        ("object()", JobFailed, "not JSON serializable"),
    ],
)
def test_what_goes_wrong_with_a_job_is_its_own_trouble(pool: Pool, job: str, error: type, message: str) -> None:
    asked = pool.submit(job, 120.0)
    with pytest.raises(error, match=message):
        asked.result()
    assert pool.submit("'still here'", 120.0).result() == "still here"


def test_what_a_job_prints_is_no_answer(pool: Pool) -> None:
    assert pool.submit("print('{\"value\": 7}') or 5", 120.0).result() == 5


def test_a_killed_worker_is_replaced_and_its_job_asked_again(pool: Pool) -> None:
    pool.submit("1", 120.0).result()
    job = pool.submit("__import__('time').sleep(0.3) or 'answer'", 120.0)
    os.kill(pool.process_ids[0], signal.SIGKILL)
    assert job.result() == "answer"


def test_a_worker_that_cannot_start_says_why() -> None:
    pool = Pool("no_such_module:function", size=1)
    with pytest.raises(WorkerFailed, match=r"did not start \(ModuleNotFoundError: No module named 'no_such_module'\)"):
        pool.submit("1", 120.0).result()
    pool.close()


def test_workers_are_asked_from_threads_and_loops(pool: Pool) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(pool.submit(str(n), 120.0).result())) for n in range(8)]
    for thread in threads:
        thread.start()

    async def ask() -> list[int]:
        return list(await asyncio.gather(*(asyncio.wrap_future(pool.submit(f"{n}", 120.0)) for n in range(8))))

    assert asyncio.run(ask()) == list(range(8))
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_idle_workers_end_and_come_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.1)
    first = pool.submit("__import__('os').getpid()", 120.0).result()
    assert gone(first)
    assert pool.submit("__import__('os').getpid()", 120.0).result() != first


def test_a_job_that_nobody_waits_for_is_left_out(pool: Pool) -> None:
    busy = [pool.submit("__import__('time').sleep(0.3)", 120.0) for _ in range(2)]
    unwanted = pool.submit("__import__('os').write(2, b'x')", 120.0)
    assert unwanted.cancel()
    assert [job.result() for job in busy] == [None, None]


def test_a_closed_pool_has_no_processes_and_takes_no_jobs(pool: Pool) -> None:
    pool.submit("1", 120.0).result()
    pool.submit(FOREVER, 300.0)
    ids = pool.process_ids
    pool.close()
    assert all(map(gone, ids))
    with pytest.raises(WorkerFailed, match="closed"):
        pool.submit("1", 120.0)


PROGRAM = """
import os, signal, sys, time
from grpo_toolbox.rewards.workers import Pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, as these tests may be, ignores it
pool = Pool("builtins:eval", size=2)
print(pool.submit("__import__('os').getpid()", 120.0).result(), flush=True)
endless = pool.submit("7**9**9**8", 600.0 if sys.platform == "linux" else 1.0)
while not endless.running():
    time.sleep(0.001)
print(pool.submit("__import__('os').getpid()", 120.0).result(), flush=True)
{then}
"""


def started(then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two workers, one of them at work, that does `then`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    ids = [int(process.stdout.readline()) for _ in range(2)]
    assert len({*ids}) == 2
    return process, ids


def test_no_worker_outlives_the_end_of_the_process() -> None:
    process, ids = started("print('the end')")
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert all(map(gone, ids))


def test_no_worker_outlives_ctrl_c() -> None:
    process, ids = started("endless.result()")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    said = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    assert said.count("KeyboardInterrupt") == 1  # the workers say nothing
    assert all(map(gone, ids))


def test_no_worker_outlives_a_killed_process() -> None:
    process, ids = started("endless.result()")
    process.kill()
    process.communicate(timeout=300)
    assert all(map(gone, ids))  # the busy one by the kernel: with its parent, or by the limit on its processor time


@pytest.mark.slow
def test_time_in_which_everything_was_stopped_does_not_count() -> None:
    steps = "sum(__import__('time').sleep(0.05) is None for _ in range(20))"
    process, ids = started(f'print(pool.submit("{steps}", 8.0).result(), flush=True)\npool.close()')
    time.sleep(0.2)
    everything = [process.pid, *ids]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9.0)
    for pid in reversed(everything):
        os.kill(pid, signal.SIGCONT)
    said, wrong = process.communicate(timeout=300)
    assert said.split() == ["20"], wrong


def test_a_forked_process_has_workers_of_its_own() -> None:
    program = PROGRAM.format(
        then="""
from grpo_toolbox.rewards.workers import shared_pool
before = shared_pool("builtins:len").submit([1, 2], 120.0).result()
child = os.fork()
if not child:
    try:
        pool.submit("1", 120.0)
    except RuntimeError as error:
        print(error, flush=True)
    print("child", shared_pool("builtins:len").submit([1], 120.0).result(), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print("parent", shared_pool("builtins:len").submit([1, 2, 3], 120.0).result(), pool.submit("5", 120.0).result())
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines()[2:] == ["the pool of workers is closed", "child 1", "parent 3 5"]


def test_the_package_is_found_from_any_folder(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    for name in ("json", "random", "sympy"):  # a file of the user's must not stand in for a module
        with open(f"{name}.py", "w") as file:
            file.write("raise RuntimeError('shadow')")
    pool = Pool("grpo_toolbox.rewards.maths.grader:grade", size=1)
    assert pool.submit([r"\sqrt{8}", r"2\sqrt{2}"], 300.0).result() == "right"
    pool.close()
