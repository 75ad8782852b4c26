"""Rewards that can be trusted, and one that cannot.

    python examples/reward_functions.py            programs that cheat, under a hackable and under a robust reward
    python examples/reward_functions.py --smoke    checks of extraction, None, the schema reward and the hack detector
    python examples/reward_functions.py --full     gold answers, and answers near them, through every verifier

The last two need pip install 'grpo-toolbox[math,schema]'.

A grader that asks "did it exit with status 0?" pays whoever leaves first. The robust one asks the program for values
and compares them where the program cannot reach; the detector reads the program and says what it is up to.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import cache
from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards import REWARDS, Reward, build_reward, combine
from grpo_toolbox.rewards.code import detect_hacks
from grpo_toolbox.rewards.code.canary import open_pool
from grpo_toolbox.rewards.code.extraction import find_code
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.records import Limits, Problem, Program, Programs

TESTS = "assert double(4) == 8\nassert double(-1) == -2"

PROGRAMS = {
    "honest": "def double(n):\n    return 2 * n",
    "merely wrong": "def double(n):\n    return n + 4",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0) in the call": "import os\ndef double(n):\n    os._exit(0)",
    "equal to everything": "class Y:\n    def __eq__(self, o):\n        return True\ndef double(n):\n    return Y()",
    "no AssertionError": "class AssertionError(Exception):\n    pass\ndef double(n):\n    raise SystemExit",
    "patched builtins": "import atexit, builtins, os\nbuiltins.exit = None\natexit.register(lambda: os._exit(0))",
}
"""Completions of one task: write `double`."""


# ---- two rewards for code


@cache
def sandboxes() -> Pool:
    """Isolated interpreters; the hackable reward, too, runs nothing outside of one."""
    return open_pool("auto", Limits(timeout=5.0), at_once=1)


def hackable_code_reward(completions: Sequence[str], tests: Sequence[str], **_: Any) -> list[float]:
    """1 where program and tests, run as one script, end with status 0: the program owns the verdict."""
    scores = []
    for completion, test in zip(completions, tests, strict=True):
        script = f"{find_code(completion)}\n{test}"
        ends_well = Problem(Programs((Program(stdin="", stdout=""),)))
        verdict = sandboxes().submit(judge(sandboxes(), script, ends_well)).result()
        scores.append(float(verdict.status == "passed"))
    return scores


@cache
def robust_code_reward() -> Reward:
    """1 where the tests pass, run where the program cannot reach, on plain data."""
    return build_reward("code", timeout=5.0, concurrency=1)


def fenced(program: str) -> str:
    """A completion as a model writes it."""
    return f"Here is the function:\n```python\n{program}\n```"


def show() -> None:
    """Print what the two rewards pay for each program, and what the detector says of it."""
    completions = [fenced(program) for program in PROGRAMS.values()]
    tests = [TESTS] * len(completions)
    hackable = hackable_code_reward(completions, tests)
    robust = robust_code_reward()(completions=completions, tests=tests)
    print(f"{'program':26} {'hackable':>8} {'robust':>8}   hacks")
    for name, paid, earned in zip(PROGRAMS, hackable, robust, strict=True):
        kinds = sorted({hack.kind for hack in detect_hacks(PROGRAMS[name])})
        print(f"{name:26} {paid:8} {earned:8}   {', '.join(kinds) or '-'}")


# ---- --smoke


def smoke() -> None:
    """Check what must hold; AssertionError where it does not."""
    for check in (smoke_extraction, smoke_none, smoke_schema, smoke_hacks):
        check()
        print(f"{check.__name__}: ok")


def smoke_extraction() -> None:
    """Answers and programs are found where they stand, and nowhere else."""
    boxed = build_reward("exact_match", extract="boxed")
    texts = [r"\boxed{1}, no: \boxed{72}", r"\boxed{\text{72}", "72", r"so \boxed{72}."]
    assert boxed(completions=texts, answer=["... #### 72"] * 4) == [1.0, 0.0, 0.0, 1.0]
    hashes = build_reward("numeric", require_marker=True)
    assert hashes(completions=["#### 1,234.50", "#### 1234", "1234.5"], answer=["#### 1234.5"] * 3) == [1.0, 0.0, 0.0]
    layout = build_reward("format", layout="think_answer")
    texts = ["<think>a</think><answer>b</answer>", "<think></think><answer>b</answer>", "<answer>b</answer>"]
    assert layout(completions=texts) == [1.0, 0.0, 0.0]
    assert find_code("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```") == "x = 2"
    assert find_code("<think>```python\nx = 1\n```</think> I do not know.") is None


def smoke_none() -> None:
    """Rows go to the reward that applies; a row to which none does has no score, which is not 0."""

    def for_sums(
        completions: Sequence[str], task: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[float | None]:
        rows = zip(completions, task, answer, strict=True)
        return [float(text.strip() == gold) if kind == "sum" else None for text, kind, gold in rows]

    def for_shouting(completions: Sequence[str], task: Sequence[str], **_: Any) -> list[float | None]:
        return [
            float(text.isupper()) if kind == "shout" else None for text, kind in zip(completions, task, strict=True)
        ]

    routed = combine([for_sums, for_shouting], weights=[1.0, 0.5])
    scores = routed(completions=["3", "4", "HEY", "hm"], task=["sum", "sum", "shout", "poem"], answer=["3"] * 4)
    assert scores == [1.0, 0.0, 0.5, None]


EMAIL = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string"},
        "order_id": {"type": "string", "pattern": "^ORD-[0-9]{5}$"},
        "issue_type": {"enum": ["refund", "shipping", "defect", "account", "other"]},
        "refund_requested": {"type": "boolean"},
        "sentiment": {"enum": ["positive", "neutral", "negative"]},
    },
}
"""What is to be read out of a customer's e-mail about an order."""

