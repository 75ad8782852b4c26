"""Tokens that the model did not write are read and nothing else: no loss, no KL, no entropy, no count, no value."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exact_llama import OBJECTIVES, PLAIN, TEMPERATURE, assert_same, full_batch, random_rollouts, shared_llama
from exact_llama import step_gradient as without_entropy
from grpo_toolbox.advantages import estimate, gae, reinforce_pp, value_targets
from grpo_toolbox.batch import Batch, collate, denominators, prompt_lengths, rows_with_gradient, written
from grpo_toolbox.cli.rescore import rescore
from grpo_toolbox.critic import Critic, CriticSettings
from grpo_toolbox.engines import Engine
from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.experience import batch_of, from_state, next_experience, to_state
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.objectives import Objective, clipped, loss_and_terms
from grpo_toolbox.rewards import build_reward, score_rollouts
from grpo_toolbox.rollout import rollout
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.surrogates import dppo, gmpo, sapo, vespo
from grpo_toolbox.trainer import train
from grpo_toolbox.types import Prompt, Rollout, Sampling, Scores
from grpo_toolbox.update import update
from toolbox_runs import SMALL, built_run, differences, state

NONE = math.nan
WIDE = {
    **OBJECTIVES,
    "gspo": Objective(partial(clipped, clip_eps=0.05), ratio_level="sequence", entropy_coef=0.1),
    "gspo_token": Objective(clipped, ratio_level="sequence_token", loss_agg="token_mean"),
    "product": Objective(clipped, ratio_level="product", kl_unbiased=True, beta=0.1),
    "gmpo": Objective(gmpo, entropy_coef=0.05),
    "vespo": Objective(vespo, loss_agg="token_mean"),
    "sapo": Objective(sapo, correction="sequence_truncate"),
    "dppo": Objective(dppo, loss_agg="constant", correction="geometric_mask", off_policy_threshold=0.1),
}


def tools(rollouts: Sequence[Rollout], seed: int = 0) -> list[Rollout]:
    """The rollouts with about a third of their tokens marked as not the model's, whose log-probs are NaN."""
    draw = random.Random(seed)
    found = []
    for one in rollouts:
        marks = tuple(draw.random() > 0.35 for _ in one.ids)
        logps = tuple(logp if mark else NONE for logp, mark in zip(one.logps, marks, strict=True))
        found.append(replace(one, written=marks, logps=logps))
    return found


def marked_batch(*, per_token: bool = False, dirty: float = NONE) -> Batch:
    """`full_batch` of rollouts with marks; in every column stands `dirty` where the model wrote nothing."""
    batch, rollouts = full_batch(PLAIN, per_token=per_token), tools(random_rollouts(PLAIN))
    made = collate(rollouts, batch.advantages.reshape(3, 3, -1) if per_token else batch.advantages.reshape(3, 3))
    columns = {name: getattr(batch, name) for name in ("sampler_logps", "old_logps", "ref_logps")}
    if per_token:
        columns["advantages"] = batch.advantages
    return replace(made, **{name: torch.where(made.mask, value, dirty) for name, value in columns.items()})


# ---- masks and counts


def test_masks_and_counts_by_hand() -> None:
    prompt = Prompt(0, "", (5,))
    first = Rollout(prompt, (7, 8, 9, 2), (-1.0, NONE, NONE, -0.5), "stop", "", written=(True, False, False, True))
    second = Rollout(prompt, (3, 2), (-1.0, -2.0), "stop", "")
    silent = Rollout(prompt, (4,), (NONE,), "length", "", written=(False,))
    assert [one.written_tokens for one in (first, second, silent)] == [2, 2, 0]
    batch = collate([first, second, silent], torch.ones(1, 3))
    assert batch.mask.int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert batch.completions == ((7, 8, 9, 2), (3, 2), (4,))  # read in full
    assert denominators(batch, 8).tokens == 4
    assert denominators(batch, 8).sequences == 3
    assert rows_with_gradient(batch) == [0, 1]
    cut = collate([first, replace(first, finish_reason="length")], torch.ones(1, 2), mask_truncated=True)
    assert cut.mask.sum(1).tolist() == [2, 0]


class Given:
    """An engine that returns what it was given."""

    def __init__(self, *rollouts: Rollout) -> None:
        self._rollouts = rollouts

    def generate(self, *_: Any) -> list[Rollout]:
        return [*self._rollouts]


