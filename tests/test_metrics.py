"""The metrics of a step by hand. Ids such as e04.3 number checked cases."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_toolbox.metrics import solved, step_metrics
from grpo_toolbox.types import Prompt, Rollout, Scores

NONE = math.nan


def _rollouts(rows: list[tuple[tuple[int, ...], str]], group_size: int) -> list[Rollout]:
    prompts = [Prompt(number, "", (1,)) for number in range(len(rows) // group_size)]
    return [
        Rollout(prompts[row // group_size], ids, (0.0,) * len(ids), reason, "")  # type: ignore[arg-type]
        for row, (ids, reason) in enumerate(rows)
    ]


def _table(values: list[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _scores(components: list[list[list[float]]], total: list[list[float]]) -> Scores:
    return Scores(("exact", "format"), (1.0, 0.5), _table(components), _table(total), {}, {"seen": 3.0})


ROLLOUTS = _rollouts(
    [
        ((1, 2), "stop"),
        ((1, 2), "stop"),
        ((1, 2), "stop"),
        ((3,), "stop"),
        ((1, 2), "stop"),  # as in group 0, but of another prompt: no repeat
        ((4, 4, 4, 4), "length"),
        ((5, 6, 7, 2), "stop"),  # as long as the limit, but it ended
        ((4, 4, 4, 4), "length"),
    ],
    group_size=4,
)
SCORES = _scores(
    [[[1, 1], [0, 1], [1, NONE], [0, 0]], [[0, 0], [0, 0], [NONE, NONE], [0, 0]]],
    [[1.5, 0.5, 1.0, 0.0], [0.0, 0.0, NONE, 0.0]],
)


def test_step_metrics_by_hand():
    assert step_metrics(ROLLOUTS, SCORES) == pytest.approx(
        {
            "reward_mean": 3 / 7,  # 1.5 + .5 + 1 over the seven scored rows
            "reward_std": 0.607493,  # squares 3.5 − 7·(3/7)² = 2.214286, /6 = .369048
            "group_reward_std": 0.322749,  # group 0: 2·.75² + 2·.25² = 1.25, /3, root .645497; group 1: 0; their mean
            "frac_reward_zero_std": 0.5,  # group 1
            "pass_rate": 2 / 7,  # two right answers of the seven with a verdict
            "completion_tokens": 21 / 8,  # 2 + 2 + 2 + 1 + 2 + 4 + 4 + 4
            "completions/min_length": 1,
            "completions/max_length": 4,
            "completions/clipped_ratio": 2 / 8,
            "completions/mean_terminated_length": 13 / 6,  # without the two of four tokens that were cut off
            "completions/min_terminated_length": 1,
            "completions/max_terminated_length": 4,
            "duplicate_rate": 3 / 8,  # two more (1, 2) in group 0, one more (4, 4, 4, 4) in group 1
            "rewards/exact/mean": 2 / 7,
            "rewards/exact/std": 0.487950,  # (2·(5/7)² + 5·(2/7)²)/6 = .238095
            "rewards/format/mean": 2 / 6,
            "rewards/format/std": 0.516398,  # (2·(2/3)² + 4·(1/3)²)/5 = .266667
            "seen": 3.0,
        },
        abs=1e-6,
    )


def test_solved_needs_the_full_first_component():
    scores = _scores([[[0.99, 1], [1, 0], [NONE, 1], [1.5, 0]]], [[1, 1, 1, 1]])
    assert solved(scores).tolist() == [[False, True, False, True]]


def test_case_e04_3_the_stop_token_at_the_length_limit_is_not_truncation():
    ended = _rollouts([((5, 6, 7, 2), "stop"), ((5, 6, 7, 8), "length")], group_size=2)
    metrics = step_metrics(ended, _scores([[[0, 0], [0, 0]]], [[0, 0]]))
    assert metrics["completions/clipped_ratio"] == 0.5


def test_groups_with_fewer_than_two_scores_say_nothing_about_spread():
    rollouts = _rollouts([((1,), "stop")] * 6, group_size=2)
    totals = [[NONE, NONE], [1.0, NONE], [1.0, 0.0]]
    metrics = step_metrics(rollouts, _scores([[[0, 0], [0, 0]]] * 3, totals))
    assert metrics["frac_reward_zero_std"] == 0
    assert metrics["group_reward_std"] == pytest.approx(math.sqrt(0.5))


def test_a_mean_over_nothing_is_left_out():
    rollouts = _rollouts([((1,), "stop")] * 2, group_size=2)
    metrics = step_metrics(rollouts, _scores([[[NONE, NONE], [NONE, NONE]]], [[NONE, NONE]]))
    assert {name for name in metrics if not name.startswith("completion")} == {"duplicate_rate", "seen"}


def test_what_never_ended_has_no_length_and_one_number_no_spread():
    rollouts = _rollouts([((1, 2), "length"), ((3,), "length")], group_size=2)
    metrics = step_metrics(rollouts, _scores([[[0.5, NONE], [NONE, NONE]]], [[0.5, NONE]]))
    ended = {metrics[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")}
    assert ended == {0}
    assert (metrics["rewards/exact/std"], "rewards/format/std" in metrics) == (0, False)


def test_a_batch_of_one_reward_value_has_zero_std():
    rollouts = _rollouts([((1,), "stop"), ((2,), "stop")] * 2, group_size=2)
    metrics = step_metrics(rollouts, _scores([[[0, 0], [0, 0]]] * 2, [[0.1, 0.1], [0.1, 0.1]]))
    assert metrics["reward_std"] == metrics["group_reward_std"] == 0
    assert metrics["frac_reward_zero_std"] == 1
