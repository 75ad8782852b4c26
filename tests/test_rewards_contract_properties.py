"""Whatever rewards return and in whatever order groups end: the contract of rewards on random values (hypothesis)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards import AdaptiveWeight, ErrorBudget, Reward, Scoring, TrainerState, combine, joined_metrics
from grpo_toolbox.rewards.component import Component
from grpo_toolbox.rewards.outcomes import Outcome, joined
from grpo_toolbox.rewards.values import FLOAT32_MAX, read_values
from grpo_toolbox.rewards.weights import read_weight
from grpo_toolbox.types import Prompt, Rollout

quick = settings(max_examples=40, deadline=None, derandomize=True)

NUMBERS = st.floats(-1e30, 1e30) | st.integers(-(2**60), 2**60) | st.booleans()
SCORES = st.lists(NUMBERS | st.none(), min_size=1, max_size=12)
FINITE = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12)


def read(returned: Any, size: int) -> list[float | None]:
    return read_values(returned, size, "f", lambda row: f"row {row}").scores


@quick
@given(SCORES, st.sampled_from(["as it is", "list of one", "tuple of one", "dict", "numpy", "torch"]))
def test_each_row_may_come_in_any_form(scores: list[Any], form: str) -> None:
    write: dict[str, Callable[[Any], Any]] = {
        "as it is": lambda value: value,
        "list of one": lambda value: [value],
        "tuple of one": lambda value: (value,),
        "dict": lambda value: {"score": value, "other": 1},
        "numpy": lambda value: value if value is None else np.float64(value),
        "torch": lambda value: value if value is None else torch.tensor(float(value), dtype=torch.float64),
    }
    assert read([write[form](value) for value in scores], len(scores)) == [
        None if value is None else float(value) for value in scores
    ]


@quick
@given(FINITE, st.sampled_from([np.float64, np.float32]), st.booleans())
def test_an_array_a_tensor_a_list_and_a_column_of_them_say_the_same(
    scores: list[float], dtype: Any, column: bool
) -> None:
    array = np.array(scores, dtype=dtype)
    array = array.reshape(-1, 1) if column else array
    expected = [float(value) for value in array.reshape(-1)]
    for form in (array, torch.from_numpy(array), array.tolist(), tuple(array.tolist())):
        assert read(form, len(scores)) == expected


@quick
@given(st.lists(NUMBERS, max_size=6), st.integers(0, 6))
def test_a_wrong_number_of_rows_is_never_taken(scores: list[Any], size: int) -> None:
    if len(scores) == size:
        return
    with pytest.raises(RewardError, match=f"returned {len(scores)} values for {size} completions"):
        read(scores, size)


NONSENSE = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 2 * FLOAT32_MAX, 10**400, 1j, object(), b"1", {}, {"score": "1"}]),
    st.text(),
    st.lists(NUMBERS, min_size=2, max_size=3),
    st.just([]),
    st.just([[[1.0]]]),
)


@quick
@given(st.lists(NUMBERS, min_size=1, max_size=5), NONSENSE, st.data())
def test_one_row_of_nonsense_is_an_error_that_names_it(scores: list[Any], nonsense: Any, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(scores) - 1))
    with pytest.raises(RewardError, match=rf"reward 'f' returned .* for row {row}\b"):
        read([*scores[:row], nonsense, *scores[row + 1 :]], len(scores))


def rollouts(groups: int, size: int) -> list[Rollout]:
    return [
        Rollout(Prompt(group, "q", (1,), {"gold": group}), (5,), (-0.1,), "stop", f"{group}.{index}")
        for group in range(groups)
        for index in range(size)
    ]


@quick
@given(st.permutations(range(5)), st.lists(st.floats(0, 0.003), min_size=5, max_size=5), st.integers(1, 3))
def test_neither_the_order_of_groups_nor_that_of_answers_shows(
    order: Sequence[int], waits: Sequence[float], size: int
) -> None:
    async def waiting(completions: list[str], gold: list[int], log_extra: Any, log_metric: Any) -> list[Any]:
        await asyncio.sleep(waits[gold[0]])
        log_extra("seen", list(completions))
        log_metric("gold", gold[0])
        if gold[0] == 3:
            raise ConnectionError("refused")
        return [None if gold[0] == 1 else float(text) for text in completions]

    def plain(completions: list[str]) -> list[float]:
        return [float(index) for index in range(len(completions))]

    rows = rollouts(5, size)
    with Scoring(combine([waiting, plain], on_error="skip"), size, TrainerState(1, 9)) as scoring:
        for group in order:
            scoring.add(group * size, rows[group * size : (group + 1) * size])
        scores = scoring.scores()
    asked = [math.nan if row.prompt.id in (1, 3) else float(row.text) for row in rows]
    expected = torch.stack([torch.tensor(asked), torch.arange(5.0 * size)], dim=1).reshape(5, size, 2)
    assert torch.equal(scores.components.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert scores.extras["seen"] == [None if row.prompt.id == 3 else row.text for row in rows]
    counts = {kind: scores.metrics[f"rewards/waiting/{kind}"] for kind in ("scored", "not_applicable", "errors")}
    assert counts == {"scored": 3 * size, "not_applicable": size, "errors": size}


@quick
@given(st.lists(st.lists(st.sampled_from(".-ET"), max_size=9), max_size=6))
def test_joining_outcomes_is_having_had_one(kinds: list[list[str]]) -> None:
    def outcome(own: list[str]) -> Outcome:
        errors = {"E": ValueError(), "T": TimeoutError()}
        failures: dict[int, Exception] = {row: errors[kind] for row, kind in enumerate(own) if kind in errors}
        return Outcome([1.0 if kind == "." else None for kind in own], failures, seconds=1.0, slowest=len(own))

    whole = joined([outcome(own) for own in kinds])
    assert whole.kinds == [kind for own in kinds for kind in outcome(own).kinds]
    assert whole.seconds == len(kinds)
    assert whole.slowest == max(map(len, kinds), default=0.0)


@quick
@given(st.lists(st.text(".ET", max_size=12), max_size=12), st.integers(1, 15), st.integers(0, 5))
def test_the_budget_is_exceeded_exactly_where_some_window_holds_too_many(
    batches: list[str], window: int, allowed: int
) -> None:
    def never(completions: list[str]) -> list[float]:
        return []

    part = Component("f", 1.0, never, "skip", max_error_rate=min(1.0, allowed / window), error_window=window)
    budget, text = ErrorBudget(), ""
    for batch in batches:
        text += batch
        failures = {row: ValueError() for row, kind in enumerate(batch) if kind != "."}
        outcome = Outcome([None if row in failures else 1.0 for row in range(len(batch))], failures)
        windows = (text[max(0, end - window) : end] for end in range(len(text) + 1))
        if max(sum(kind != "." for kind in one) for one in windows) > part.most_failures:
            with pytest.raises(RewardError):
                budget.record(part, outcome, str)
            return
        budget.record(part, outcome, str)
        budget.load_state_dict(budget.state_dict())


@quick
@given(st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), min_size=1, max_size=6), st.integers(1, 1100))
def test_a_scheduled_weight_lies_between_the_points_around_its_step(points: dict[int, float], step: int) -> None:
    _, (factor,) = read_weight(points, "f")
    steps = sorted(points)
    below = [points[one] for one in steps if one <= step][-1:] or [points[steps[0]]]
    above = [points[one] for one in steps if one >= step][:1] or [points[steps[-1]]]
    weight = factor.at(TrainerState(step, 2000))
    assert min(*below, *above) - 1e-9 <= weight <= max(*below, *above) + 1e-9
    if step in points:
        assert weight == pytest.approx(points[step])


@quick
@given(st.lists(st.lists(st.floats(-2, 2) | st.just(math.nan), max_size=6), max_size=30))
def test_an_adaptive_weight_is_never_off_its_bounds_and_goes_on_as_it_was_saved(steps: list[list[float]]) -> None:
    first, second = AdaptiveWeight(1.0, lowest=0.25, highest=4.0), AdaptiveWeight(1.0, lowest=0.25, highest=4.0)
    for scores in steps:
        first.observe(scores)
        second.observe(scores)
        second.load_state_dict(second.state_dict())
        assert 0.25 <= first.value <= 4.0
        assert first.value == second.value


@quick
@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_metrics_of_parts_add_up_where_they_count_and_are_means_where_they_are_means(
    parts: list[tuple[float, int]],
) -> None:
    names = ("reward_errors", "rewards/f/timeouts", "judge/cost_total", "time/f", "time/f/slowest", "rewards/f/mean")
    rows = [size for _, size in parts]
    found = joined_metrics([dict.fromkeys(names, value) for value, _ in parts], rows)
    values = [value for value, _ in parts]
    for name in names[:4]:
        assert found[name] == pytest.approx(sum(values))
    assert found["time/f/slowest"] == max(values)
    weighted = sum(value * size for value, size in parts) / sum(rows)
    assert found["rewards/f/mean"] == pytest.approx(weighted, abs=1e-9)


@quick
@given(st.lists(st.tuples(st.none() | st.floats(-1e3, 1e3), st.none() | st.floats(-1e3, 1e3)), min_size=1, max_size=8))
def test_a_total_is_the_weighted_sum_of_what_applies(pairs: list[tuple[float | None, float | None]]) -> None:
    def first(completions: list[str]) -> list[float | None]:
        return [pair[0] for pair in pairs]

    def second(completions: list[str]) -> list[float | None]:
        return [pair[1] for pair in pairs]

    reward: Reward = combine([first, second], [2.0, -0.5])
    expected = [None if pair == (None, None) else 2.0 * (pair[0] or 0.0) - 0.5 * (pair[1] or 0.0) for pair in pairs]
    assert reward(completions=[""] * len(pairs)) == [None if one is None else pytest.approx(one) for one in expected]
