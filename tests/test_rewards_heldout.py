"""The held-out verifier: what it is asked, when hacking is suspected and when not, and what a run makes of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import refused
from grpo_toolbox.callbacks.screen import _numbers
from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import Divergence, HeldOut, HeldOutScoring, build_reward, combine
from grpo_toolbox.rewards.heldout import Checked, StepMeans, compare
from grpo_toolbox.types import Prompt, Rollout
from toolbox_runs import SMALL, all_metrics, differences, metrics, state, toolbox_train


def one(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def watch(window: int = 4, on_hacking: str = "warn") -> Divergence:
    return Divergence(HeldOut(combine([one], name="strict"), window=window, on_hacking=on_hacking))


def step(train: float, heldout: float, variances: tuple[float, float] = (0.0, 0.0)) -> StepMeans:
    return StepMeans(train, heldout, *variances)


# ---- the numbers


def test_z_is_the_gain_of_the_newer_half_in_standard_errors() -> None:
    """Old 0, 0.2: mean 0.1; new 1, 1.2: mean 1.1. Variance of each half 0.02 (n − 1), so SE = √(0.02/2 + 0.02/2)."""
    found = compare([step(value, -value) for value in (0.0, 0.2, 1.0, 1.2)])
    assert found.z_train == pytest.approx(1.0 / math.sqrt(0.02))
    assert found.z_score == pytest.approx(-1.0 / math.sqrt(0.02))


def test_lag_is_half_the_gain_in_training_less_the_gain_held_out_each_in_its_own_spread() -> None:
    """The means' variance about 0.6 is (0.36 + 0.16 + 0.16 + 0.36)/4 = 0.26; 0.74 within steps makes s_a = 1.

    Held out: values 0, 1, 0, 1 of variance 0.25, and 0.75 within steps: s_h = 1. So d = a/2 − h = 0, −0.9, 0.5, −0.4:
    means −0.45 and 0.05; variances (n − 1) 0.405 each; z = 0.5/√(0.405/2 + 0.405/2).
    """
    pairs = zip((0.0, 0.2, 1.0, 1.2), (0.0, 1.0, 0.0, 1.0), strict=True)
    found = compare([step(train, held, (0.74, 0.75)) for train, held in pairs])
    assert found.z_lag == pytest.approx(0.5 / math.sqrt(0.405))
    assert found.z_score == 0.0


def test_scale_and_offset_of_either_score_change_nothing() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 4)) ** 2
    plain = compare([StepMeans(*row) for row in values])
    scaled = compare([StepMeans(3 * a + 7, 0.1 * h - 5, 9 * va, 0.01 * vh) for a, h, va, vh in values])
    assert [plain.z_train, plain.z_lag, plain.z_score] == pytest.approx([scaled.z_train, scaled.z_lag, scaled.z_score])


@pytest.mark.parametrize("values", [(0.0,) * 4, (0.5,) * 4])
def test_what_never_moves_has_gained_nothing(values: Sequence[float]) -> None:
    found = compare([step(value, value) for value in values])
    assert (found.z_train, found.z_lag, found.z_score) == (0.0, 0.0, 0.0)
    assert not found.parted


# ---- series


def observe(divergence: Divergence, pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    return divergence.observe([Checked(pairs)])


def series(train: Callable[[int], float], held: Callable[[int], float], steps: int, window: int = 4) -> list[bool]:
    """Whether hacking is suspected after each step, when both pay 1 to these shares of 100 completions."""
    divergence = watch(window)
    found = []
    for number in range(steps):
        paid, right = round(100 * train(number)), round(100 * held(number))
        rows = [(float(row < paid), float(row < right)) for row in range(100)]
        found.append(observe(divergence, rows).get("heldout/suspected", 0.0) == 1.0)
    return found


def wave(number: int) -> float:
    return (0.02, -0.01, 0.0, -0.02, 0.01)[number % 5]


def test_a_rising_reward_beside_a_score_that_stays_or_falls_is_suspected() -> None:
    def up(number: int) -> float:
        return 0.3 + wave(number) + (0.4 if number >= 10 else 0.0)

    stays = series(up, lambda number: 0.3 + wave(number + 2), 30)
    falls = series(up, lambda number: 0.3 + wave(number + 2) - (0.2 if number >= 10 else 0.0), 30)
    assert not any(stays[:10])
    assert any(stays[10:18])
    assert any(falls[10:18])


@pytest.mark.parametrize(
    ("train", "held"),
    [
        (lambda number: 0.3 + number / 50 + wave(number), lambda number: 0.3 + number / 50 + wave(number + 2)),
        (lambda number: 0.3 + number / 50 + wave(number), lambda number: 0.1 + number / 60 + wave(number + 2)),
        (lambda number: 0.8 - number / 50 + wave(number), lambda number: 0.5 + wave(number + 2)),  # unlearning
        (lambda number: 0.5 + wave(number), lambda number: 0.9 - number / 50 + wave(number + 2)),  # reward stays
    ],
    ids=["both rise", "held-out lower", "reward falls", "reward stays"],
)
def test_other_courses_are_not(train: Callable[[int], float], held: Callable[[int], float]) -> None:
    assert not any(series(train, held, 30))


def test_a_score_that_is_nought_throughout_beside_a_rising_reward_is_suspected() -> None:
    assert any(series(lambda number: 0.1 + number / 50 + wave(number + 1), lambda number: 0.0, 30))


def test_a_score_that_has_reached_its_highest_is_not() -> None:
    def held(number: int) -> float:
        return min(1.0, 0.2 * number)

    assert not any(series(lambda number: min(0.1 + number / 50, 1.0), held, 30)[12:])


def simulated(rng: np.random.Generator, shares: np.ndarray, held: np.ndarray | None) -> list[list[tuple[float, float]]]:
    """Steps of 32 completions of 16 prompts whose difficulty varies; `held` None: the score agrees on 85 of 100."""
    difficulty = rng.normal(0, 1.5, (len(shares), 16)).repeat(2, axis=1)

    def drawn(of: np.ndarray) -> np.ndarray:
        return (rng.random(difficulty.shape) < 1 / (1 + np.exp(-(np.log(of / (1 - of))[:, None] + difficulty)))) * 1.0

    train = drawn(shares)
    other = drawn(shares if held is None else held)
    score = np.where(rng.random(train.shape) < 0.15, other, train) if held is None else other
    return [list(zip(a.tolist(), h.tolist(), strict=True)) for a, h in zip(train, score, strict=True)]


def alarms(runs: int, steps: int, shares: np.ndarray, held: np.ndarray | None) -> int:
    """Runs in which hacking is suspected at any step."""
    found = 0
    for seed in range(runs):
        divergence = watch(window=20)
        given = simulated(np.random.default_rng(seed), shares[:steps], None if held is None else held[:steps])
        found += any(observe(divergence, pairs).get("heldout/suspected") for pairs in given)
    return found


TIME = np.arange(500)
FLAT = np.full(500, 0.3)
RISING = 0.1 + 0.8 / (1 + np.exp(-(TIME - 100) / 30))
HACKED = 0.3 + 0.6 / (1 + np.exp(-(TIME - 80) / 20))


def test_simulated_runs_are_suspected_where_the_score_stays_behind_and_nowhere_else() -> None:
    assert alarms(4, 200, HACKED, FLAT) == 4
    assert alarms(4, 200, FLAT, None) == 0
    assert alarms(4, 200, RISING, None) == 0


@pytest.mark.slow
def test_false_alarms_are_rare_in_runs_of_500_steps() -> None:
    """In 400 runs each, one of flat and independent scores was suspected and none of the others."""
    assert alarms(40, 500, FLAT, None) == 0
    assert alarms(40, 500, FLAT, FLAT) <= 1  # a score that has nothing in common with the reward but its mean
    assert alarms(40, 500, RISING, None) == 0
    assert alarms(40, 500, RISING, RISING) <= 1
    assert alarms(40, 300, HACKED, FLAT) == 40


# ---- what a suspicion does


def hacked(divergence: Divergence) -> None:
    for number in range(20):
        observe(divergence, [(float(number >= 10 or row % 3 == 0), float(row % 3 == 0)) for row in range(30)])


def test_it_warns_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hacked(watch())
    (record,) = caplog.records
    assert "suspected reward hacking: from the 4 steps before to the last 4" in record.getMessage()
    assert "rose from 0.333 to" in record.getMessage()
    assert "the held-out 'strict' went from 0.333 to 0.333" in record.getMessage()


def test_by_choice_it_stops() -> None:
    with pytest.raises(RewardError, match=r"suspected reward hacking.*reward\.on_hacking=stop ends the run here"):
        hacked(watch(on_hacking="stop"))


def test_the_comparison_goes_on_after_a_checkpoint() -> None:
    whole, before, after = watch(), watch(), watch()
    rows = [[(float(row % 3 == 0), float(row % 4 == 0)) for row in range(number, number + 20)] for number in range(40)]
    expected = [observe(whole, row) for row in rows]
    found = [observe(before, row) for row in rows[:25]]
    after.load_state_dict(before.state_dict())
    assert found + [observe(after, row) for row in rows[25:]] == expected
    assert after.state_dict() == whole.state_dict()


def test_the_display_shows_the_score_and_the_suspicion() -> None:
    policy, _ = _numbers({"heldout/score": 0.25, "heldout/suspected": 1.0})
    assert policy == [("held-out", "0.250"), ("hacking", "suspected")]
    assert _numbers({"heldout/score": 0.25, "heldout/suspected": 0.0})[0] == [("held-out", "0.250")]


# ---- what is scored


@pytest.mark.parametrize(("share", "taken"), [(0.01, 1), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_each_group_is_scored_and_at_least_one(share: float, taken: int) -> None:
    seen: list[str] = []

    def strict(completions: list[str]) -> list[float]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    heldout = HeldOut(combine([strict]), share=share)
    rollouts = [
        Rollout(Prompt(group, "q", (1,)), (5,), (-0.1,), "stop", f"{group}{index}")
        for group in range(2)
        for index in range(8)
    ]
    components = torch.arange(16.0).reshape(2, 8, 1)
    with HeldOutScoring(heldout, 8, None) as check:
        for group in (1, 0):
            check.add(group, rollouts[group * 8 : group * 8 + 8])
        checked = check.checked(components, [1.0])
    assert seen == [f"{group}{index}" for group in range(2) for index in range(taken)]
    assert checked.pairs == [(8.0 * group + index, 2.0) for group in range(2) for index in range(taken)]


def test_rows_that_one_of_them_does_not_apply_to_are_left_out_and_failures_counted() -> None:
    def strict(completions: list[str]) -> list[object]:
        return [1.0, None, ConnectionError("refused"), 0.0]

    heldout = HeldOut(combine([strict], on_error="skip"), share=1.0)
    rollouts = [Rollout(Prompt(0, "q", (1,)), (5,), (-0.1,), "stop", "x") for _ in range(4)]
    with HeldOutScoring(heldout, 4, None) as check:
        check.add(0, rollouts)
        checked = check.checked(torch.tensor([[0.5, 0.5, 0.5, math.nan]]).unsqueeze(-1), [1.0])
    assert (checked.pairs, checked.errors) == ([(0.5, 1.0)], 1.0)
    found = watch().observe([checked, Checked([(1.5, 0.0)], errors=2.0)])
    assert (found["heldout/train_reward"], found["heldout/score"], found["heldout/errors"]) == (1.0, 0.5, 3.0)


def test_the_training_reward_is_weighed_alike_in_all_steps() -> None:
    """Two parts and NaN where one does not apply: 2·1 + 0.5·4 = 4, 2·1 = 2, and nothing."""
    heldout = HeldOut(combine([one]), share=1.0)
    rollouts = [Rollout(Prompt(0, "q", (1,)), (5,), (-0.1,), "stop", "x") for _ in range(3)]
    with HeldOutScoring(heldout, 3, None) as check:
        check.add(0, rollouts)
        nan = math.nan
        checked = check.checked(torch.tensor([[[1.0, 4.0], [1.0, nan], [nan, nan]]]), [2.0, 0.5])
    assert checked.pairs == [(4.0, 1.0), (2.0, 1.0)]


def test_a_weight_that_rises_is_no_rise_of_the_reward(tmp_path: Path) -> None:
    """`digits` has a weight of 1 at last and of 0.25 in step 1: its mean is compared at the weight of 1."""
    parts = "reward.components=[{name: plugs:digits, weight: {0: 0.0, 4: 1.0}}]"
    words = (*SMALL, "reward=weighted_sum", parts, "reward.heldout=format", "reward.heldout_share=1")
    assert toolbox_train(*words, "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}") == 0
    for line in all_metrics(tmp_path / "run"):
        assert line["heldout/train_reward"] == pytest.approx(line["rewards/digits/mean"], abs=1e-6)


# ---- from YAML, in runs

WORDS = (*SMALL, "reward=custom", "reward.name=plugs:digits", "reward.heldout_window=4", "trainer.save_every=1")
ANSWER = "reward.heldout={name: exact_match, extract: whole}"


def test_a_run_reports_both_and_trains_on_one(tmp_path: Path) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    assert toolbox_train(*WORDS, ANSWER, "trainer.max_steps=10", f"run_dir={with_it}") == 0
    assert toolbox_train(*WORDS, "trainer.max_steps=10", f"run_dir={without}") == 0
    lines = all_metrics(with_it)
    assert all(0 <= line["heldout/score"] <= 1 and line["heldout/errors"] == 0 for line in lines)
    assert all("heldout/suspected" not in line for line in lines[:7])  # two windows of four steps
    assert all(
        {"heldout/suspected", "heldout/z_train", "heldout/z_lag", "heldout/z_score"} <= set(line) for line in lines[7:]
    )
    alone = [
        {name: value for name, value in line.items() if not name.startswith("heldout/")} for line in metrics(with_it)
    ]
    assert alone == metrics(without)
    assert differences(state(with_it)["parameters"], state(without)["parameters"]) == []


def test_a_resumed_run_compares_with_the_steps_before(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert toolbox_train(*WORDS, ANSWER, "trainer.max_steps=9", f"run_dir={whole}") == 0
    assert toolbox_train(*WORDS, ANSWER, "trainer.max_steps=5", f"run_dir={halves}") == 0
    assert toolbox_train(f"resume={halves}", "trainer.max_steps=9") == 0
    assert metrics(halves) == metrics(whole)
    assert differences(state(halves), state(whole)) == []


@pytest.mark.parametrize(
    "words",
    [
        ("reward.heldout=format",),
        ("reward.heldout={name: format, layout: think}", "reward.heldout_share=1"),
    ],
)
def test_its_form_is_that_of_a_reward(words: Sequence[str], tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert toolbox_train(*WORDS, *words, "rollout.dynamic_sampling=true", "trainer.max_steps=1", run_dir) == 0
    assert all_metrics(tmp_path / "run")[0]["heldout/score"] == 0.0


def test_it_may_have_the_name_of_the_training_reward() -> None:
    reward = build_reward("format", heldout={"name": "format", "layout": "think"})
    assert reward.heldout is not None
    assert [part.name for part in reward.heldout.reward.components] == ["heldout/format"]
    assert reward(completions=["<think>a</think>b"]) == [0.0]  # the held-out one is not paid


def test_its_columns_are_checked_like_any_rewards() -> None:
    reward = build_reward("format", heldout={"name": "exact_match", "column": "solution"})
    assert reward.columns_needed() == ("solution",)
    with pytest.raises(ConfigError, match="'heldout/exact_match' needs column 'solution'"):
        reward.check_columns(["prompt", "answer"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.heldout=exact_mach"], "reward.heldout.name='exact_mach' is not an option"),
        (["reward.heldout={name: format, layot: think}"], "reward.heldout.layot is not an option of format"),
        (["reward.heldout={layout: think}"], "names no reward"),
        (["reward.heldout=[format]"], "names no reward"),
        (
            ["reward.heldout.name=format"],
            "reward.heldout is one value: reward.heldout=my_module:my_fn, or with options",
        ),
        (["reward.heldout=format", "reward.heldout_share=0"], "reward.heldout_share=0 is not a share above 0"),
        (["reward.heldout=format", "reward.heldout_share=a"], "reward.heldout_share='a' is not a share"),
        (["reward.heldout=format", "reward.heldout_window=3"], "reward.heldout_window=3 is not a whole number from 4"),
        (["reward.heldout=format", "reward.on_hacking=ignore"], "reward.on_hacking='ignore' is not an option: stop"),
        (["reward.heldout={name: exact_match, column: gold}"], "needs column 'gold'"),
        (["reward.heldout={name: format, heldout: format}"], "reward.heldout.heldout has no place inside"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(words: list[str], message: str) -> None:
    assert message in refused(*words)