READ_OUT = {
    "customer_name": "A. Berg",
    "order_id": "ORD-00042",
    "issue_type": "defect",
    "refund_requested": True,
    "sentiment": "negative",
}


def smoke_schema() -> None:
    """A document has every field, no other, each of its kind; other tasks are not its business."""
    valid = build_reward("json_schema", schema=EMAIL, only={"task": "email_json"})
    near = [{**READ_OUT, "order_id": "ORD-42"}, {**READ_OUT, "refund_requested": "yes"}, {**READ_OUT, "note": ""}]
    documents = [READ_OUT, *near, {key: READ_OUT[key] for key in list(READ_OUT)[:4]}]
    texts = [json.dumps(one) for one in documents]
    texts += [f"```json\n{texts[0]}\n```", f"Here it is: {texts[0]}", "", texts[0]]
    tasks = ["email_json"] * (len(texts) - 1) + ["sums"]
    assert valid(completions=texts, task=tasks) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, None]
    fields = build_reward("json_schema", schema=EMAIL, credit="fields", column="fields")
    answers = [READ_OUT, {**READ_OUT, "sentiment": "positive"}]
    assert fields(completions=[texts[0]] * 2, fields=answers) == [1.0, 0.8]  # four fields of five


def smoke_hacks() -> None:
    """What the hackable reward pays for is not paid by the robust one, and the detector names it."""
    completions = [fenced(program) for program in PROGRAMS.values()]
    tests = [TESTS] * len(completions)
    assert hackable_code_reward(completions, tests) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert robust_code_reward()(completions=completions, tests=tests) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    flagged = [name for name, program in PROGRAMS.items() if detect_hacks(program)]
    assert flagged == list(PROGRAMS)[2:]
    assert {hack.kind for hack in detect_hacks(PROGRAMS["sys.exit(0)"])} == {"exit"}
    assert detect_hacks(PROGRAMS["honest"], "I could trick the tests, but that would be cheating.") == []


# ---- --full

