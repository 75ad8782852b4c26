"""Rollouts made in the background: the same numbers, whatever the clock does, and nothing lost on the way."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

import plugs
from grpo_toolbox.batch import denominators
from grpo_toolbox.callbacks import Callback
from grpo_toolbox.clock import Clock
from grpo_toolbox.errors import EngineError
from grpo_toolbox.evaluation import evaluate
from grpo_toolbox.experience import batch_of, experiences
from grpo_toolbox.run import Experience, Generation, Run
from grpo_toolbox.source import Background
from grpo_toolbox.staleness import age_metrics, drawn_since, group_ages
from grpo_toolbox.trainer import train
from grpo_toolbox.types import Prompt, Rollout, Scores, Step
from test_resume import FORKING, environment, started, wait_for
from toolbox_runs import SMALL, built_run, checkpoints, differences, metrics, one_thread, state, steps, toolbox_train

DIGITS = (*SMALL, "reward=custom", "reward.name=plugs:digits", "trainer.schedule=constant", "trainer.lr=0.01")
TRACED = (*DIGITS, "callbacks.trace_rollouts={every: 1}")
LINGERING = (*TRACED, "reward.name=test_async:lingering")
EVALUATED = ("data.eval_size=2", "rollout.prompts_per_step=3", "trainer.eval_every=2", "trainer.eval_temperature=1")
_lingers = random.Random()


def ahead(k: int) -> tuple[str, ...]:
    return "rollout.async.enabled=true", f"rollout.async.max_staleness={k}"


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Sums in one order; and no test leaves a thread of the background behind."""
    plugs.start_counting()
    with one_thread():
        yield
    assert [one.name for one in threading.enumerate() if one.name == "rollouts"] == []


def lingering(completions: list[str], trainer_state: Any) -> list[float]:
    """`plugs.digits` with noise from Python's generator, after a pause that is another one in each run."""
    time.sleep(_lingers.uniform(0, 0.02))
    plugs._stop("evaluation" if trainer_state.evaluating else "rollouts", trainer_state.step)
    return [value + 0.1 * random.random() for value in plugs.digits(completions)]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [{key: value for key, value in line.items() if key != "async/queue_depth"} for line in metrics(run_dir)]


def assert_same(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    assert traces(one) == traces(other)
    first, second = ({**state(run_dir), "snapshot": None} for run_dir in (one, other))
    for saved in (first, second):  # which of the steps ahead were finished when it was saved depends on the clock
        for key in ("ahead", "data", "reward", "rng"):
            del saved[key]
    assert differences(first, second) == []


def traces(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "traces" / "actions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def versions(run_dir: Path) -> dict[int, int]:
    """By step, the version of the weights that drew its rollouts: one for all of them."""
    found = {(line["step"], line["weights_version"]) for line in traces(run_dir)}
    assert len(found) == len(dict(found))
    return dict(found)


def prompts(run_dir: Path) -> list[int]:
    return [line["prompt_id"] for line in traces(run_dir) if line["index"] == 0]


# ---- the same numbers


SYNCHRONOUS = {
    "full": (
        *(*SMALL, "reward=custom", "reward.name=plugs:noisy", *EVALUATED, "trainer.save_every=2"),
        *("trainer.ppo_epochs=2", "trainer.micro_batch_tokens=40", "objective.beta=0.1"),
    ),
    "lora": (*SMALL, "reward=custom", "reward.name=plugs:noisy", "model.lora.r=2", "model.lora.dropout=0.1"),
    "dynamic": (*DIGITS, "rollout.dynamic_sampling=true", "rollout.prompts_per_step=3", "rollout.max_oversampling=2"),
    "generation": (*DIGITS, "rollout.steps_per_generation=2", "rollout.prompts_per_step=3", "trainer.ppo_epochs=2"),
    "plain_engine": (*DIGITS, "rollout.engine=hf", "objective=ppo_clip", "advantage=rloo"),
    "critic": (*DIGITS, "advantage=gae", "objective=ppo_clip", "objective.beta=0.1", "objective.kl_in=reward"),
}


ALWAYS = ["full", "generation"]
SELDOM = [name for name in SYNCHRONOUS if name not in ALWAYS]


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(one, marks=pytest.mark.slow) for one in SELDOM)])
def test_without_staleness_it_is_synchronous_training_bit_for_bit(name: str, tmp_path: Path) -> None:
    given = (*SYNCHRONOUS[name], "callbacks.trace_rollouts={every: 1}", "trainer.max_steps=4")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'plain'}") == 0
    plugs.start_counting()
    assert toolbox_train(*given, *ahead(0), f"run_dir={tmp_path / 'ahead'}") == 0
    lines = [
        {key: value for key, value in line.items() if not key.startswith("async/")}
        for line in metrics(tmp_path / "ahead")
    ]
    assert lines == metrics(tmp_path / "plain")
    assert traces(tmp_path / "ahead") == traces(tmp_path / "plain")
    one, other = state(tmp_path / "ahead"), state(tmp_path / "plain")
    assert one.pop("ahead")["queue"] == []
    assert differences(one, other) == []


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_which_weights_sample_what_is_counted_and_not_timed(k: int, tmp_path: Path) -> None:
    """Two runs whose rewards linger for other times are one run; step n learns from weights n − 1 − k."""
    given = (*LINGERING, *ahead(k), *EVALUATED, "trainer.max_steps=7")
    for name in ("one", "other"):
        assert toolbox_train(*given, f"run_dir={tmp_path / name}") == 0
    assert_same(tmp_path / "one", tmp_path / "other")
    assert versions(tmp_path / "one") == {step: max(0, step - 1 - k) for step in range(1, 8)}
    ages = [line["async/age_max"] for line in numbers(tmp_path / "one") if line["step"]]
    assert ages == [min(step - 1, k) for step in range(1, 8)]


