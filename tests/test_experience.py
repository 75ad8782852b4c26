"""Which groups are trained, and how often: dynamic sampling, generations that serve several steps, truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plugs
from grpo_toolbox.callbacks import Callback
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.experience import batch_of, from_state, next_experience, to_state
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.trainer import train
from grpo_toolbox.types import Step
from grpo_toolbox.update import update
from toolbox_runs import SMALL, built_run, differences, metrics, one_thread, state, toolbox_train

PAID = (*SMALL, "reward=custom", "reward.name=plugs:digits", "objective=ppo_clip", "trainer.lr=0.01")
EASY = (*SMALL, "reward=custom", "reward.name=test_experience:paid_by_prompt", "objective=ppo_clip")
"""Six prompts with the answers 0, 1, 1, 2, 2, 2: those with the answer 2 have spread, the others have none."""


def clock(stage: str) -> Any:
    return nullcontext()


def paid_by_prompt(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 and 0 by turns where the answer is 2; 1 for all where it is 1, 0 for all where it is 0."""
    return [float(index % 2) if one == "2" else float(one) for index, one in enumerate(answer)]


def ones(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    return 1 + 0 * logps, torch.zeros_like(logps, dtype=torch.bool)


def never(completions: Sequence[str]) -> list[float]:
    return [0.0] * len(completions)


def answers(experience: Experience, group_size: int) -> list[str]:
    return [one.prompt.columns["answer"] for one in experience.rollouts[::group_size]]


class Listener(Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step)


def trained(run: Run) -> list[Step]:
    listener = Listener()
    run.callbacks = [listener]
    train(run)
    return listener.steps


# ---- dynamic sampling


def test_groups_without_spread_are_dropped_and_the_batch_is_filled_up(tmp_path: Path) -> None:
    """Three of six prompts have spread; three are wanted. Unshuffled the data is 0, 1, 2, 1, 2, 2.

    Draw 3: answers 0, 1, 2, of which one has spread. Draw the two that lack: 1, 2. Draw one more: 2. Six groups were
    sampled for the three wanted: oversampling 2, three dropped.
    """
    given = ("rollout.dynamic_sampling=true", "rollout.prompts_per_step=3", "data.shuffle=false")
    run = built_run(*EASY, *given, f"run_dir={tmp_path / 'run'}")
    learnt = next_experience(run, 1, clock)
    assert answers(learnt, 4) == ["0", "1", "2", "1", "2", "2"]
    assert learnt.kept == [2, 4, 5]
    assert learnt.metrics == {"rollout/groups_dropped": 3.0, "rollout/oversampling": 2.0}
    assert torch.equal(learnt.advantages[[0, 1, 3]], torch.zeros(3, 4))
    assert (learnt.advantages[[2, 4, 5]].abs() > 0.5).all()
    batch = batch_of(run, learnt)
    assert [batch.prompts[group] for group in batch.group[::4]] == [
        learnt.rollouts[4 * group].prompt.ids for group in learnt.kept
    ]
    assert run.data.state_dict()["position"] == 6


def test_the_ceiling_ends_the_search(tmp_path: Path) -> None:
    """At most 2 × 2 groups: the answers 0, 1, 2, 1 hold one with spread, and the step is trained on it alone."""
    given = ("rollout.dynamic_sampling=true", "rollout.prompts_per_step=2", "rollout.max_oversampling=2")
    run = built_run(*EASY, *given, "data.shuffle=false", f"run_dir={tmp_path / 'run'}")
    learnt = next_experience(run, 1, clock)
    assert answers(learnt, 4) == ["0", "1", "2", "1"]
    assert learnt.kept == [2]
    assert learnt.metrics == {"rollout/groups_dropped": 3.0, "rollout/oversampling": 2.0}
    assert len(batch_of(run, learnt)) == 4


def test_with_a_ceiling_of_one_groups_are_dropped_and_not_replaced(tmp_path: Path) -> None:
    given = ("rollout.dynamic_sampling=true", "rollout.prompts_per_step=3", "rollout.max_oversampling=1")
    run = built_run(*EASY, *given, "data.shuffle=false", f"run_dir={tmp_path / 'run'}")
    learnt = next_experience(run, 1, clock)
    assert (answers(learnt, 4), learnt.kept) == (["0", "1", "2"], [2])
    assert learnt.metrics == {"rollout/groups_dropped": 2.0, "rollout/oversampling": 1.0}


def test_denominators_count_the_kept_groups_alone(tmp_path: Path) -> None:
    """The step on three groups of which one is kept is the step on that one: dropped groups thin nothing out."""
    given = ("rollout.dynamic_sampling=true", "rollout.prompts_per_step=3", "rollout.max_oversampling=1")
    run = built_run(*EASY, *given, "data.shuffle=false", f"run_dir={tmp_path / 'run'}")
    learnt = next_experience(run, 1, clock)
    batch = batch_of(run, learnt)
    tokens = sum(len(one.ids) for one in learnt.rollouts[8:12])
    assert float(batch.mask.sum()) == tokens
    run.objective = replace(run.objective, surrogate=ones)
    assert update(run, batch, 1)["loss"] == pytest.approx(1)  # a mean of ones over what it is divided by


def test_a_run_of_steps_without_any_spread_stops_and_says_so(tmp_path: Path) -> None:
    given = ("reward=custom", "reward.name=test_experience:never", "rollout.dynamic_sampling=true")
    run = built_run(*SMALL, *given, "rollout.max_oversampling=1", "trainer.max_steps=9", f"run_dir={tmp_path / 'run'}")
    listener = Listener()
    run.callbacks = [listener]
    with pytest.raises(TrainingError, match="3 steps in a row found no group whose rewards differ"):
        train(run)
    assert [step.number for step in listener.steps] == [1, 2]
    for step in listener.steps:
        assert (step.metrics["loss"], step.metrics["rollout/groups_dropped"]) == (0, 4)
        assert all(math.isfinite(value) for value in step.metrics.values())


def test_one_group_with_spread_starts_the_count_of_empty_steps_again(tmp_path: Path) -> None:
    run = built_run(*EASY, "rollout.dynamic_sampling=true", "rollout.prompts_per_step=1", f"run_dir={tmp_path / 'run'}")
    run.empty_steps = 2
    next_experience(run, 1, clock)
    assert run.empty_steps == 0


# ---- generations that serve several steps

SEVERAL = (
    *PAID,
    *("rollout.prompts_per_step=1", "rollout.steps_per_generation=4", "trainer.max_steps=8", "data.shuffle=false"),
)


def test_a_generation_is_dealt_out_in_portions_of_a_step(tmp_path: Path) -> None:
    """Four prompts at once, one a step; from the second on π_old's log-probs are the sampler's."""
    run = built_run(*SEVERAL, f"run_dir={tmp_path / 'run'}")
    portions = [next_experience(run, number, clock) for number in range(1, 9)]
    ids = [one.rollouts[0].prompt.id for one in portions]
    assert ids == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [one.off_policy for one in portions] == [False, True, True, True] * 2
    first, second = (batch_of(run, one) for one in portions[:2])
    assert first.old_logps is None
    assert second.old_logps is not None
    assert torch.equal(second.old_logps, second.sampler_logps)


def test_advantages_of_a_generation_are_estimated_once_over_all_of_it(tmp_path: Path) -> None:
    """batch_normalized: the std is that of the 16 rewards of the generation, not of the 4 of a portion."""
    run = built_run(*SEVERAL, "advantage=batch_normalized", f"run_dir={tmp_path / 'run'}")
    portions = [next_experience(run, number, clock) for number in range(1, 5)]
    rewards = torch.cat([one.scores.total for one in portions])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
    assert torch.allclose(torch.cat([one.advantages for one in portions]), expected.float(), atol=1e-5)


def test_several_passes_repeat_the_portions_in_their_order(tmp_path: Path) -> None:
    """TRL: the slices of the buffer are gone through num_iterations times, in one order."""
    run = built_run(*SEVERAL, "trainer.ppo_epochs=2", f"run_dir={tmp_path / 'run'}")
    portions = [next_experience(run, number, clock) for number in range(1, 9)]
    assert [one.rollouts[0].prompt.id for one in portions] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [one.off_policy for one in portions] == [False] + [True] * 7
    assert run.pending == []


def test_each_portion_is_one_optimizer_step_and_later_ones_are_off_policy(tmp_path: Path) -> None:
    steps = trained(built_run(*SEVERAL, "trainer.ppo_epochs=2", f"run_dir={tmp_path / 'run'}"))
    ratios = [step.metrics["ratio"] for step in steps]
    assert ratios[0] == 1
    assert all(abs(ratio - 1) > 1e-6 for ratio in ratios[1:])
    versions = [step.rollouts[0].weights_version for step in steps]
    assert versions == [0] * 8


IN_HALF = (*SEVERAL, "trainer.precision=bfloat16")
"""The engine decodes token by token and the trainer packs: in half precision their log-probs are not the same."""


def test_in_half_precision_later_steps_take_the_trainers_own_log_probs(tmp_path: Path) -> None:
    """π_old is what the trainer says before the first of the steps, so that the ratio of an unmoved policy is 1."""
    run = built_run(*IN_HALF, f"run_dir={tmp_path / 'run'}")
    first, *later = (batch_of(run, next_experience(run, number, clock)) for number in range(1, 5))
    assert first.old_logps is None
    for batch in later:
        assert batch.old_logps is not None
        assert torch.equal(batch.mask, batch.old_logps != 0)
        assert not torch.equal(batch.old_logps, batch.sampler_logps)
    unmoved = update(run, later[0], 1)
    assert unmoved["ratio"] == pytest.approx(1, abs=1e-6)
    assert unmoved["sampler/logp_gap_mean"] > 1e-4  # the engine is compared with the trainer, not with itself


def test_the_first_portion_needs_log_probs_of_its_own_only_where_it_comes_again(tmp_path: Path) -> None:
    once = next_experience(built_run(*IN_HALF, f"run_dir={tmp_path / 'once'}"), 1, clock)
    run = built_run(*IN_HALF, "trainer.ppo_epochs=2", f"run_dir={tmp_path / 'twice'}")
    passes = [next_experience(run, number, clock) for number in range(1, 9)]
    assert once.old_logps is None
    assert batch_of(run, passes[0]).old_logps is None
    assert batch_of(run, passes[4]).old_logps is passes[0].old_logps


@pytest.mark.parametrize(
    ("words", "reuses"),
    [
        ([], True),
        (["rollout.engine=hf"], True),
        (["trainer.precision=bfloat16"], False),
        (["model.dtype=bfloat16"], False),
        (["rollout.reuse_logps=false"], False),
        (["trainer.precision=bfloat16", "rollout.reuse_logps=true"], True),
    ],
    ids=str,
)
def test_the_engines_log_probs_serve_where_it_rounds_as_the_trainer_does(
    words: list[str], reuses: bool, tmp_path: Path
) -> None:
    run = built_run(*SEVERAL, *words, f"run_dir={tmp_path / 'run'}")
    assert run.generation.reuse_logps == reuses
    portions = [next_experience(run, number, clock) for number in range(1, 5)]
    assert [one.old_logps is None for one in portions] == [True, reuses, reuses, reuses]


class Elsewhere(LocalEngine):
    """An engine that does not vouch for its log-probs, as one in another process would not."""

    traits = replace(LocalEngine.traits, exact=False)


def test_it_is_the_engine_that_says_whether_they_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_toolbox.config.engine.LocalEngine", Elsewhere)
    assert not built_run(*SEVERAL, f"run_dir={tmp_path / 'run'}").generation.reuse_logps
    assert built_run(*SEVERAL, "rollout.reuse_logps=true", f"run_dir={tmp_path / 'other'}").generation.reuse_logps


def test_whose_log_probs_they_are_makes_no_difference_in_float32(tmp_path: Path) -> None:
    """Two generations of four steps, the gradient clipped by the ratio: parameters agree to the rounding of Adam."""
    runs = [
        built_run(*SEVERAL, "objective=gspo", f"rollout.reuse_logps={reuse}", f"run_dir={tmp_path / reuse}")
        for reuse in ("true", "false")
    ]
    for run in runs:
        trained(run)
    one, other = (parameters(run) for run in runs)
    assert float((one - other).norm() / one.norm()) < 1e-5


def test_in_half_precision_the_kl_in_the_reward_is_the_trainers(tmp_path: Path) -> None:
    """Of an unmoved policy to its own reference it is exactly 0; by the engine's log-probs it would be noise."""
    given = ("advantage=reinforce_pp", "objective.beta=0.5", "objective.kl=k1", "objective.kl_in=reward")
    run = built_run(*PAID, *given, "trainer.precision=bfloat16", f"run_dir={tmp_path / 'run'}")
    assert next_experience(run, 1, clock).metrics["kl"] == 0
    noisy = replace(run, generation=replace(run.generation, reuse_logps=True), pending=[])
    assert next_experience(noisy, 2, clock).metrics["kl"] != 0


def test_the_trainers_log_probs_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    run = built_run(*IN_HALF, f"run_dir={tmp_path / 'run'}")
    next_experience(run, 1, clock)
    again = from_state(to_state(run.pending), Experience)
    assert len(again) == 3
    for one, other in zip(again, run.pending, strict=True):
        assert one.old_logps is not None
        assert other.old_logps is not None
        assert torch.equal(one.old_logps, other.old_logps)


def test_what_a_generation_counted_is_reported_once(tmp_path: Path) -> None:
    given = ("reward.on_error=skip", "reward.name=plugs:failing_at_3", "rollout.dynamic_sampling=true")
    steps = trained(built_run(*SEVERAL, *given, "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}"))
    assert ["rollout/oversampling" in step.metrics for step in steps] == [True, False, False, False]
    assert ["time/failing_at_3" in step.metrics for step in steps] == [True, False, False, False]


def test_dropped_groups_are_seen_with_the_first_portion(tmp_path: Path) -> None:
    """Two steps of one group: the answers 0, 1 and then 2, 1, then 2 are sampled, two have spread."""
    given = ("rollout.dynamic_sampling=true", "rollout.prompts_per_step=1", "rollout.steps_per_generation=2")
    run = built_run(*EASY, *given, "data.shuffle=false", f"run_dir={tmp_path / 'run'}")
    one, two = (next_experience(run, number, clock) for number in (1, 2))
    assert (answers(one, 4), one.kept) == (["0", "1", "2", "1"], [2])
    assert (answers(two, 4), two.kept) == (["2"], [0])
    assert run.pending == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_generation_serves_its_steps_whether_the_run_is_resumed_or_not(epochs: int, tmp_path: Path) -> None:
    """Case i05.1: generation 1 serves steps 1 to 4, generation 2 steps 5 to 8; the buffer is in the checkpoint."""
    plugs.start_counting()
    given = (*SEVERAL, f"trainer.ppo_epochs={epochs}", "callbacks.trace_rollouts={every: 1}")
    with one_thread():
        assert toolbox_train(*given, f"run_dir={tmp_path / 'whole'}") == 0
        assert toolbox_train(*given, "trainer.max_steps=2", f"run_dir={tmp_path / 'halves'}") == 0
        assert toolbox_train(f"resume={tmp_path / 'halves'}", "trainer.max_steps=8") == 0
    assert metrics(tmp_path / "halves") == metrics(tmp_path / "whole")
    assert differences(state(tmp_path / "halves"), state(tmp_path / "whole")) == []
    traces = [(tmp_path / name / "traces" / "actions.jsonl").read_bytes() for name in ("halves", "whole")]
    assert traces[0] == traces[1]


def test_pending_experience_comes_back_from_its_plain_form(tmp_path: Path) -> None:
    run = built_run(*SEVERAL, f"run_dir={tmp_path / 'run'}")
    next_experience(run, 1, clock)
    again = from_state(to_state(run.pending), Experience)
    assert differences([vars(one) for one in to_plain(again)], [vars(one) for one in to_plain(run.pending)]) == []


def to_plain(pending: Sequence[Experience]) -> list[Experience]:
    return [replace(one, rollouts=[str(row) for row in one.rollouts], scores=vars(one.scores)) for one in pending]  # type: ignore[arg-type]


# ---- truncated completions


@pytest.mark.parametrize(
    "given",
    [
        ("objective=ppo_clip",),
        ("objective=grpo", "objective.entropy_coef=0.1"),
        ("objective=dr_grpo", "trainer.skip_zero_advantage=false"),
        ("objective=reinforce", "objective.loss_agg=seq_mean_token_sum", "objective.top_entropy_quantile=0.5"),
        ("objective=gspo", "objective.correction=sequence_mask", "objective.beta=0.1"),
        ("objective=vespo", "objective.beta=0.1", "objective.kl_in=reward", "advantage=reinforce_pp"),
    ],
)
def test_a_batch_of_truncated_completions_changes_nothing(given: tuple[str, ...], tmp_path: Path) -> None:
    """Case e04.2: no loss, gradients that are zero and finite, metrics that are finite."""
    cut = ("objective.mask_truncated=true", "rollout.max_new_tokens=2", "rollout.min_new_tokens=2")
    words = (*SMALL, "reward=custom", "reward.name=plugs:digits", *given, *cut, "trainer.max_steps=1")
    run = built_run(*words, f"run_dir={tmp_path / 'run'}")
    before = parameters(run)
    (step,) = trained(run)
    assert {one.finish_reason for one in step.rollouts} == {"length"}
    assert (step.metrics["loss"], step.metrics["grad_norm"]) == (0, 0)
    assert all(math.isfinite(value) for value in step.metrics.values())
    assert torch.equal(parameters(run), before)


def parameters(run: Run) -> Tensor:
    return torch.cat([value.detach().flatten() for value in run.policy.parameters()])


# ---- the KL in the reward


def test_the_kl_in_the_reward_is_taken_off_before_the_others_are_compared_with(tmp_path: Path) -> None:
    """RLOO by hand: r − beta · Σₜ (log π − log π_ref), and the mean of the other three taken off."""
    given = (*PAID, "advantage=rloo", "objective.beta=0.5", "objective.kl=k1", "objective.kl_in=reward")
    run = built_run(*given, f"run_dir={tmp_path / 'run'}")
    assert run.reference is not None
    with torch.no_grad(), run.reference.model() as reference:
        for value in reference.parameters():
            value.mul_(0.9)  # another policy than the one that samples
    learnt = next_experience(run, 1, clock)
    with torch.no_grad(), run.reference.model() as reference:
        penalties = [plain_logps(reference, one.prompt.ids, one.ids) for one in learnt.rollouts]
    kl = torch.tensor([sum(one.logps) - float(ref.sum()) for one, ref in zip(learnt.rollouts, penalties, strict=True)])
    rewards = learnt.scores.total - 0.5 * kl.reshape(4, 4)
    expected = rewards - (rewards.sum(1, keepdim=True) - rewards) / 3
    assert kl.abs().max() > 1e-2
    assert torch.allclose(learnt.advantages.double(), expected.double(), atol=1e-4)
    tokens = sum(len(one.ids) for one in learnt.rollouts)
    assert learnt.metrics["kl"] == pytest.approx(float(kl.sum()) / tokens, abs=1e-5)


def plain_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """The log-probs of a completion from one plain forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
