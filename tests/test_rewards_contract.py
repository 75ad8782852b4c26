"""The contract of reward functions: what they are passed, what they may return, what becomes of failures.

Ids such as d01.3 number checked cases.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from grpo_toolbox.errors import ConfigError, DataError, RewardError
from grpo_toolbox.rewards import TrainerState, build_reward, combine, score_rollouts
from grpo_toolbox.rewards.scoring import _say_unscored
from grpo_toolbox.types import Prompt, Rollout, Scores

CHAT = [{"role": "user", "content": "2+2?"}]


def rollouts_of(*prompts: Prompt, group_size: int) -> list[Rollout]:
    """Completion g of prompt p says `p.g`."""
    return [
        Rollout(prompt, (7, 2), (-0.1, -0.2), "stop", f"{prompt.id}.{index}")
        for prompt in prompts
        for index in range(group_size)
    ]


def prompts_of(size: int, **columns: Sequence[Any]) -> list[Prompt]:
    return [
        Prompt(130 + i, f"q{i}", (1, 2), {name: values[i] for name, values in columns.items()}) for i in range(size)
    ]


def score(function: Callable[..., Any], prompts: int = 2, group_size: int = 2, on_error: str = "stop") -> Scores:
    reward = combine([function], on_error=on_error)
    return score_rollouts(reward, rollouts_of(*prompts_of(prompts), group_size=group_size), group_size)


def returning(value: Any) -> Callable[..., Any]:
    def f(completions: list[str]) -> Any:
        return value

    return f


# what a function is passed


def test_a_function_is_passed_what_its_signature_asks_for() -> None:
    seen: dict[str, Any] = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 4

    def little(completion_ids: list[list[int]], answer: list[str]) -> list[float]:
        assert completion_ids == [[7, 2]] * 4
        assert answer == ["a", "a", "b", "b"]
        return [0.0] * 4

    state = TrainerState(step=3, max_steps=10)
    rollouts = rollouts_of(*prompts_of(2, answer=["a", "b"], task=[1, 2]), group_size=2)
    score_rollouts(combine([everything, little]), rollouts, 2, state)
    assert callable(seen.pop("log_extra"))
    assert callable(seen.pop("log_metric"))
    assert seen == {
        "prompts": ["q0", "q0", "q1", "q1"],
        "completions": ["130.0", "130.1", "131.0", "131.1"],
        "completion_ids": [[7, 2]] * 4,
        "answer": ["a", "a", "b", "b"],
        "task": [1, 1, 2, 2],
        "trainer_state": state,
    }
    assert state.global_step == 2  # two steps are finished while the third is scored


def test_environments_are_passed_where_there_are_some() -> None:
    def f(completions: list[str], environments: list[int]) -> list[float]:
        return [float(one) for one in environments]

    assert combine([f])(completions=["a", "b"], environments=[3, 4]) == [3.0, 4.0]
    with pytest.raises(RewardError, match="'f' needs environments, which it was not passed"):
        combine([f])(completions=["a", "b"])
    with pytest.raises(ConfigError, match=r"'f' asks for 'environments', and this run has none: .*environments=None"):
        combine([f]).check_columns(["prompt"])


def test_columns_are_the_union_over_rows_with_none_for_holes() -> None:
    prompts = [Prompt(0, "a", (1,), {"answer": "1"}), Prompt(1, "b", (1,), {"task": "code"})]

    def f(answer: list, task: list) -> list[None]:
        assert answer == ["1", None]
        assert task == [None, "code"]
        return [None, None]

    score_rollouts(combine([f]), rollouts_of(*prompts, group_size=1), 1)


def test_conversations_get_message_lists_and_texts_get_text() -> None:
    def f(prompts: list, completions: list) -> list[float]:
        assert prompts == [CHAT, "text"]
        assert completions == [[{"role": "assistant", "content": "0.0"}], "1.0"]
        return [0.0, 0.0]

    score_rollouts(combine([f]), rollouts_of(Prompt(0, CHAT, (1,)), Prompt(1, "text", (1,)), group_size=1), 1)


def test_sync_and_async_functions_get_identical_arguments() -> None:  # d07.3
    seen: list[dict[str, Any]] = []

    def record(kwargs: dict[str, Any]) -> list[float]:
        seen.append({name: value for name, value in kwargs.items() if not callable(value)})
        return [0.0, 0.0]

    def plain(**kwargs: Any) -> list[float]:
        return record(kwargs)

    async def waiting(**kwargs: Any) -> list[float]:
        return record(kwargs)

    score_rollouts(combine([plain, waiting]), rollouts_of(*prompts_of(2, answer=["a", "b"]), group_size=1), 1)
    assert seen[0] == seen[1]
    assert "answer" in seen[0]


def test_no_function_sees_what_another_did_to_its_lists() -> None:
    def vandal(completions: list[str]) -> list[float]:
        completions.clear()
        return [0.0, 0.0]

    def counting(completions: list[str]) -> list[float]:
        return [float(len(completions))] * 2

    scores = score_rollouts(combine([vandal, counting]), rollouts_of(*prompts_of(1), group_size=2), 2)
    assert scores.components[..., 1].tolist() == [[2.0, 2.0]]


def test_a_direct_call_needs_only_what_is_asked_for() -> None:
    assert build_reward("exact_match", extract="last_number")(completions=["so 12"], answer=["12"]) == [1.0]
    with pytest.raises(RewardError, match=r"'exact_match' needs answer.*there are: completions"):
        build_reward("exact_match")(completions=["so 12"])
    with pytest.raises(RewardError, match=r"answer must be a list of one entry per completion \(2\)"):
        build_reward("exact_match")(completions=["1", "2"], answer=["1"])
    with pytest.raises(RewardError, match="called without prompts, completions or columns"):
        build_reward("format")()


# columns


def test_a_missing_column_is_named_before_training() -> None:  # d03.2
    def f(completions: list, solution: list, weight: float = 1.0, **kw: Any) -> None: ...

    reward = combine([f])
    assert reward.columns_needed() == ("solution",)
    with pytest.raises(ConfigError, match=r"'f' needs column 'solution'; the data has: answer, prompt\. Name the"):
        reward.check_columns(["prompt", "answer"])
    reward.check_columns(["prompt", "solution"])


async def asks_for_solution(completions: list, solution: list, bonus: float = 0.0) -> list[float]:
    return [0.0] * len(completions)


class AsksForSolution:
    async def __call__(self, completions: list, solution: list) -> list[float]:
        return [0.0] * len(completions)

    def method(self, completions: list, solution: list) -> list[float]:
        return [0.0] * len(completions)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        asks_for_solution,
        functools.partial(asks_for_solution, bonus=1.0),
        AsksForSolution(),
        AsksForSolution().method,
        logged(asks_for_solution),
        lambda completions, solution, **kwargs: asks_for_solution(completions, solution),
    ],
    ids=["async", "partial", "object", "method", "decorated", "lambda"],
)
def test_columns_are_read_off_every_kind_of_function(function: Callable[..., Any]) -> None:
    reward = combine([function])
    assert reward.columns_needed() == ("solution",)
    assert reward(completions=["a", "b"], solution=["x", "y"]) == [0.0, 0.0]
    bound = functools.partial(function, solution=["x"])
    assert combine([bound]).columns_needed() == ()


def test_the_message_for_exact_match_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"needs column 'answer'.*prompt, question.*Set data\.columns\.answer="):
        build_reward("exact_match").check_columns(["prompt", "question"])


def test_a_function_that_asks_for_prompt_is_told_the_right_name() -> None:
    def f(completions: list, prompt: list) -> None: ...

    with pytest.raises(ConfigError, match="'f' asks for 'prompt': rewards are passed 'prompts'"):
        combine([f]).check_columns(["prompt"])


def test_a_reserved_column_name_is_refused() -> None:  # d03.3
    with pytest.raises(ConfigError, match="data column 'completions'"):
        build_reward("format").check_columns(["prompt", "completions"])
    rollouts = rollouts_of(*prompts_of(1, completions=["x"]), group_size=1)
    with pytest.raises(DataError, match="data column 'completions'"):
        score_rollouts(build_reward("format"), rollouts, 1)


# what a function may return


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, 0, None, True],
        (1, 0.0, None, True),
        np.array([1.0, 0.0, None, 1.0], dtype=object),
        [np.float32(1), np.int64(0), None, np.bool_(True)],
        [torch.tensor(1.0), torch.tensor([0.0]), None, torch.tensor(True)],
        [[1.0], [0.0], [None], [1]],
        [{"score": 1.0}, {"score": 0}, {"score": None}, 1.0],
    ],
    ids=["list", "tuple", "numpy", "numpy scalars", "torch scalars", "column", "dicts"],
)
def test_forms_of_one_number_or_none_per_completion(returned: Any) -> None:
    total = score(returning(returned)).total
    assert total.dtype == torch.float32
    assert torch.equal(total.nan_to_num(-9.0), torch.tensor([[1.0, 0.0], [-9.0, 1.0]]))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_arrays_and_columns_of_them_are_taken(kind: Callable[..., Any], shape: tuple[int, ...]) -> None:  # d01.5
    returned = kind([1.0, 2.0, 3.0, 4.0]).reshape(shape)
    assert score(returning(returned)).total.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, r"'f' returned 1\.0, not a list"),  # d01.3
        (None, "'f' returned None, not a list"),
        ("1001", "'f' returned '1001', not a list"),
        ({"score": 1.0}, r"'f' returned \{'score': 1\.0\}, not a list"),
        (np.float64(1.0), "not a list"),
        ([1.0, 0.0], "'f' returned 2 values for 4 completions"),
        ([1.0, 0.0, "1.0", 0.0], r"'f' returned '1\.0' for prompt 131, completion 0, which is not a number"),  # d01.6
        ([1.0, [0.0, 1.0], 0.0, 0.0], r"returned \[0\.0, 1\.0\] for prompt 130, completion 1, which is not a number"),
        ([1.0, math.nan, 0.0, 0.0], "returned nan for prompt 130, completion 1, which is not finite"),
        ([0.0, 0.0, 0.0, math.inf], "returned inf for prompt 131, completion 1, which is not finite"),  # d02.5
        ([1e39, 0.0, 0.0, 0.0], r"returned 1e\+39 for prompt 130, completion 0, which overflows float32"),  # d02.6
        ([10**400, 0.0, 0.0, 0.0], "completion 0, which overflows float32"),
        ([{"acc": 1}, 0.0, 0.0, 0.0], r"a dict without 'score' for prompt 130, completion 0 \(its keys: acc\)"),
        ([{"score": "1"}, 0.0, 0.0, 0.0], "which is not a number"),
        (np.zeros((4, 2)), r"returned \[0\.0, 0\.0\] for prompt 130, completion 0"),
    ],
)
def test_anything_else_is_an_error_that_names_function_place_and_value(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(returning(returned))


def test_the_largest_float32_is_a_reward() -> None:
    assert score(returning([3.4028234e38, 0, 0, 0])).total.isfinite().all()


def test_a_weighted_sum_that_overflows_is_an_error() -> None:
    reward = combine([returning([1e30])], [1e30])
    with pytest.raises(RewardError, match=r"completion 0 is 1\.0+1e\+60, which overflows float32: lower the weights"):
        reward(completions=["a"])


@pytest.mark.parametrize(
    ("returned", "rewards", "acc"),
    [
        ([{"score": 1.0, "acc": 1}, {"score": 0.0}], [1.0, 0.0], [1, None]),  # d04.1
        ([{"score": 0.0}, {"score": 1.0, "acc": 1}], [0.0, 1.0], [None, 1]),  # d04.2
    ],
)
def test_dicts_give_extra_columns_with_none_for_holes(returned: list, rewards: list, acc: list) -> None:
    scores = score(returning(returned), prompts=1)
    assert scores.total.tolist() == [rewards]
    assert scores.extras == {"acc": acc}


# what becomes of the answers


def test_totals_sum_what_applies_and_are_nan_where_nothing_does() -> None:
    # weights 2 and 0.5: 2·1 + 0.5·4 = 4; only the first: 2; only the second: −0.5; neither: NaN
    reward = combine([returning([1, 1, None, None]), returning([4, None, -1, None])], [2.0, 0.5])
    scores = score_rollouts(reward, rollouts_of(*prompts_of(2), group_size=2), 2)
    assert scores.names == ("f", "f_2")
    assert scores.weights == (2.0, 0.5)
    assert scores.components.shape == (2, 2, 2)
    assert torch.equal(scores.components[..., 1].nan_to_num(-9.0), torch.tensor([[4.0, -9.0], [-1.0, -9.0]]))
    assert torch.equal(scores.total.nan_to_num(-9.0), torch.tensor([[4.0, 2.0], [-0.5, -9.0]]))
    assert reward(completions=[""] * 4) == [4.0, 2.0, -0.5, None]


def test_unscored_rows_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:  # d02.2
    _say_unscored.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scores = score(returning([None, 1.0, None, None]))
    assert scores.metrics["unscored_rows"] == 3
    assert [record.getMessage().count("unscored_rows") for record in caplog.records] == [1]


def test_logged_metrics_are_means_and_logged_columns_are_extras() -> None:
    def f(completions: list, log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("words", 1)
        log_metric("words", 4)
        log_extra("length", [len(text) for text in completions])
        return [0.0] * 4

    scores = score_rollouts(combine([f, f]), rollouts_of(*prompts_of(2), group_size=2), 2)
    assert scores.metrics["words"] == 2.5
    assert scores.metrics["reward_errors"] == scores.metrics["unscored_rows"] == 0
    assert scores.metrics["time/f"] >= 0
    assert scores.metrics["time/f_2"] >= 0
    assert scores.extras == {"length": [5, 5, 5, 5], "f_2/length": [5, 5, 5, 5]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_format_rewards_invalid_format_rate_wins_over_exact_matchs(order: tuple[int, int]) -> None:
    # "12" has a number but not the form, so exact_match alone would say 0 and format says 1
    parts = [{"name": "exact_match"}, {"name": "format"}]
    rollouts = [Rollout(Prompt(0, "q", (1,), {"answer": "12"}), (5,), (-0.1,), "stop", "12")]
    for names, rate in ([parts[0]], 0.0), ([parts[order[0]], parts[order[1]]], 1.0):
        scores = score_rollouts(build_reward("weighted_sum", components=names), rollouts, 1)
        assert scores.metrics["invalid_format_rate"] == rate


# failures


def broken(completions: list[str], **kwargs: Any) -> list[float]:
    raise KeyError("answer")


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_programming_error_stops_the_run_in_any_case(on_error: str) -> None:  # d05.1
    reward = combine([broken], on_error=on_error)
    rollouts = rollouts_of(*prompts_of(2, solution=["1", "2"]), group_size=2)
    message = r"'broken' failed on prompt 130, completion 0 \(KeyError: 'answer'\); columns: solution\."
    with pytest.raises(RewardError, match=message) as caught:
        score_rollouts(reward, rollouts, 2)
    assert isinstance(caught.value.__cause__, KeyError)


def third_times_out(completions: list[str], log_extra: Any = None) -> list[float]:
    if log_extra is not None:
        log_extra("seen", list(completions))
    if "130.3" in completions:
        raise TimeoutError("no answer")
    return [float(text[-1]) for text in completions]


async def third_times_out_async(completions: list[str], log_extra: Any = None) -> list[float]:
    await asyncio.sleep(0)
    return third_times_out(completions, log_extra)


@pytest.mark.parametrize("function", [third_times_out, third_times_out_async])
def test_a_tolerant_reward_loses_only_the_row_that_fails(function: Callable[..., Any]) -> None:  # d05.2
    scores = score(function, prompts=1, group_size=8, on_error="skip")
    assert torch.equal(scores.total.nan_to_num(-9.0), torch.tensor([[0.0, 1.0, 2.0, -9.0, 4.0, 5.0, 6.0, 7.0]]))
    assert scores.metrics["reward_errors"] == 1
    assert scores.extras["seen"] == ["130.0", "130.1", "130.2", None, "130.4", "130.5", "130.6", "130.7"]


@pytest.mark.parametrize("function", [third_times_out, third_times_out_async])
def test_a_strict_reward_names_the_row_that_fails(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"failed on prompt 130, completion 3 \(TimeoutError: no answer\)"):
        score(function, prompts=1, group_size=8)


def test_an_outage_on_every_row_is_counted_and_no_wrong_answer() -> None:
    def down(completions: list[str]) -> list[float]:
        raise ConnectionError("refused")

    scores = score(down, on_error="skip")
    assert scores.total.isnan().all()
    assert scores.metrics["reward_errors"] == scores.metrics["unscored_rows"] == 4


def test_an_exception_in_a_rows_place_is_that_rows_failure() -> None:
    returned = [1.0, TimeoutError("late"), 0.0, 1.0]
    scores = score(returning(returned), on_error="skip")
    assert torch.equal(scores.total.nan_to_num(-9.0), torch.tensor([[1.0, -9.0], [0.0, 1.0]]))
    assert scores.metrics["reward_errors"] == 1
    with pytest.raises(RewardError, match=r"failed on prompt 130, completion 1 \(TimeoutError: late\)"):
        score(returning(returned))


def test_a_failure_that_no_row_shows_alone_is_said_so() -> None:
    def f(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise ValueError("too many")
        return [0.0]

    with pytest.raises(RewardError, match=r"failed on 4 completions together, and on none of them alone \(ValueError"):
        score(f)


def test_sys_exit_does_not_end_the_run() -> None:
    def leaves(completions: list[str]) -> list[float]:
        raise SystemExit(0)

    async def leaves_too(completions: list[str]) -> list[float]:
        raise SystemExit(0)

    for function in (leaves, leaves_too):
        with pytest.raises(RewardError, match=r"completion 0 \(RuntimeError: it ended with SystemExit"):
            score(function)


def test_a_plain_function_that_was_cancelled_within_fails_like_any_other() -> None:
    def f(completions: list[str]) -> list[float]:
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match="it ended with CancelledError"):
        combine([f])(completions=["a", "b"])


def test_a_tolerant_reward_still_may_not_return_nonsense() -> None:
    with pytest.raises(RewardError, match="returned nan"):
        score(returning([math.nan, 0.0, 0.0, 0.0]), on_error="skip")


def test_a_logged_column_of_the_wrong_length_is_a_failure() -> None:
    def f(completions: list, log_extra: Any) -> list[float]:
        log_extra("length", [1, 2, 3])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"log_extra\('length'\) got 3 values for 1 completions"):
        score(f)


def test_rollouts_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(RewardError, match="3 rollouts are not whole groups of 2"):
        score_rollouts(build_reward("format"), rollouts_of(*prompts_of(3), group_size=1), 2)


# async


def pair(kind: str) -> list[Callable[..., Any]]:
    """Two async functions that each go on only after the other has begun: run one after the other they never end."""
    begun = [asyncio.Event(), asyncio.Event()]

    async def meet(me: int, completions: list[str], **kwargs: Any) -> list[float]:
        begun[me].set()
        await asyncio.wait_for(begun[1 - me].wait(), timeout=20)
        return [float(me)] * len(completions)

    async def first(completions: list[str], **kw: Any) -> list[float]:
        return await meet(0, completions)

    async def second(completions: list[str], **kw: Any) -> list[float]:
        return await meet(1, completions)

    class Callee:
        async def __call__(self, completions: list[str]) -> list[float]:
            return await meet(1, completions)

    def returns_coroutine(completions: list[str]) -> Any:
        return meet(1, completions)

    others = {"def": second, "partial": functools.partial(meet, 1), "object": Callee(), "returned": returns_coroutine}
    return [first, others[kind]]


@pytest.mark.parametrize("kind", ["def", "partial", "object", "returned"])
def test_async_functions_overlap(kind: str) -> None:  # d07.1
    assert combine(pair(kind))(completions=["a", "b"]) == [1.0, 1.0]


def test_async_functions_overlap_with_plain_ones() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def plain(completions: list[str]) -> list[float]:
        assert begun.wait(20)
        go_on.set()
        return [1.0]

    async def waiting(completions: list[str]) -> list[float]:
        begun.set()
        await asyncio.to_thread(go_on.wait, 20)
        return [2.0]

    assert combine([plain, waiting])(completions=["a"]) == [3.0]


def test_rows_of_an_async_function_are_tried_again_together() -> None:
    together = asyncio.Barrier(3)  # one row after the other would wait for the second for ever

    async def f(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise TimeoutError
        await asyncio.wait_for(together.wait(), timeout=20)
        return [1.0]

    assert combine([f], on_error="skip")(completions=["a", "b", "c"]) == [1.0, 1.0, 1.0]


def test_it_works_inside_a_running_loop() -> None:
    async def main() -> list[float | None]:
        return combine(pair("def"))(completions=["a"])

    assert asyncio.run(main()) == [1.0]


def test_what_is_in_flight_ends_when_another_function_fails() -> None:
    ended: list[str] = []

    async def endless(completions: list[str]) -> list[float]:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")
        return [0.0]

    with pytest.raises(RewardError, match="'broken'"):
        combine([broken, endless])(completions=["a"])
    assert ended == ["cancelled"]