def test_log_probs_of_tokens_that_the_model_did_not_write_are_not_looked_at() -> None:
    prompt = Prompt(0, "", (5,))
    one = Rollout(prompt, (7, 8, 2), (-1.0, NONE, -0.5), "stop", "", written=(True, False, True))
    sample: Callable[[Rollout], Any] = lambda made: rollout(Given(made), [prompt], 1, Sampling(3))  # type: ignore[arg-type]  # noqa: E731
    assert sample(one) == [one]
    with pytest.raises(ToolboxError, match="not finite for prompt 0"):
        sample(replace(one, written=(True, True, True)))
    with pytest.raises(ToolboxError, match="not finite for prompt 0"):
        sample(replace(one, written=()))
    with pytest.raises(ToolboxError, match="marks of who wrote them of unequal number"):
        sample(replace(one, written=(True, False)))


# ---- the loss


def gradient(batch: Batch, objective: Objective, *, packed: bool = True, cut: bool = False) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a step; with `cut` of the columns without the tokens that the model did not write."""
    model, counts = shared_llama(), denominators(batch, 7.0)
    model.zero_grad()
    logps, entropy = completion_logps(model, batch, temperature=TEMPERATURE, packed=packed)
    columns = {
        "logps": logps,
        "entropy": entropy,
        "advantages": batch.advantages.expand(batch.mask.shape),
        "old_logps": batch.old_logps,
        "ref_logps": batch.ref_logps,
        "sampler_logps": batch.sampler_logps,
        "mask": batch.mask,
    }
    if cut:
        lengths = batch.mask.sum(1)
        inside = torch.arange(batch.mask.shape[1]) < lengths.unsqueeze(1)
        columns = {name: torch.zeros_like(one).masked_scatter(inside, one[batch.mask]) for name, one in columns.items()}
        assert torch.equal(columns["mask"], inside)
    loss, _ = loss_and_terms(objective, denominators=replace(counts, prompt_length=prompt_lengths(batch)), **columns)
    loss.backward()
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return loss.detach(), torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("objective", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_is_that_of_columns_without_those_tokens(objective: Objective, packed: bool) -> None:
    """The model reads the whole completion; the loss is that of shorter rows in which only written tokens stand."""
    batch = marked_batch(per_token=True)
    loss, found = gradient(batch, objective, packed=packed)
    expected_loss, expected = gradient(batch, objective, packed=packed, cut=True)
    assert (expected != 0).any()
    torch.testing.assert_close(loss, expected_loss, atol=1e-12, rtol=1e-10)
    assert_same(found, expected)
    everything, _ = gradient(replace(batch, mask=full_batch(PLAIN).mask, **_clean(batch)), objective, packed=packed)
    assert abs(float(everything - loss)) > 1e-4  # it matters


def _clean(batch: Batch) -> dict[str, Tensor]:
    return {
        name: value.nan_to_num(-0.7)
        for name, value in vars(batch).items()
        if value is not batch.mask and isinstance(value, Tensor)
    }


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("packed", [True, False])
def test_nan_there_split_and_packing_change_nothing(objective: Objective, packed: bool) -> None:
    batch, model = marked_batch(per_token=True), shared_llama()
    whole = without_entropy(model, marked_batch(per_token=True, dirty=0.0), objective, packed=False)
    for tokens in (8, 14, 10**6):
        assert_same(without_entropy(model, batch, objective, tokens=tokens, packed=packed), whole)


def test_what_the_model_read_changes_what_it_says_next() -> None:
    """Attended to: another answer of the tool, and the written tokens behind it have other log-probs."""
    batch = marked_batch()
    row = next(row for row in range(9) if not batch.mask[row, 0] and batch.mask[row].any())
    ids = batch.completions[row]
    other = [*batch.completions]
    other[row] = ((ids[0] + 1) % 13, *ids[1:])
    for packed in (True, False):
        with torch.no_grad():
            one, two = (
                completion_logps(shared_llama(), rows, temperature=1.0, packed=packed)[0]
                for rows in (batch, replace(batch, completions=tuple(other)))
            )
        assert ((one - two).abs()[row][batch.mask[row]] > 1e-3).all()


# ---- estimators per token


def spread_out(compact: Tensor, marks: Tensor) -> Tensor:
    """Values of written tokens (P, G, T') at their places among all tokens (P, G, T), NaN elsewhere."""
    return torch.full(marks.shape, NONE, dtype=compact.dtype).masked_scatter(marks, compact[~compact.isnan()])


def test_gae_skips_what_was_read_by_hand() -> None:
    # the three tokens of test_gae, with two tokens of a tool behind the first and one at the end:
    # γ = .9, λ = .5, V = (.2, ·, ·, .4, .1, ·), reward 1 at the last written token
    # δ₃ = 1 − .1 = .9; δ₂ = .9·.1 − .4 = −.31; δ₁ = .9·.4 − .2 = .16: the value of the next written token bootstraps
    values = torch.tensor([[[0.2, NONE, NONE, 0.4, 0.1, NONE]]], dtype=torch.float64)
    expected = torch.tensor([[[0.20275, 0.0, 0.0, 0.095, 0.9, 0.0]]], dtype=torch.float64)
    found = gae(torch.ones(1, 1, dtype=torch.float64), values=values, gamma=0.9, lam=0.5, whiten=False)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("whiten", [True, False])
def test_gae_is_that_of_the_written_tokens_alone(whiten: bool) -> None:
    marks = written(tools(random_rollouts(PLAIN), seed=3)).reshape(3, 3, -1)
    counts = marks.sum(-1, keepdim=True)
    inside = torch.arange(marks.shape[2]) < counts
    random_numbers = torch.Generator().manual_seed(0)
    values, penalty = (
        torch.where(inside, torch.randn(marks.shape, generator=random_numbers, dtype=torch.float64), NONE)
        for _ in range(2)
    )
    rewards = torch.randn(3, 3, generator=random_numbers, dtype=torch.float64)
    settings = {"gamma": 0.97, "lam": 0.9, "whiten": whiten}
    compact = gae(rewards, values=values, penalty=penalty, **settings)
    apart = gae(rewards, values=spread_out(values, marks), penalty=spread_out(penalty, marks), **settings)
    torch.testing.assert_close(apart[marks], compact[inside])
    assert torch.equal(apart[~marks], torch.zeros(int((~marks).sum()), dtype=torch.float64))


def test_reinforce_pp_counts_and_centres_written_tokens_alone() -> None:
    # penalties (.1, ·, .3) and (·, .2): rewards 1 and 0 less what is still to come: .6, ·, .7 and ·, −.2
    # mean 1.1/3 = .366667, population std √((.233333² + .333333² + .566667²)/3) = .402768
    penalty = torch.tensor([[[0.1, NONE, 0.3], [NONE, 0.2, NONE]]])
    found = reinforce_pp(torch.tensor([[1.0, 0.0]]), penalty=penalty)
    expected = torch.tensor([[[0.579325, 0.0, 0.827606], [0.0, -1.406931, 0.0]]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_critic_is_taught_at_written_tokens_alone() -> None:
    values = torch.tensor([[[0.2, NONE, 0.4]]])
    scores = Scores(("r",), (1.0,), torch.ones(1, 1, 1), torch.ones(1, 1))
    # λ = 1: what is left of the reward at each written token, 1
    returns = value_targets(partial(gae, lam=1.0), scores, values)
    torch.testing.assert_close(returns, torch.tensor([[[1.0, NONE, 1.0]]]), equal_nan=True)
    batch = marked_batch(dirty=0.0)
    shape = batch.mask.shape
    one, other = (Critic(shared_critic(), CriticSettings(lr=1e-2), torch.device("cpu")) for _ in range(2))
    clean = replace(batch, values=torch.zeros(shape), returns=torch.ones(shape))
    dirty = replace(batch, values=torch.zeros(shape), returns=torch.ones(shape).masked_fill(~batch.mask, 1e6))
    logged = one.update(clean, 1, epochs=1)
    assert other.update(dirty, 1, epochs=1) == logged
    assert logged["critic/loss"] == pytest.approx(0.5)  # ½·(0 − 1)², whatever stands in unwritten places


def shared_critic() -> Any:
    from exact_llama import small_llama

    return small_llama()


def by_token(completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"score": 1.0, "token_rewards": [1.0 + place for place in range(len(ids))]} for ids in completion_ids]


def test_what_is_paid_at_a_tools_token_is_paid_at_the_written_one_before() -> None:
    # tokens 1 2 3 4 5 pay as much; written are the 2nd, 3rd and 5th: the 1st's pay moves on to the 2nd, as nothing
    # was written before; the 4th's goes back to the 3rd
    prompt = Prompt(0, "", (5,))
    marks = (False, True, True, False, True)
    one = Rollout(prompt, (6,) * 5, (-1.0,) * 5, "stop", "", written=marks)
    two = Rollout(prompt, (6,) * 2, (-1.0,) * 2, "stop", "")
    scores = score_rollouts(build_reward("test_multi_turn:by_token"), [one, two], 2)
    assert scores.token_rewards is not None
    expected = torch.tensor([[[NONE, 3.0, 7.0, NONE, 5.0], [1.0, 2.0, NONE, NONE, NONE]]])
    torch.testing.assert_close(scores.token_rewards, expected, equal_nan=True)
    # γ = λ = 1, V = 0: each written token earns what is paid from it on
    values = torch.where(expected.isnan(), NONE, 0.0)
    left = replace(scores, total=scores.token_rewards.nansum(-1))
    found = estimate(partial(gae, lam=1.0, whiten=False), left, values=values)
    torch.testing.assert_close(found, torch.tensor([[[0.0, 15.0, 12.0, 0.0, 5.0], [3.0, 2.0, 0.0, 0.0, 0.0]]]))


# ---- whole runs


class WithTool:
    """The run's own engine; the second token of each completion of two and more is said to be a tool's."""

    def __init__(self, engine: Engine, logp: float = NONE) -> None:
        self._engine, self._logp = engine, logp
        self.traits = engine.traits

    def generate(self, prompts: Any, group_size: int, sampling: Sampling, on_finished: Any = None) -> list[Rollout]:
        rollouts = [self._answered(one) for one in self._engine.generate(prompts, group_size, sampling)]
        for row, one in enumerate(rollouts if on_finished else ()):
            on_finished(row, one)
        return rollouts

    def _answered(self, one: Rollout) -> Rollout:
        if len(one.ids) < 2:
            return one
        marks = tuple(place != 1 for place in range(len(one.ids)))
        return replace(one, written=marks, logps=(one.logps[0], self._logp, *one.logps[2:]))

    def sync(self, version: int | None = None) -> int:
        return self._engine.sync(version)

    def cancel(self) -> None:
        self._engine.cancel()

    def close(self) -> None:
        self._engine.close()


def tool_run(*words: object, logp: float = NONE) -> Run:
    run = built_run(*SMALL, "reward=custom", "reward.name=plugs:noisy", *words)
    run.engine = WithTool(run.engine, logp)
    return run


def clock(stage: str) -> Any:
    return nullcontext()


RUNS = (
    ("objective=grpo", "objective.entropy_coef=0.01"),
    ("objective=gspo", "trainer.ppo_epochs=2", "trainer.micro_batch_tokens=20"),
    ("objective=grpo", "objective.top_entropy_quantile=0.5", "trainer.packing=false"),
    ("advantage=reinforce_pp", "objective=ppo_clip", "objective.beta=0.1", "objective.kl=k1", "objective.kl_in=reward"),
    ("advantage=gae", "objective=ppo_clip", "trainer.ppo_epochs=2", "objective.correction=sequence_mask"),
    ("rollout.steps_per_generation=2", "rollout.prompts_per_step=2", "objective=clip_cov"),
)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_whatever_an_engine_says_of_such_tokens_a_step_is_the_same(words: tuple[str, ...]) -> None:
    """NaN and −3 in their log-probs: the same metrics and the same parameters, bit for bit, after two steps."""
    seen = []
    for logp in (NONE, -3.0):
        run, logged = tool_run(*words, logp=logp), []
        for number in (1, 2):
            learnt = next_experience(run, number, clock)
            batch = batch_of(run, learnt)
            assert not batch.mask.all()
            assert bool((~written(learnt.rollouts)).any())
            logged.append(update(run, batch, number))
        assert all(math.isfinite(value) for one in logged for value in one.values())
        seen.append((logged, [parameter.detach() for parameter in run.policy.parameters()]))
    assert differences(*seen) == []


def test_metrics_count_written_tokens() -> None:
    run = tool_run("objective.beta=0")
    learnt = next_experience(run, 1, clock)
    from grpo_toolbox.metrics import step_metrics

    counted = sum(one.written_tokens for one in learnt.rollouts)
    assert counted < sum(len(one.ids) for one in learnt.rollouts)
    assert step_metrics(learnt.rollouts, learnt.scores)["completion_tokens"] == pytest.approx(counted / 16)


def test_marks_survive_in_pending_rollouts_and_traces(tmp_path: Path) -> None:
    words = ("rollout.steps_per_generation=2", "rollout.prompts_per_step=2", "trainer.max_steps=1", "objective.beta=0")
    run = tool_run(*words, "callbacks.trace_rollouts={every: 1}", f"run_dir={tmp_path / 'run'}")
    train(run)
    (kept,) = from_state(state(tmp_path / "run")["pending"], Experience)
    assert [one.written for one in kept.rollouts] == [one.written for one in run.pending[0].rollouts]
    assert any(one.written for one in kept.rollouts)
    assert from_state(to_state(run.pending), Experience)[0].rollouts[0].written == run.pending[0].rollouts[0].written
    lines = (tmp_path / "run/traces/actions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    marked = [one for one in records if one["written"]]
    assert marked
    for one in records:
        marks = one["written"] or [True] * len(one["token_ids"])
        assert len(marks) == len(one["token_ids"])
        assert [logp is not None for logp in one["logps"]] == marks
    rescored = rescore(tmp_path / "run/traces/actions.jsonl", build_reward("test_multi_turn:by_token"))
    assert rescored["rollouts"] == len(records)
