"""What a verdict of reward=code costs beside starting a bare interpreter: `python benchmarks/sandbox.py [rounds]`.

Each round starts a bare interpreter and judges one program, in turn, so that a busy machine is busy for both. Printed
are medians in milliseconds, one sandbox at a time; then verdicts per second with as many at a time as there are CPUs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.code.canary import BUILT_IN, open_pool
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Limits, Problem

DOUBLE = "def double(n):\n    return 2 * n"
TESTS = {
    "asserts": (DOUBLE, "assert double(4) == 8\nassert double('a') == 'aa'\nassert double(0) == 0"),
    "a table of calls": (DOUBLE, [{"call": "double", "args": [n], "expected": 2 * n} for n in range(3)]),
    "a program": ("print(2 * int(input()))", {"inputs": ["4", "5", "0"], "outputs": ["8", "10", "0"]}),
    "a program that leaves": ("import os\nos._exit(0)", "assert double(4) == 8"),
}


def start_interpreter(*options: str) -> float:
    """Seconds from nothing to an interpreter that has ended."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *options, "-c", "pass"], check=True)
    return time.perf_counter() - began


def judge_one(pool: Pool, code: str, problem: Problem) -> float:
    """Seconds from a program to its verdict, the sandbox's end included."""
    began = time.perf_counter()
    pool.submit(judge(pool, code, problem)).result()
    return time.perf_counter() - began


def verdicts_per_second(pool: Pool, code: str, problem: Problem, number: int) -> float:
    """How many verdicts come in a second when all of `number` programs are there at once."""
    began = time.perf_counter()
    for verdict in [pool.submit(judge(pool, code, problem)) for _ in range(number)]:
        verdict.result()
    return number / (time.perf_counter() - began)


def main(rounds: int) -> None:
    """Print a line per kind of sandbox and form of tests."""
    print(f"{'sandbox':12} {'tests':22} {'bare':>8} {'bare -S':>8} {'verdict':>8} {'over bare':>10} {'per second':>10}")
    for kind in BUILT_IN:
        try:
            pool = open_pool(kind, Limits(), at_once=os.cpu_count() or 1)
        except ConfigError as error:
            print(f"{kind:12} {error}")
            continue
        for name, (code, tests) in TESTS.items():
            problem = read_problem(tests)
            assert problem is not None
            judge_one(pool, code, problem)
            times = [
                (start_interpreter(), start_interpreter("-S", "-I"), judge_one(pool, code, problem))
                for _ in range(rounds)
            ]
            bare, without_site, verdict = (1000 * statistics.median(column) for column in zip(*times, strict=True))
            rate = verdicts_per_second(pool, code, problem, rounds)
            numbers = f"{bare:8.1f} {without_site:8.1f} {verdict:8.1f} {verdict - bare:+10.1f} {rate:10.1f}"
            print(f"{kind:12} {name:22} {numbers}", flush=True)
        pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 100)
