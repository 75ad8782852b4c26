"""Rewards that wait: beside each other, beside the engine, in any order, and never longer than the run."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.errors import RewardError
from grpo_toolbox.experience import next_experience
from grpo_toolbox.interrupts import GracefulStop, Interrupted
from grpo_toolbox.rewards import Reward, Scoring, TrainerState, combine, score_rollouts
from grpo_toolbox.types import Prompt, Rollout, Scores
from toolbox_runs import SMALL, all_metrics, built_run, toolbox_train

GROUPS, SIZE = 4, 2


def rollouts(groups: int = GROUPS, size: int = SIZE) -> list[Rollout]:
    return [
        Rollout(Prompt(10 + group, "q", (1,), {"answer": str(group)}), (5,), (-0.1,), "stop", f"{group}.{index}")
        for group in range(groups)
        for index in range(size)
    ]


def scored(reward: Reward, order: Sequence[int], state: TrainerState | None = None) -> Scores:
    with Scoring(reward, SIZE, state) as scoring:
        for group in order:
            scoring.add(group * SIZE, rollouts()[group * SIZE : (group + 1) * SIZE])
        return scoring.scores()


async def value(completions: list[str], answer: list[str], log_extra: Any, log_metric: Any) -> list[float]:
    """A number that names its row; later groups answer first."""
    await asyncio.sleep(0.02 * (GROUPS - int(answer[0])))
    log_extra("said", [f"said {text}" for text in completions])
    log_metric("groups", float(answer[0]))
    return [float(text) for text in completions]


class Waiting:
    async def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(text) for text in completions]


def plain(completions: list[str]) -> list[float]:
    return [len(completions) + float(text) for text in completions]


# ---- groups that come in one by one


@pytest.mark.parametrize("order", list(itertools.permutations(range(GROUPS))))
def test_what_comes_out_does_not_depend_on_the_order_in_which_groups_end(order: Sequence[int]) -> None:
    scores = scored(combine([value, plain]), order)
    expected = torch.tensor([[0.0, 0.1], [1.0, 1.1], [2.0, 2.1], [3.0, 3.1]])
    assert torch.equal(scores.components[..., 0], expected)
    assert torch.equal(scores.components[..., 1], 8 + expected)  # the plain function has seen all rows in one call
    assert scores.extras["said"] == [f"said {one.text}" for one in rollouts()]
    assert scores.metrics["groups"] == 1.5


def test_waiting_functions_are_called_once_per_group_and_plain_ones_once_at_all() -> None:
    calls: list[tuple[str, list[str]]] = []
    threads: list[threading.Thread] = []

    async def waiting(completions: list[str]) -> list[float]:
        calls.append(("waiting", completions))
        return [0.0] * len(completions)

    def at_once(completions: list[str]) -> list[float]:
        calls.append(("plain", completions))
        threads.append(threading.current_thread())
        return [0.0] * len(completions)

    scored(combine([at_once, waiting]), [2, 0, 3, 1])
    assert sorted(calls) == [
        ("plain", [one.text for one in rollouts()]),
        *(("waiting", [f"{group}.0", f"{group}.1"]) for group in range(GROUPS)),
    ]
    assert threads == [threading.current_thread()]


BEGUN = threading.Event()


async def begins(completions: list[str], bonus: float = 0.0) -> list[float]:
    BEGUN.set()
    await asyncio.sleep(0)
    return [float(text) + bonus for text in completions]


class Begins:
    async def __call__(self, completions: list[str]) -> list[float]:
        return await begins(completions)


def returns_coroutine(completions: list[str]) -> Any:
    return begins(completions)


KINDS = {"def": begins, "partial": functools.partial(begins, bonus=0.0), "object": Begins()}
KINDS |= {"partial object": functools.partial(Begins()), "returned": returns_coroutine}


@pytest.mark.parametrize("kind", KINDS)
def test_a_waiting_function_is_at_work_before_the_last_group_is_there(kind: str) -> None:
    """The second group is added only when the first one's call has begun: without overlap it would never come."""
    reward = combine([KINDS[kind]])
    scored(reward, range(GROUPS))  # calling is what shows that a function returns coroutines
    BEGUN.clear()
    with Scoring(reward, SIZE) as scoring:
        scoring.add(0, rollouts()[:2])
        assert BEGUN.wait(30)
        scoring.add(2, rollouts()[2:4])
        assert torch.equal(scoring.scores().total, torch.tensor([[0.0, 0.1], [1.0, 1.1]]))


def test_a_function_that_turns_out_to_return_coroutines_is_asked_per_group_from_the_next_batch_on() -> None:
    sizes: list[int] = []

    def turns_out(completions: list[str], answer: list[str]) -> Any:
        sizes.append(len(completions))
        return Waiting()(completions, answer)

    reward = combine([turns_out])
    first, second = scored(reward, range(GROUPS)), scored(reward, range(GROUPS))
    assert sizes == [8, 2, 2, 2, 2]
    assert torch.equal(first.total, second.total)
    resumed = combine([turns_out])  # a resumed run knows it, too
    resumed.load_state_dict(reward.state_dict())
    sizes.clear()
    scored(resumed, range(GROUPS))
    assert sizes == [2, 2, 2, 2]


def test_rows_of_a_group_that_fails_are_asked_alone() -> None:
    async def f(completions: list[str]) -> list[float]:
        if "2.1" in completions:
            raise ConnectionError("refused")
        return [1.0] * len(completions)

    scores = scored(combine([f], on_error="skip"), [3, 2, 1, 0])
    assert scores.total.isnan().nonzero().tolist() == [[2, 1]]
    with pytest.raises(RewardError, match=r"failed on prompt 12, completion 1 \(ConnectionError"):
        scored(combine([f]), [3, 2, 1, 0])