def test_steps_that_share_a_generation_count_from_the_first_of_them(tmp_path: Path) -> None:
    """S = 2 steps share a generation and k = 1: the one for steps 3 and 4 is sampled by the weights of step 1."""
    given = (*TRACED, *ahead(1), "rollout.steps_per_generation=2", "rollout.prompts_per_step=2", "trainer.max_steps=6")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    assert versions(tmp_path / "run") == {1: 0, 2: 0, 3: 1, 4: 1, 5: 3, 6: 3}
    assert [line["async/age_max"] for line in numbers(tmp_path / "run")] == [0, 1, 1, 2, 1, 2]


def test_no_prompt_is_lost_and_none_comes_twice(tmp_path: Path) -> None:
    """Six prompts, four a step: the same order as in synchronous training, three steps ahead or not."""
    assert toolbox_train(*TRACED, "trainer.max_steps=9", f"run_dir={tmp_path / 'plain'}") == 0
    assert toolbox_train(*LINGERING, *ahead(3), "trainer.max_steps=9", f"run_dir={tmp_path / 'ahead'}") == 0
    assert prompts(tmp_path / "ahead") == prompts(tmp_path / "plain")
    assert len(prompts(tmp_path / "ahead")) == 36
    assert [line["async/prompts_drawn"] for line in numbers(tmp_path / "ahead")] == [4 * step for step in range(1, 10)]


class Positions(Callback):
    """How many prompts have been handed out by the end of each step, with a trainer that takes its time."""

    def __init__(self, run: Run) -> None:
        self._run, self.seen = run, []

    def on_step(self, step: Step) -> None:
        time.sleep(0.05)
        self.seen.append(self._run.data.state_dict()["position"] - 4 * step.number)


def test_the_background_gets_no_further_ahead_than_it_may(tmp_path: Path) -> None:
    """After step n it may be at work for step n + 1 + k, 4 prompts a step, and a slow trainer finds it there."""
    run = built_run(*DIGITS, *ahead(2), "trainer.max_steps=6", f"run_dir={tmp_path / 'run'}")
    positions = Positions(run)
    run.callbacks = [positions]
    train(run)
    assert max(positions.seen) == 12
    assert positions.seen[-1] == 0  # nothing is sampled that no step is left for


class Evaluations(Callback):
    """Evaluates the policy itself, beside the evaluation of the run."""

    def __init__(self, run: Run) -> None:
        self._run, self.pairs = run, []

    def on_step(self, step: Step) -> None:
        run = built_run(*DIGITS, *EVALUATED, f"run_dir={self._run.info.run_dir / str(step.number)}")
        run.policy.load_state_dict(self._run.policy.state_dict())
        found = evaluate(run, run.eval_prompts)
        self.pairs.append((step.metrics["eval/reward"], found["eval/reward"]))


def test_an_evaluation_is_of_the_newest_weights(tmp_path: Path) -> None:
    run = built_run(
        *DIGITS, *EVALUATED, *ahead(2), "trainer.eval_every=1", "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}"
    )
    evaluations = Evaluations(run)
    run.callbacks = [evaluations]
    train(run)
    assert len(evaluations.pairs) == 5
    assert all(one == other for one, other in evaluations.pairs)
    assert len(set(evaluations.pairs)) > 2


# ---- weights that come in flight


