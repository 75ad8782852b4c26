"""Failures of rewards: the four outcomes and how they are counted, limits of time, and the budget of errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.errors import RewardError
from grpo_toolbox.interrupts import GracefulStop, Interrupted
from grpo_toolbox.rewards import Component, ErrorBudget, Reward, combine, score_rollouts
from grpo_toolbox.rewards.limits import within
from grpo_toolbox.rewards.outcomes import Kind, Outcome, joined
from grpo_toolbox.types import Prompt, Rollout, Scores
from toolbox_runs import SMALL, all_metrics, checkpoints, state, steps, toolbox_train

LONG = 3600.0


def rollouts(size: int) -> list[Rollout]:
    return [Rollout(Prompt(index, "q", (1,)), (5,), (-0.1,), "stop", str(index)) for index in range(size)]


def tolerant(function: Callable[..., Any], **settings: Any) -> Reward:
    return Reward("r", (Component(function.__name__, 1.0, function, "skip", **settings),))


def score(function: Callable[..., Any], size: int, budget: ErrorBudget | None = None, **settings: Any) -> Scores:
    return score_rollouts(tolerant(function, **settings), rollouts(size), 1, budget=budget)


def failing(rows: set[int], error: Exception) -> Callable[..., list[Any]]:
    """1 for every completion, but `error` in the place of the completions of these numbers."""

    def f(completions: list[str]) -> list[Any]:
        return [error if int(text) in rows else 1.0 for text in completions]

    return f


# ---- outcomes


def test_each_row_is_scored_or_not_applicable_or_an_error_or_a_timeout() -> None:
    def f(completions: list[str]) -> list[Any]:
        return [1.0, None, ValueError("bad"), TimeoutError("late"), 0.0, ConnectionError("refused")]

    metrics = score(f, 6).metrics
    counts = {name.removeprefix("rewards/f/"): value for name, value in metrics.items() if name.startswith("rewards/")}
    assert counts == {"scored": 2, "not_applicable": 1, "errors": 2, "timeouts": 1}
    assert metrics["reward_errors"] == 3  # errors and timeouts
    assert metrics["unscored_rows"] == 4


def test_a_function_that_raises_a_timeout_error_has_timed_out() -> None:
    def f(completions: list[str]) -> list[float]:
        if "1" in completions:
            raise TimeoutError
        return [1.0] * len(completions)

    metrics = score(f, 3).metrics
    assert (metrics["rewards/f/scored"], metrics["rewards/f/timeouts"], metrics["rewards/f/errors"]) == (2, 1, 0)


def test_outcomes_of_neighbouring_calls_join_in_the_order_of_their_rows() -> None:
    error = ValueError("x")
    first = Outcome([1.0, None], {}, {"a": [1, 2]}, {"m": [1.0]}, seconds=2.0, slowest=1.5)
    second = Outcome([None, 0.5], {0: error}, {"b": [3, 4]}, {"m": [2.0], "n": [5.0]}, seconds=1.0, slowest=1.0)
    whole = joined([first, second])
    assert whole.scores == [1.0, None, None, 0.5]
    assert whole.failures == {2: error}
    assert whole.extras == {"a": [1, 2, None, None], "b": [None, None, 3, 4]}
    assert whole.metrics == {"m": [1.0, 2.0], "n": [5.0]}
    assert (whole.seconds, whole.slowest) == (3.0, 1.5)
    assert whole.kinds == [Kind.SCORE, Kind.NOT_APPLICABLE, Kind.ERROR, Kind.SCORE]


def test_the_slowest_of_several_calls_is_reported_beside_their_sum() -> None:
    def f(completions: list[str]) -> list[float]:  # all rows together fail, so each is asked alone: four calls
        if len(completions) > 1:
            raise ValueError
        time.sleep(0.05 if completions == ["1"] else 0.0)
        return [1.0]

    metrics = score(f, 3).metrics
    assert metrics["time/f"] >= metrics["time/f/slowest"] >= 0.05


# ---- limits of time


@pytest.fixture
def alarm() -> Any:
    """What SIGALRM did before must be what it does afterwards, and no clock may be left running."""
    handler = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def sleeps(completions: list[str]) -> list[float]:
    if "1" in completions:
        time.sleep(LONG)
    return [1.0] * len(completions)


def swallows(completions: list[str]) -> list[float]:
    scores = []
    for text in completions:
        try:
            time.sleep(LONG if text == "1" else 0.0)
            scores.append(1.0)
        except Exception:  # as careless graders do
            scores.append(0.0)
    return scores


def backtracks(completions: list[str]) -> list[float]:
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b"))) if text == "1" else 1.0 for text in completions]


def multiplies(completions: list[str]) -> list[float]:
    return [float(9**9**8 > 0) if text == "1" else 1.0 for text in completions]


async def waits(completions: list[str]) -> list[float]:
    await asyncio.sleep(LONG if "1" in completions else 0.0)
    return [1.0] * len(completions)


def returns_coroutine(completions: list[str]) -> Any:
    return waits(completions)


async def will_not_end(completions: list[str]) -> list[float]:
    for _ in range(3):  # a coroutine may swallow its cancellation
        try:
            await asyncio.sleep(LONG if "1" in completions else 0.0)
        except asyncio.CancelledError:
            continue
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [sleeps, swallows, backtracks, multiplies, waits, returns_coroutine, will_not_end])
def test_a_call_that_takes_too_long_is_cut_off_and_has_timed_out(function: Callable[..., Any], alarm: None) -> None:
    scores = score_rollouts(tolerant(function, timeout_s=0.1), rollouts(2)[1:], 1)
    assert scores.total.isnan().all()
    name = function.__name__
    assert (scores.metrics[f"rewards/{name}/timeouts"], scores.metrics[f"rewards/{name}/errors"]) == (1, 0)


@pytest.mark.parametrize("function", [sleeps, waits])
def test_a_late_row_does_not_cost_the_others(function: Callable[..., Any]) -> None:
    scores = score(function, 3, timeout_s=0.7)
    assert torch.equal(scores.total.nan_to_num(-9.0).flatten(), torch.tensor([1.0, -9.0, 1.0]))


@pytest.mark.parametrize("function", [sleeps, waits])
def test_a_strict_reward_that_is_late_stops_the_run_and_says_what_to_set(function: Callable[..., Any]) -> None:
    strict = Reward("r", (Component("slow", 1.0, function, timeout_s=0.1),))
    said = r"'slow' failed on prompt 1, completion 0 \(TimeoutError: no answer within 0\.1 s\); columns: none\. "
    with pytest.raises(RewardError, match=said + r"Raise reward\.timeout_s=0\.1, or set reward\.on_error=skip"):
        score_rollouts(strict, rollouts(2)[1:], 1)


def test_a_coroutine_that_blocks_its_loop_is_left_behind_and_the_next_one_runs() -> None:
    go_on = threading.Event()

    async def blocks(completions: list[str]) -> list[float]:
        go_on.wait()  # no await: nothing else runs on this loop
        return [1.0]

    try:
        assert score(blocks, 1, timeout_s=0.1).metrics["rewards/blocks/timeouts"] == 1
        assert score(waits, 1).total.tolist() == [[1.0]]
    finally:
        go_on.set()


def test_outside_the_main_thread_a_late_call_is_counted_when_it_comes_back() -> None:
    found: list[Scores] = []

    def f(completions: list[str]) -> list[float]:
        time.sleep(0.2)
        return [1.0] * len(completions)

    thread = threading.Thread(target=lambda: found.append(score(f, 1, timeout_s=0.1)))
    thread.start()
    thread.join()
    assert found[0].metrics["rewards/f/timeouts"] == 1


def test_a_limit_that_is_kept_changes_nothing(alarm: None) -> None:
    assert within(30.0, lambda: "answer") == "answer"
    assert within(None, lambda: "answer") == "answer"
    with pytest.raises(KeyError):
        within(30.0, lambda: {}["missing"])


def test_a_signal_to_stop_goes_through_a_call_and_leaves_no_clock_behind(alarm: None) -> None:
    def stopped(completions: list[str]) -> list[float]:
        with contextlib.suppress(Exception):  # not the request to stop
            os.kill(os.getpid(), signal.SIGTERM)
        return [1.0] * len(completions)

    with GracefulStop(), pytest.raises(Interrupted):
        score(stopped, 2, timeout_s=30.0)


def test_somebody_elses_alarm_clock_goes_on() -> None:
    rung: list[int] = []
    former = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert within(30.0, lambda: 1) == 1
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.1
        with pytest.raises(TimeoutError):
            within(0.2, lambda: time.sleep(LONG))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        time.sleep(0.05)
        assert rung[-1] == signal.SIGALRM
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


# ---- the budget of errors


def outcome(kinds: str) -> Outcome:
    """`.` scored, `-` not applicable, `E` error, `T` timeout."""
    errors = {"E": ConnectionError("refused"), "T": TimeoutError("late")}
    failures = {row: errors[kind] for row, kind in enumerate(kinds) if kind in errors}
    return Outcome([1.0 if kind == "." else None for kind in kinds], failures)


def recorded(*batches: str, rate: float = 0.2, window: int = 10) -> ErrorBudget:
    budget = ErrorBudget()
    component = tolerant(sleeps, max_error_rate=rate, error_window=window).components[0]
    for batch in batches:
        budget.record(component, outcome(batch), lambda row: f"row {row}")
    return budget


@pytest.mark.parametrize(
    "batches",
    [
        ["EE"],  # two of ten may fail, also while there have not been ten
        ["EE........"],
        ["EE........", "E........."],  # the first two have left the window of ten
        ["E.", "........E.", "........E."],
        ["-" * 30],  # not applicable is no failure
        ["TE", "........", "TE", "........"],
    ],
)
def test_a_reward_may_fail_on_its_share_of_the_window(batches: list[str]) -> None:
    recorded(*batches)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            ["EEE"],
            r"failed on 3 of the last 10 completions \(3 errors and 0 timeouts, such as row 0, ConnectionError: r",
        ),
        (
            ["EE", ".......T"],
            r"failed on 3 of the last 10 completions \(2 errors and 1 timeouts, such as row 7, Timeout",
        ),
        (["E", ".E..", "....E"], "3 of the last 10"),
        (["EEE" + "." * 17], "failed on"),  # within a batch longer than the window, too
    ],
)
def test_one_more_stops_the_run_with_counts_and_an_example(batches: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        recorded(*batches)


def test_the_message_says_what_is_allowed_and_what_to_do() -> None:
    with pytest.raises(RewardError, match=r"max_error_rate=0\.2 allows 2\. The run stops with its last finished step"):
        recorded("EEE")


@pytest.mark.parametrize(("rate", "allowed"), [(0.0, 0), (0.05, 25), (0.29, 145), (1.0, 500)])
def test_the_number_allowed_is_the_share_of_the_window(rate: float, allowed: int) -> None:
    # 0.29 · 500 is 144.99999999999997 in floating point
    component = tolerant(sleeps, max_error_rate=rate).components[0]
    assert (component.window, component.most_failures) == (500, allowed)
    ErrorBudget().record(component, outcome("E" * allowed + "." * 600), str)
    if rate < 1:
        with pytest.raises(RewardError):
            ErrorBudget().record(component, outcome("E" * (allowed + 1)), str)


def test_components_have_budgets_of_their_own() -> None:
    budget = ErrorBudget()
    reward = combine([failing({0, 1}, OSError("a")), failing({2, 3}, OSError("b"))], on_error="skip")
    parts = [Component(part.name, 1.0, part.function, "skip", None, 0.2, 10) for part in reward.components]
    score_rollouts(Reward("r", tuple(parts)), rollouts(4), 1, budget=budget)
    with pytest.raises(RewardError, match="'f' failed on 4"):
        score_rollouts(Reward("r", tuple(parts)), rollouts(4), 1, budget=budget)


def test_the_memory_of_failures_survives_a_checkpoint() -> None:
    budget, again = recorded("E........T"), ErrorBudget()
    again.load_state_dict(budget.state_dict())
    assert again.state_dict() == budget.state_dict() == {"sleeps": ["errors", *["scored"] * 8, "timeouts"]}
    component = tolerant(sleeps, max_error_rate=0.2, error_window=10).components[0]
    again.record(component, outcome("E"), str)  # the first failure leaves the window
    with pytest.raises(RewardError):
        again.record(component, outcome("E"), str)
    assert recorded("." * 30).state_dict() == {}  # nothing to remember


def test_a_function_that_always_hangs_is_given_up_after_its_budget_not_after_every_row() -> None:
    asked: list[str] = []

    def hangs(completions: list[str]) -> list[float]:
        asked.extend(completions[:1])
        raise TimeoutError("no answer")

    with pytest.raises(RewardError, match="'hangs' failed on 3 of the last 10"):
        score(hangs, 200, ErrorBudget(), max_error_rate=0.2, error_window=10)
    assert asked == ["0", "0", "1", "2"]  # all together, then row by row until the third failure


# ---- in a run


def outage(trainer_state: Any, completions: list[str], seconds: float = 0.0) -> list[Any]:
    """The share of digits; from step 3 on one of four completions has no answer."""
    rows = range(len(completions))
    down = trainer_state.step >= 3 and not trainer_state.evaluating
    return [ConnectionError("refused") if down and row % 4 == 0 else float(row % 3) for row in rows]


def test_a_run_stops_when_too_many_completions_fail_and_goes_on_when_what_failed_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of sixteen fail in each step from 3 on; ten may: step 5 would be the third with failures."""
    words = (*SMALL, "reward=custom", "reward.name=test_rewards_contract_failures:outage", "reward.on_error=skip")
    words = (*words, "reward.error_window=200", "trainer.max_steps=7", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*words) == 1
    said = capsys.readouterr().err
    assert "reward 'outage' failed on 12 of the last 200 completions (12 errors and 0 timeouts, such as prompt" in said
    assert "ConnectionError: refused), and reward.max_error_rate=0.05 allows 10" in said
    assert (steps(tmp_path / "run"), checkpoints(tmp_path / "run")) == ([1, 2, 3, 4], [4])
    assert [line["rewards/outage/errors"] for line in all_metrics(tmp_path / "run")] == [0, 0, 4, 4]
    kept = state(tmp_path / "run")["reward"]["errors"]["outage"]
    assert (kept.count("errors"), len(kept)) == (8, 32)
    # 8 failures are remembered, and 20 of 200 allowed: steps 5 to 7 bring 12, and an eighth would be too many
    assert toolbox_train(f"resume={tmp_path / 'run'}", "reward.max_error_rate=0.1") == 0
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7]
    assert toolbox_train(f"resume={tmp_path / 'run'}", "reward.max_error_rate=0.1", "trainer.max_steps=8") == 1


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises, in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def turns(seconds: float) -> int:
    """Python code that is busy for so long and lets no Exception through."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            count += 1
    return count


def test_in_a_thread_python_code_is_cut_off_too() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        in_a_thread(lambda: within(0.1, lambda: turns(LONG)))


def test_in_a_thread_a_limit_that_is_kept_changes_nothing_then_or_later() -> None:
    def thrice() -> list[int]:
        answers = [within(0.2, lambda: 1) for _ in range(3)]
        turns(0.5)  # nothing rings when the calls are long over
        return answers

    assert in_a_thread(thrice) == [1, 1, 1]


def test_in_a_thread_the_clock_may_ring_at_any_moment() -> None:
    """Calls that take just as long as they may: each is answered or late, and none disturbs what comes after."""

    def race() -> int:
        late = 0
        for _ in range(200):
            try:
                within(0.001, lambda: turns(0.001))
            except TimeoutError:
                late += 1
        turns(0.1)
        return late

    assert 0 <= in_a_thread(race) <= 200
    assert [one.name for one in threading.enumerate() if one.name == "time limit"] == []