def test_a_programming_error_is_one_only_where_it_is_on_every_row_of_the_batch() -> None:
    async def some(completions: list[str], answer: list[str]) -> list[float]:
        if answer[0] == "1":
            raise KeyError("gold")  # on every row of its group
        return [1.0] * len(completions)

    async def everywhere(completions: list[str]) -> list[float]:
        raise KeyError("gold")

    assert scored(combine([some], on_error="skip"), range(GROUPS)).metrics["rewards/some/errors"] == 2
    with pytest.raises(RewardError, match=r"'everywhere' failed on prompt 10, completion 0 \(KeyError"):
        scored(combine([everywhere], on_error="skip"), range(GROUPS))


def test_a_gap_or_a_part_of_a_group_is_refused() -> None:
    with Scoring(combine([plain]), SIZE) as scoring:
        scoring.add(2, rollouts()[2:4])
        with pytest.raises(RewardError, match="a gap or an overlap at row 0"):
            scoring.scores()
    with Scoring(combine([plain]), SIZE) as scoring:
        scoring.add(0, rollouts()[:3])
        with pytest.raises(RewardError, match="3 rollouts are not whole groups of 2"):
            scoring.scores()


def test_a_missing_column_is_an_error_though_groups_came_in_one_by_one() -> None:
    async def f(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="'f' needs solution, which it was not passed; there are: answer"):
        scored(combine([f]), range(GROUPS))


# ---- one loop for the process


def test_what_a_function_keeps_for_its_loop_works_in_every_step() -> None:
    """Clients and semaphores belong to the loop they were first used on: it has to be the same one in every step."""
    kept: list[asyncio.Lock] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def f(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        kept[:] = kept or [asyncio.Lock()]
        async with kept[0]:
            await asyncio.sleep(0.001)  # the others have to wait, which binds the lock to the loop
        return [1.0] * len(completions)

    for _ in range(3):
        assert scored(combine([f]), range(GROUPS)).total.isfinite().all()
    assert len(set(loops)) == 1


def test_sys_exit_in_a_task_of_the_functions_own_does_not_end_the_loop() -> None:
    async def leave() -> float:
        raise SystemExit(0)

    async def f(completions: list[str]) -> list[float]:
        return list(await asyncio.gather(*(leave() for _ in completions)))

    with pytest.raises(RewardError, match="it ended with SystemExit"):
        combine([f])(completions=["a", "b"])
    assert combine([Waiting()])(completions=["1.5"], answer=[""]) == [1.5]


def test_a_function_that_cancels_itself_has_failed() -> None:
    async def f(completions: list[str]) -> list[float]:
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="it ended with CancelledError instead of returning"):
        combine([f])(completions=["a"])


def test_leaving_the_block_cancels_what_is_in_flight() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(completions: list[str]) -> list[float]:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return [0.0]

    def broken_off() -> None:
        with Scoring(combine([endless]), SIZE) as scoring:
            scoring.add(0, rollouts()[:2])
            assert begun.wait(30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert ended.is_set()


def test_a_signal_ends_the_wait_for_a_reward_at_once() -> None:
    ended = threading.Event()

    async def endless(completions: list[str]) -> list[float]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)  # arrives in the main thread, which waits for this function
            await asyncio.sleep(3600)
        finally:
            ended.set()
        return [0.0]

    with GracefulStop(), pytest.raises(Interrupted):
        score_rollouts(combine([endless]), rollouts(), SIZE)
    assert ended.is_set()


# ---- in a run


def test_a_run_asks_waiting_rewards_while_its_engine_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with its second half of prompts only when the first half's rewards are there."""
    (tmp_path / "overlapping.py").write_text(
        "import threading\n"
        "scored = threading.Event()\n"
        "async def waiting(completions, answer):\n"
        "    scored.set()\n"
        "    return [float(text[:1] == gold) for text, gold in zip(completions, answer)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (*SMALL, "reward=custom", "reward.name=overlapping:waiting", "trainer.max_steps=1")
    run = built_run(*words, f"run_dir={tmp_path / 'run'}")
    overlapping = importlib.import_module("overlapping")
    generate = run.engine.generate

    def slow(prompts: Any, group_size: int, sampling: Any, on_end: Any = None) -> Any:
        def reported(row: int, one: Rollout) -> None:
            on_end(row, one)
            if row == len(prompts) * group_size // 2:
                overlapping.scored.wait(30)

        return generate(prompts, group_size, sampling, reported)

    monkeypatch.setattr(run.engine, "generate", slow)

    learnt = next_experience(run, 1, lambda stage: nullcontext())
    assert overlapping.scored.is_set()
    assert learnt.scores.components.shape == (4, 4, 1)


def test_a_run_with_a_waiting_reward_repeats_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waiting_reward.py").write_text(
        "import asyncio, random\n"
        "async def share(completions):\n"
        "    await asyncio.sleep(0.01 * random.Random().random())\n"
        "    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (*SMALL, "reward=custom", "reward.name=waiting_reward:share", "trainer.max_steps=2")
    lines = []
    for name in ("first", "second"):
        assert toolbox_train(*words, f"run_dir={tmp_path / name}") == 0
        lines.append([line["reward_mean"] for line in all_metrics(tmp_path / name)])
    assert lines[0] == lines[1]
    assert all_metrics(tmp_path / "first")[0]["rewards/share/scored"] == 16