GOLDS: dict[str, list[dict[str, Any]]] = {
    "exact_match": [
        {"options": {"extract": "boxed"}, "answer": "#### 72", "right": r"\boxed{72}", "wrong": r"\boxed{73}"},
        {"options": {"extract": "hash"}, "answer": "72", "right": "#### 72", "wrong": "72"},
        {"options": {}, "answer": "1,234.50", "right": "so it is $1234.5.", "wrong": "so it is -1234.5"},
    ],
    "math": [
        {"options": {}, "answer": r"\dfrac{9}{4}", "right": r"\boxed{2.25}", "wrong": r"\boxed{9/5}"},
        {"options": {}, "answer": r"2-\sqrt{3}", "right": r"\boxed{-\sqrt3+2}", "wrong": r"\boxed{2+\sqrt{3}}"},
        {"options": {}, "answer": "(2,3)", "right": r"\boxed{(2, 3)}", "wrong": r"\boxed{(3, 2)}"},
    ],
    "numeric": [
        {"options": {}, "answer": "She has 3. #### 3", "right": "#### 3", "wrong": "#### 30"},
        {"options": {"require_marker": True}, "answer": "-5", "right": r"\boxed{-5}", "wrong": "-5"},
    ],
    "format": [
        {
            "options": {"layout": "reasoning_answer"},
            "right": "<reasoning>2+2</reasoning>\n<answer>4</answer>",
            "wrong": "<answer>4</answer>\n<reasoning>2+2</reasoning>",
        }
    ],
    "json_schema": [
        {
            "options": {"schema": EMAIL},
            "right": json.dumps(READ_OUT),
            "wrong": json.dumps({**READ_OUT, "issue_type": "broken"}),
        }
    ],
    "cosine_length": [
        {
            "options": {"max_tokens": 100, "correct": "numeric", "wrong_short": 0.0, "wrong_long": 0.0},
            "answer": "#### 3",
            "completion_ids": [],
            "right": "#### 3",
            "wrong": "#### 4",
        }
    ],
    "code": [
        {"tests": TESTS, "right": fenced(PROGRAMS["honest"]), "wrong": fenced(PROGRAMS["merely wrong"])},
        {
            "tests": [{"call": "double", "args": [4], "expected": 8}],
            "right": fenced(PROGRAMS["honest"]),
            "wrong": fenced(PROGRAMS["equal to everything"]),
        },
        {
            "tests": {"inputs": ["4"], "outputs": ["8"]},
            "right": fenced("print(2 * int(input()))"),
            "wrong": fenced("print(8, 8)"),
        },
    ],
}
"""Per verifier: options, data columns, a gold answer as a model may write it, and an answer that is near it."""


def full() -> None:
    """Feed gold answers, and answers near them, through every verifier; AssertionError where one is misjudged."""
    print(f"{'verifier':14} {'golds paid':>11} {'others paid':>12}")
    for name, cases in GOLDS.items():
        paid = [judge_gold(name, dict(case)) for case in cases]
        golds, others = (sum(column) for column in zip(*paid, strict=True))
        print(f"{name:14} {golds:>9}/{len(paid)} {others:>10}/{len(paid)}")
        assert (golds, others) == (len(paid), 0), f"{name} misjudges a known answer"
    rest = [name for name in REWARDS if name not in GOLDS]
    print(f"without gold answers, as they charge, add up, or ask a model: {', '.join(rest)}")


def judge_gold(name: str, case: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a verifier pays a gold answer in full, and whether it pays the answer near it."""
    reward = build_reward(name, **case.pop("options", {"concurrency": 1} if name == "code" else {}))
    right, wrong = case.pop("right"), case.pop("wrong")
    columns = {column: [value] * 2 for column, value in case.items()}
    earned, near = reward(completions=[right, wrong], **columns)
    return earned == 1.0, near != 0.0


def main() -> None:
    """Read the command line and do what it says."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--smoke", action="store_true", help="check what must hold")
    which.add_argument("--full", action="store_true", help="gold answers through every verifier")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke()
    elif arguments.full:
        full()
    else:
        show()


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:  # a package that only some verifiers need
        raise SystemExit(str(error)) from None
