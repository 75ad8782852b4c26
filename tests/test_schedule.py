"""Learning-rate factors by hand."""

from __future__ import annotations

import pytest

from grpo_toolbox.schedule import SCHEDULES, lr_factor


def _factors(schedule: str, steps: list[int], *, warmup: int = 4, ratio: float = 0.0) -> list[float]:
    return [lr_factor(schedule, step, max_steps=12, warmup_steps=warmup, min_ratio=ratio) for step in steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_by_equal_steps_and_the_first_one_trains(schedule: str):
    assert _factors(schedule, [1, 2, 3, 4, 5]) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_is_at_the_peak(schedule: str):
    assert _factors(schedule, [1], warmup=0) == [1.0]


# After 4 warm-up steps 8 are left: step s is at (s − 5)/8 of the way. Steps 7, 9, 12 are at ¼, ½, ⅞.
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0]),
        ("linear", [0.75, 0.5, 0.125]),
        ("cosine", [0.853553, 0.5, 0.038060]),  # ½(1 + cos(π/4)), ½(1 + cos(π/2)), ½(1 + cos(7π/8))
    ],
)
def test_decay(schedule: str, expected: list[float]):
    assert _factors(schedule, [7, 9, 12]) == pytest.approx(expected, abs=1e-6)
    lifted = [0.2 + 0.8 * factor for factor in expected]
    assert _factors(schedule, [7, 9, 12], ratio=0.2) == pytest.approx(lifted, abs=1e-6)


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)])
def test_past_the_end_it_stays_at_the_minimum(schedule: str, end: float):
    assert _factors(schedule, [13, 14, 1000], ratio=0.1) == pytest.approx([end] * 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warm_up_longer_than_the_run(schedule: str):
    assert lr_factor(schedule, 3, max_steps=3, warmup_steps=10, min_ratio=0.0) == pytest.approx(3 / 11)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_never_rises_again_after_the_warm_up(schedule: str):
    factors = _factors(schedule, list(range(5, 20)), ratio=0.05)
    assert factors == sorted(factors, reverse=True)