@pytest.mark.parametrize("how", [pytest.param("keep", marks=pytest.mark.slow), "recompute"])
def test_weights_come_in_flight(how: str, tmp_path: Path) -> None:
    """The trainer waits for nobody while long completions are drawn, so newer weights come half-way."""
    given = (
        *LINGERING,
        *ahead(2),
        f"rollout.async.in_flight={how}",
        "rollout.max_new_tokens=60",
        "trainer.max_steps=8",
    )
    assert toolbox_train(*given, "reward.name=plugs:digits", f"run_dir={tmp_path / 'run'}") == 0
    lines = numbers(tmp_path / "run")
    assert all(0 <= line["async/age_mean"] <= line["async/age_max"] <= 2 for line in lines)
    assert prompts(tmp_path / "run") == prompts_in_order(tmp_path, 8)


def prompts_in_order(tmp_path: Path, count: int) -> list[int]:
    assert toolbox_train(*TRACED, f"trainer.max_steps={count}", f"run_dir={tmp_path / 'in_order'}") == 0
    return prompts(tmp_path / "in_order")


# ---- too old


def made(versions: Sequence[Sequence[tuple[int, int]]]) -> list[Rollout]:
    """Groups of two completions, of three tokens each that weights of these versions drew."""
    return [
        Rollout(
            Prompt(place, "", (5,)), (6, 7, 8), (-1.0, -2.0, -3.0), "length", "", stretches[-1][0], tuple(stretches)
        )
        for place, stretches in enumerate(versions)
        for _ in range(2)
    ]


OLD = made([[(3, 3)], [(1, 2), (3, 1)], [(0, 3)]])
"""In step 5, of whose weights the version is 4, the oldest tokens of the three groups are 1, 3 and 4 updates old."""


def test_ages_are_of_the_oldest_token() -> None:
    assert group_ages(OLD, 2, 5) == [1, 3, 4]
    assert group_ages(OLD, 6, 5) == [4]
    assert drawn_since(OLD[::2], 2).tolist() == [[True] * 3, [False, False, True], [False] * 3]
    assert age_metrics(OLD, 2, 5) == {
        **{"async/age_mean": 8 / 3, "async/age_max": 4},
        **{"async/groups_of_age/1": 1, "async/groups_of_age/3": 1, "async/groups_of_age/4": 1},
    }


def of_old(run_dir: Path, *words: str) -> tuple[Run, list[Experience]]:
    """A run, and what its step 5 learns from the old rollouts."""
    run = built_run(*DIGITS, "rollout.group_size=2", *words, f"run_dir={run_dir}")
    total = torch.tensor([[0.0, 1.0]] * 3)
    scores = Scores(("reward",), (1.0,), total.unsqueeze(2), total)
    return run, experiences(run, Generation(5, OLD, scores, [0, 1, 2], ahead=True), 5, Clock())


@pytest.mark.parametrize(("k", "kept"), [(3, [0, 1]), (0, None)])
def test_groups_that_are_too_old_are_dropped_and_counted(k: int, kept: list[int] | None, tmp_path: Path) -> None:
    """Where all of them are, nothing is left to learn from."""
    run, learnt = of_old(tmp_path / "run", *ahead(k))
    assert [one.kept for one in learnt] == ([] if kept is None else [kept])
    for one in learnt:
        assert one.metrics == {"async/groups_dropped": 1.0, "async/tokens_masked": 0.0}
        assert batch_of(run, one).completions == ((6, 7, 8),) * 4


def test_or_the_tokens_that_are_too_old_are_masked(tmp_path: Path) -> None:
    """With k = 2, tokens of weights 2 and newer are trained and counted in denominators: twice four of nine."""
    run, (one,) = of_old(tmp_path / "run", *ahead(2), "rollout.async.on_stale=mask")
    assert one.kept == [0, 1, 2]
    assert one.metrics == {"async/groups_dropped": 0.0, "async/tokens_masked": 10.0}
    batch = batch_of(run, one)
    assert batch.mask[::2].tolist() == [[True] * 3, [False, False, True], [False] * 3]
    assert denominators(batch, 3).tokens == 8


@pytest.mark.parametrize(
    ("word", "is_to_the_sampler"),
    [("", True), ("objective.correction=token_truncate", False), ("rollout.reuse_logps=false", False)],
)
def test_the_ratio_of_stale_rollouts_is_to_who_drew_them_unless_a_correction_is(
    word: str, is_to_the_sampler: bool, tmp_path: Path
) -> None:
    run, (one,) = of_old(tmp_path / "run", *ahead(9), *word.split())
    old = batch_of(run, one).old_logps
    if is_to_the_sampler:
        assert old is not None
        assert torch.equal(old, torch.tensor([[-1.0, -2.0, -3.0]] * 6))
    else:  # the policy as the update begins
        assert old is None


