"""How many answers reward=math grades in a second, beside TRL's accuracy_reward: `python benchmarks/math_answers.py`.

All answers differ, so that nothing is looked up. An argument is the number of answers of each kind (default 1000); the
sides take turns, in quarters, so that a busy machine is busy for both. Printed are answers per second, and the load.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from trl.rewards import accuracy_reward

from grpo_toolbox.rewards import build_reward

PARTS = 4
Case = tuple[str, str]
"""A gold answer, and a completion."""

KINDS: dict[str, Callable[[int], Case]] = {
    "integers": lambda n: (str(3 * n), rf"6 times 7 is 42, so it is \boxed{{{3 * n + n % 2}}}."),
    "fractions and decimals": lambda n: (rf"\frac{{{n}}}{{8}}", rf"\boxed{{{(n + n % 2) / 8}}}"),
    "equal as they are written": lambda n: (rf"{n}\sqrt{{3}}", rf"\boxed{{{n}\sqrt{{3}}}}"),
    "formulas to be worked out": lambda n: (rf"\sqrt{{{2 * n * n}}}", rf"\boxed{{{n + n % 2}\sqrt{{2}}}}"),
}


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(cases: Sequence[Case]) -> tuple[float, float]:
    """Answers per second of ours and of TRL's."""
    ours = build_reward("math")
    ours(completions=[r"\boxed{\sqrt{8}}"], answer=[r"2\sqrt{2}"])  # the workers start
    spent = [0.0, 0.0]
    for part in range(PARTS):
        golds, texts = zip(*cases[part::PARTS], strict=True)
        spent[0] += seconds(lambda: ours(completions=[*texts], answer=[*golds]))  # noqa: B023 - called here
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        dollars = [f"${gold}$" for gold in golds]  # it reads no formula without them
        spent[1] += seconds(lambda: accuracy_reward(completions=chats, solution=dollars))  # noqa: B023
    return len(cases) / spent[0], len(cases) / spent[1]


def main(number: int) -> None:
    """Print a line per kind of answer."""
    print(f"{'answers':28} {'ours':>8} {'TRL':>8}   per second, {os.cpu_count()} CPUs")
    for kind, make in KINDS.items():
        ours, theirs = measure([make(n) for n in range(1, number + 1)])
        print(f"{kind:28} {ours:8.0f} {theirs:8.0f}   load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
