"""Weights that move: by points, by a function of the step, by the success rate; in runs and in checkpoints."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from command_line import refused
from grpo_toolbox.advantages import ADVANTAGES, estimate
from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import (
    AdaptiveReward,
    AdaptiveWeight,
    Scoring,
    TrainerState,
    build_reward,
    combine,
    score_rollouts,
)
from grpo_toolbox.types import Prompt, Rollout
from toolbox_runs import SMALL, all_metrics, built_run, differences, metrics, state, toolbox_train

STEPS = 300


def at(step: int) -> TrainerState:
    return TrainerState(step, STEPS)


def one(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def weight(given: Any, step: int) -> float:
    total = combine([one], [given])(completions=["a"], trainer_state=at(step))[0]
    assert total is not None
    return total


# ---- schedules


@pytest.mark.parametrize(
    ("step", "linear", "stairs"),
    # from 1.0 at 0 to 0.2 at 200 it falls by 0.8/200 = 0.004 a step, then rises to 0.5 at 300 by 0.003
    [
        (1, 0.996, 1.0),
        (100, 0.6, 1.0),
        (199, 0.204, 1.0),
        (200, 0.2, 0.2),
        (250, 0.35, 0.2),
        (300, 0.5, 0.5),
        (999, 0.5, 0.5),
    ],
)
def test_weights_by_step_are_a_line_or_stairs_through_their_points(step: int, linear: float, stairs: float) -> None:
    points = {0: 1.0, 200: 0.2, 300: 0.5}
    assert weight(points, step) == pytest.approx(linear)
    assert weight({**points, "shape": "step"}, step) == stairs


def test_points_may_come_in_any_order_and_a_single_one_is_a_constant() -> None:
    assert weight({200: 0.2, 0: 1.0}, 100) == pytest.approx(0.6)
    assert [weight({50: 0.3}, step) for step in (1, 50, 300)] == [0.3] * 3


def test_a_function_of_the_step_or_of_the_trainer_state_is_a_weight() -> None:
    assert weight(lambda step: 1 / step, 4) == 0.25
    assert weight(lambda trainer_state: trainer_state.step / trainer_state.max_steps, 30) == 0.1
    with pytest.raises(RewardError, match=r"the weight '<lambda>' is nan at step 4, which is no finite number"):
        weight(lambda step: math.nan, 4)


def test_factors_of_nested_sums_multiply() -> None:
    inner = combine([one, one], [{0: 0.0, 100: 1.0}, 3.0])
    outer = combine([inner], [lambda step: 2.0])
    assert [part.weight_at(at(50)) for part in outer.components] == [1.0, 6.0]


def test_scores_carry_the_weights_of_their_step() -> None:
    rollouts = [Rollout(Prompt(0, "q", (1,)), (5,), (-0.1,), "stop", "x") for _ in range(2)]
    reward = combine([one, one], [{0: 1.0, 200: 0.2}, 0.5])
    scores = score_rollouts(reward, rollouts, 2, at(100))
    assert scores.weights == (pytest.approx(0.6), 0.5)
    assert scores.total.tolist() == [[pytest.approx(1.1)] * 2]
    assert reward.moving_weights(at(100)) == {"rewards/one/weight": pytest.approx(0.6)}


def test_without_a_trainer_state_a_schedule_has_arrived_and_a_function_cannot_be_asked() -> None:
    assert combine([one], [{0: 1.0, 200: 0.2}])(completions=["a"]) == [0.2]
    with pytest.raises(RewardError, match=r"'<lambda>' is a function of the step: pass trainer_state="):
        combine([one], [lambda step: 1.0])(completions=["a"])


def test_evaluations_use_one_weight_for_the_whole_run() -> None:
    reward = combine([one, one, one], [{0: 1.0, 200: 0.2}, lambda step: step / STEPS, AdaptiveWeight(0.7)])
    reward.components[2].factors[0].adjust(0.0)  # type: ignore[attr-defined]
    assert [part.weight for part in reward.settled(STEPS).components] == [0.2, 1.0, 0.7]


def test_gdpo_weighs_its_normalised_components_with_the_weights_of_the_step() -> None:
    """z = (r − mean)/std per component is ±0.7071 in a group of two; with weights 1 and 0.25 the first one decides."""

    def first(completions: list[str]) -> list[float]:
        return [1.0, 0.0]

    def second(completions: list[str]) -> list[float]:
        return [0.0, 100.0]

    rollouts = [Rollout(Prompt(0, "q", (1,)), (5,), (-0.1,), "stop", "x") for _ in range(2)]
    reward = combine([first, second], [1.0, {0: 0.25, 100: 4.0, "shape": "step"}])
    early, late = (
        estimate(ADVANTAGES["gdpo"], score_rollouts(reward, rollouts, 2, at(step))).flatten() for step in (1, 100)
    )
    assert early[0] > 0 > early[1]  # while the sum of raw rewards would be 1 against 25
    assert late[0] < 0 < late[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has no points"),
        ({"shape": "step"}, "has no points"),
        ({0: 1.0, "shape": "cubic"}, r"shape='cubic' is not an option: linear, step"),
        ({0: "much"}, "0: 'much', which is no weight at a step"),
        ({-1: 1.0}, "-1: 1.0, which is no weight at a step"),
        ({0: math.nan}, "0: nan"),
        ({True: 1.0}, "True: 1.0"),
        ({"name": "adaptiv"}, "name='adaptiv' is not an option: adaptive. Did you mean adaptive"),
        ({"name": "adaptive", "lo": 0.1}, "lo=0.1 is not an option: .*low"),
        ({"name": "adaptive", "low": 0.9}, "low=0.9 ≤ high=0.8"),
        ({"name": "adaptive", "up": math.inf}, "up=inf is not a finite number"),
        (math.inf, "weight inf of reward 'one' is not a finite number, such as 0.5, nor weights by step"),
        (True, "weight True"),
        ("0.5", "weight '0.5'"),
        ("no_such_module:f", "importing 'no_such_module' failed"),
        ([1.0], r"weight \[1.0\]"),
    ],
)
def test_what_is_no_weight_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combine([one], [given])


# ---- weights that follow the success rate


def test_adaptive_reward_runs_as_its_pattern_is_written() -> None:
    def correctness(prompts: list, completions: list, answer: list, **kwargs: Any) -> list[float]:
        said = [completion[0]["content"] for completion in completions]
        return [2.0 if text == gold else 0.0 for text, gold in zip(said, answer, strict=True)]

    reward = AdaptiveReward(correctness, initial_weight=1.0)
    asked = {"prompts": ["q", "q"], "completions": [[{"role": "assistant", "content": c}] for c in "ab"]}
    assert reward(**asked, answer=["a", "a"]) == [2.0, 0.0]
    reward.adjust_weight(0.1)  # the model struggles: 1.0 · 1.2
    assert reward.weight == pytest.approx(1.2)
    assert reward(**asked, answer=["a", "a"]) == pytest.approx([2.4, 0.0])
    reward.adjust_weight(0.5)  # neither
    assert reward.weight == pytest.approx(1.2)
    reward.adjust_weight(0.9)  # it succeeds: 1.2 · 0.9
    assert reward.weight == pytest.approx(1.08)
    assert reward.__name__ == "correctness"


def test_adaptive_reward_keeps_none_extras_and_coroutines() -> None:
    async def f(completions: list[str]) -> list[Any]:
        return [None, {"score": 1.0, "why": "x"}]

    reward = AdaptiveReward(f, 3.0)
    assert combine([reward])(completions=["a", "b"]) == [None, 3.0]
    assert asyncio.run(reward(completions=["a", "b"])) == [None, {"score": 3.0, "why": "x"}]


def test_a_weight_stays_within_its_bounds() -> None:
    adaptive = AdaptiveWeight(1.0, lowest=0.5, highest=2.0)
    for _ in range(10):
        adaptive.adjust(0.0)
    assert adaptive.value == 2.0
    for _ in range(40):
        adaptive.adjust(1.0)
    assert adaptive.value == 0.5


def test_success_is_a_score_of_at_least_one_among_those_that_apply() -> None:
    adaptive = AdaptiveWeight(1.0, low=0.5, high=0.5, up=2.0, down=0.5)
    adaptive.observe([1.0, 1.0, 0.0, math.nan, math.nan])  # 2/3
    assert adaptive.value == 0.5
    adaptive.observe([math.nan])  # says nothing
    assert adaptive.value == 0.5
    adaptive.observe([0.99, 0.0])  # 0
    assert adaptive.value == 1.0


def test_as_a_part_of_a_reward_its_weight_moves_between_steps_and_the_scores_stay_raw() -> None:
    def fails(completions: list[str]) -> list[float]:
        return [0.5] * len(completions)

    rollouts = [Rollout(Prompt(0, "q", (1,)), (5,), (-0.1,), "stop", "x") for _ in range(2)]
    reward = combine([AdaptiveReward(fails, 1.0), one], [0.5, 1.0])
    totals = []
    for step in (1, 2):
        with Scoring(reward, 2, at(step)) as scoring:
            scoring.add(0, rollouts)
            scores = scoring.scores()
        reward.observe(scores.components.flatten(0, 1).T.tolist())
        assert scores.components[..., 0].tolist() == [[0.5, 0.5]]
        totals.append(float(scores.total[0, 0]))
    # 0.5 · 1.0 · 0.5 + 1, then 0.5 · 1.2 · 0.5 + 1
    assert totals == pytest.approx([1.25, 1.3])


# ---- from YAML, in runs

PARTS = "[{name: plugs:digits, weight: {0: 1.0, 4: 0.0}}, {name: length_penalty, weight: {name: adaptive, up: 1.5}}]"
WORDS = (*SMALL, "reward=weighted_sum", f"reward.components={PARTS}", "trainer.save_every=1")


def test_a_run_weighs_by_its_step_and_says_so(tmp_path: Path) -> None:
    assert toolbox_train(*WORDS, "trainer.max_steps=4", "advantage=gdpo", f"run_dir={tmp_path / 'run'}") == 0
    lines = all_metrics(tmp_path / "run")
    assert [line["rewards/digits/weight"] for line in lines] == [0.75, 0.5, 0.25, 0.0]
    # a length penalty of 0 is never a success (below 1), so its weight grows by half each step
    assert [line["rewards/length_penalty/weight"] for line in lines] == pytest.approx([1.0, 1.5, 2.25, 3.375])
    for line in lines:
        parts = [line[f"rewards/{name}/mean"] * line[f"rewards/{name}/weight"] for name in ("digits", "length_penalty")]
        assert line["reward_mean"] == pytest.approx(sum(parts), abs=1e-6)
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["reward"]["components"][0]["weight"] == {0: 1.0, 4: 0.0}


def test_a_resumed_run_goes_on_with_its_weights_bit_for_bit(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert toolbox_train(*WORDS, "trainer.max_steps=4", f"run_dir={whole}") == 0
    assert toolbox_train(*WORDS, "trainer.max_steps=2", f"run_dir={halves}") == 0
    assert toolbox_train(f"resume={halves}", "trainer.max_steps=4") == 0
    assert metrics(halves) == metrics(whole)
    assert differences(state(halves), state(whole)) == []
    assert state(whole)["reward"]["functions"]["length_penalty"]["weights"] == [{"value": pytest.approx(5.0625)}]


def test_a_stateful_function_of_the_users_is_kept_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pays one more in every step: the resumed run must go on counting."""
    (tmp_path / "counting.py").write_text(
        "class Count:\n"
        "    def __init__(self):\n"
        "        self.calls = 0\n"
        "    def __call__(self, completions):\n"
        "        self.calls += 1\n"
        "        return [float(self.calls)] * len(completions)\n"
        "    def state_dict(self):\n"
        "        return {'calls': self.calls}\n"
        "    def load_state_dict(self, state):\n"
        "        self.calls = state['calls']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (*SMALL, "reward=custom", "reward.name=counting:Count", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*words, "trainer.max_steps=2") == 0
    assert toolbox_train(f"resume={tmp_path / 'run'}", "trainer.max_steps=3") == 0
    assert [line["reward_mean"] for line in all_metrics(tmp_path / "run")] == [1.0, 2.0, 3.0]


def test_the_state_of_a_method_is_its_objects_and_a_torch_modules_weights_are_none() -> None:
    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def pay(self, completions: list[str]) -> list[float]:
            self.calls += 1
            return [float(self.calls)] * len(completions)

        def state_dict(self) -> dict[str, int]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    class Net(torch.nn.Linear):
        def forward(self, **kwargs: list[str]) -> list[float]:  # type: ignore[override]
            return [0.0] * len(kwargs["completions"])

    first, second = (combine([Counter().pay, Net(1, 1)]) for _ in range(2))
    first(completions=["a"])
    saved = first.state_dict()
    assert saved["Net"]["function"] is None
    first(completions=["a"])  # what is saved is a copy
    second.load_state_dict(saved)
    assert second(completions=["a"]) == [2.0]


def test_an_adaptive_reward_of_the_users_module_is_plugged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapted.py").write_text(
        "from grpo_toolbox.rewards import AdaptiveReward\n"
        "def base(completions, pay=1.0):\n"
        "    return [pay] * len(completions)\n"
        "struggling = AdaptiveReward(base, initial_weight=2.0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = build_reward("adapted:struggling", pay=0.5)
    assert reward(completions=["a"]) == [1.0]
    reward.observe([[0.5]])
    assert reward(completions=["a"]) == [pytest.approx(1.2)]
    assert (reward.name, reward.components[0].name) == ("base", "base")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("[{name: format, weight: {0: x}}]", r"reward\.components\[0\]\.weight has 0: 'x'"),
        (
            "[{name: format, weight: {name: adaptive, lw: 1}}]",
            r"reward\.components\[0\]\.weight: lw=1 is not an option",
        ),
        ("[{name: format, weight: plugs:nothing}]", r"reward\.components\[0\]\.weight\.name='plugs:nothing'"),
        ("[{name: format, heldout: format}]", r"reward\.components\[0\]\.heldout is a setting of the whole reward"),
        ("[{name: format, timeout_s: 0}]", r"reward\.components\[0\]\.timeout_s=0 is not seconds above 0"),
    ],
)
def test_mistakes_on_the_command_line_are_named_before_a_model_is_loaded(parts: str, message: str) -> None:
    assert re.search(message, refused("reward=weighted_sum", f"reward.components={parts}"))


def test_weights_are_of_the_run_not_of_the_process() -> None:
    built: Callable[..., Any] = lambda: built_run(*WORDS, "trainer.max_steps=1")  # noqa: E731
    first, second = built(), built()
    first.reward.observe([[0.0], [0.0]])
    assert torch.tensor([part.weight_at(at(1)) for part in second.reward.components]).tolist() == [0.75, 1.0]