# ---- stopped, failed, resumed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, two ahead, never stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with one_thread():
        assert toolbox_train(*STOPPING, f"run_dir={run_dir}") == 0
    return run_dir


STOPPING = (
    *(*LINGERING, *ahead(2), *EVALUATED, "trainer.max_steps=6", "objective.name=plugs:clipped_and_stopping"),
    *("objective.beta=0.1", "trainer.micro_batch_tokens=1000"),
)


WHERE = ["SIGTERM:rollouts:5", "SIGINT:update:4"]
OFTEN = [
    "SIGTERM:evaluation:5",
    "SIGINT:rollouts:3",
    "SIGTERM:rollouts:2",
    "SIGTERM:update:2",
    "SIGINT:update:5",
    "SIGINT:evaluation:3",
]


@pytest.mark.parametrize("where", [*WHERE, *(pytest.param(one, marks=pytest.mark.slow) for one in OFTEN)])
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_had_not_been(
    where: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the background samples or scores, while the trainer updates, or in an evaluation."""
    monkeypatch.setenv("STOP_AT", where)
    run_dir = tmp_path / "run"
    assert toolbox_train(*STOPPING, f"run_dir={run_dir}") == {"SIGTERM": 143, "SIGINT": 130}[where.partition(":")[0]]
    assert 1 <= steps(run_dir)[-1] < 6
    assert checkpoints(run_dir)[-1] == steps(run_dir)[-1]
    assert toolbox_train(f"resume={run_dir}") == 0
    assert_same(run_dir, whole)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("rollout.async.max_staleness=0",), marks=pytest.mark.slow),
        ("rollout.async.enabled=false",),
    ],
)
def test_what_had_been_made_ahead_is_kept(changes: tuple[str, ...], tmp_path: Path) -> None:
    """Resumed with less staleness or none, the prompts go on in the same order."""
    given = (*TRACED, *ahead(3), "rollout.async.on_stale=mask")
    assert toolbox_train(*given, "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}") == 0
    assert toolbox_train(f"resume={tmp_path / 'run'}", "trainer.max_steps=9", *changes) == 0
    assert prompts(tmp_path / "run") == prompts_in_order(tmp_path, 9)


def test_a_run_whose_rollouts_are_dropped_takes_its_steps_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped with two steps ahead and resumed with k = 0, what had waited is too old: it is dropped and counted."""
    given = (*LINGERING, *ahead(2), "objective.name=plugs:clipped_and_stopping", "trainer.micro_batch_tokens=1000")
    monkeypatch.setenv("STOP_AT", "SIGTERM:update:5")
    assert (
        toolbox_train(*given, "trainer.max_steps=8", "reward.name=test_async:hurried", f"run_dir={tmp_path / 'run'}")
        == 143
    )
    waiting = len(state(tmp_path / "run")["ahead"]["queue"])
    finished = steps(tmp_path / "run")[-1]
    assert toolbox_train(f"resume={tmp_path / 'run'}", "rollout.async.max_staleness=0") == 0
    assert steps(tmp_path / "run") == list(range(1, 9))
    line = numbers(tmp_path / "run")[finished]
    assert line["async/groups_dropped"] == 4 * waiting
    assert waiting > 0


def hurried(completions: list[str]) -> list[float]:
    return plugs.digits(completions)


def test_a_failure_in_the_background_stops_the_run_when_its_step_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 1 and 2 are trained and saved first, as in synchronous training, though step 3 failed before."""
    given = (*DIGITS, *ahead(2), "reward.name=plugs:failing_at_3", "trainer.max_steps=6", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*given) == 1
    assert "reward 'failing_at_3' failed on prompt" in capsys.readouterr().err
    assert checkpoints(tmp_path / "run") == [2]
    assert toolbox_train(f"resume={tmp_path / 'run'}", "reward.name=plugs:digits") == 0
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


class DyingEngine:
    """Draws three times, and is dead from then on."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._left = engine, 3

    def generate(self, *args: Any) -> list[Rollout]:
        self._left -= 1
        if self._left < 0:
            raise EngineError("nobody answers")
        return self._engine.generate(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_an_engine_that_dies_in_the_background_stops_the_run_with_its_state_saved(tmp_path: Path) -> None:
    run = built_run(*DIGITS, *ahead(2), "trainer.max_steps=6", f"run_dir={tmp_path / 'run'}")
    run.engine = DyingEngine(run.engine)
    with pytest.raises(EngineError, match="nobody answers"):
        train(run)
    assert checkpoints(tmp_path / "run") == [3]


def test_a_stop_does_not_wait_for_rewards_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_AT", "SIGTERM:update:2")
    given = (*DIGITS, *ahead(2), "reward.name=test_async:endless", "objective.name=plugs:clipped_and_stopping")
    began = time.monotonic()
    assert toolbox_train(*given, "trainer.max_steps=6", f"run_dir={tmp_path / 'run'}") == 143
    assert time.monotonic() - began < 60


async def endless(completions: list[str], trainer_state: Any) -> list[float]:
    if trainer_state.step > 1:
        await asyncio.sleep(600)
    return plugs.digits(completions)


@pytest.mark.slow
def test_kills_at_random_instants_change_nothing(tmp_path: Path) -> None:
    """A process that imports everything forks one `toolbox train` after the other and kills each somewhere."""
    given = (*LINGERING, *ahead(2), *EVALUATED, "trainer.max_steps=25", "trainer.save_every=1")
    command = [sys.executable, "-c", FORKING, str(tmp_path / "killed"), "25", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    kills, code = map(int, done.stdout.split())
    assert code == 0, done.stderr
    assert kills >= 3
    assert toolbox_train(*given, f"run_dir={tmp_path / 'whole'}") == 0
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGINT"])
def test_a_process_that_is_stopped_ends_at_once(name: str, tmp_path: Path) -> None:
    """With the background in the middle of long completions, and no noise of a thread that was cut off."""
    given = (*DIGITS, *ahead(2), "rollout.max_new_tokens=100", "rollout.group_size=16", "trainer.max_steps=100000")
    run_dir = tmp_path / "run"
    with started(*given, f"run_dir={run_dir}") as process:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(steps(run_dir)) > 2, process)
        process.send_signal(signal.Signals[name])
        _, complained = process.communicate(timeout=300)
    assert process.returncode == {"SIGTERM": 143, "SIGINT": 130}[name]
    assert "Traceback" not in complained
    assert checkpoints(run_dir) == [steps(run_dir)[-1]]


# ---- settings


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("rollout.async.max_staleness=-1", "rollout.async.max_staleness=-1 must be a finite number of at least 0"),
        ("rollout.async.on_stale=forget", "rollout.async.on_stale='forget' is not an option: drop, mask"),
        ("rollout.async.in_flight=kept", "Did you mean keep?"),
        ("rollout.async.max_stalenes=2", "Did you mean rollout.async.max_staleness?"),
        ("rollout.asinc.enabled=true", "Did you mean rollout.async?"),
        ("rollout.async.enabled=perhaps", "rollout.async.enabled='perhaps' is not true or false"),
        ("rollout.async=true", "rollout.async"),
        ("rollout.engine=hf rollout.async.in_flight=keep", "needs rollout.engine=local"),
    ],
)
def test_a_setting_that_cannot_be_is_said_to_be(word: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert toolbox_train("rollout.async.enabled=true", *word.split()) == 1
    assert complaint in capsys.readouterr().err


def test_it_can_be_set_in_an_experiment_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/experiment").mkdir(parents=True)
    text = "# @package _global_\nrollout:\n  max_new_tokens: 4\n  async: {enabled: true, max_staleness: 3}\n"
    Path("conf/experiment/mine.yaml").write_text(text)
    run = built_run("--config-dir", "conf", "experiment=mine", "model=tiny", "data=additions", "run_dir=run")
    assert isinstance(run.source, Background)
    assert run.generation.max_staleness == 3


# ---- learning


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2])
def test_the_learning_curve_is_that_of_synchronous_training(k: int, tmp_path: Path) -> None:
    """By the number of samples: the mean reward over all steps, and over the last ones, within what seeds differ by."""
    curves = {}
    for name, words in {"plain": (), "ahead": ahead(k)}.items():
        for seed in (0, 1, 2):
            given = ("experiment=grpo_tiny", "callbacks=none", "trainer.max_steps=300", f"trainer.seed={seed}", *words)
            assert toolbox_train(*given, f"run_dir={tmp_path / f'{name}-{seed}'}") == 0
            curves[name, seed] = [line["reward_mean"] for line in metrics(tmp_path / f"{name}-{seed}")]
    for part in (slice(None), slice(-50, None)):
        plain, stale = ([fmean(curves[name, seed][part]) for seed in (0, 1, 2)] for name in ("plain", "ahead"))
        noise = max(stdev(plain), stdev(stale), 0.01)
        assert abs(fmean(plain) - fmean(stale)) < 3 * noise, (plain, stale)
