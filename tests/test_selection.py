"""Which tokens of a step are chosen: by hand, and whatever the layout that the step is forwarded in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_toolbox.batch import Batch, collate, micro_batches
from grpo_toolbox.experience import batch_of, next_experience
from grpo_toolbox.measure import difference, gradient
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.objectives import Objective, choose_tokens
from grpo_toolbox.run import Run
from grpo_toolbox.selection import covariances, drawn_between, entropy_threshold, highest
from grpo_toolbox.surrogates import clipped
from grpo_toolbox.types import Prompt, Rollout
from grpo_toolbox.update import policy_logps
from test_experience import clock
from toolbox_runs import SMALL, built_run


def _row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- by hand


@pytest.mark.parametrize(("share", "kept"), [(0.2, [4]), (0.5, [2, 3, 4]), (0.6, [2, 3, 4]), (0.75, [1, 2, 3, 4])])
def test_the_tokens_of_highest_entropy(share: float, kept: list[int]) -> None:
    # five tokens: the quantile lies at place (1 − share)·4 of the sorted ones: 3.2, 2, 1.6, 1; at or above it are kept
    entropies = _row(0.1, 0.2, 0.3, 0.4, 0.5)
    assert (entropies >= entropy_threshold(entropies, share)).nonzero().flatten().tolist() == kept


def test_tokens_that_share_an_entropy_are_all_in_or_all_out_however_it_is_rounded() -> None:
    """Of ten tokens four are the first of a group; half are wanted, and the quantile lies among the four."""
    entropies = torch.tensor([1.5, 1.5, 1.5, 1.5, 0.1, 0.2, 0.3, 2.0, 2.1, 2.2])
    for seed in range(20):
        noise = 2e-6 * (torch.rand(10, generator=torch.Generator().manual_seed(seed)) - 0.5)
        kept = entropies + noise >= entropy_threshold(entropies + noise, 0.5)
        assert kept.tolist() == (entropies > 1).tolist()


def test_covariances_by_hand() -> None:
    # log π −1, −2, −6 about −3: 2, 1, −3; A 2, −1, −1 about 0: 2·2, 1·−1, −3·−1. Their mean, 2, is the covariance
    found = covariances(_row(-1.0, -2.0, -6.0), _row(2.0, -1.0, -1.0))
    assert found.tolist() == pytest.approx([4.0, -1.0, 3.0])
    assert covariances(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_the_tokens_of_highest_covariance() -> None:
    values = _row(3.0, -1.0, 0.5, 3.0, 7.0)
    assert highest(values, 0.2).tolist() == [False, False, False, False, True]  # ⌊.2·5⌋ = 1
    assert highest(values, 0.001).tolist() == [False, False, False, False, True]  # one at least
    assert highest(values, 0.4).tolist() == [True, False, False, True, True]  # two, and the tie of the second
    assert highest(values, 1.0).tolist() == [True, False, True, True, True]  # none that costs no entropy
    assert not highest(torch.zeros(5), 0.4).any()
    assert highest(torch.zeros(0), 0.4).tolist() == []


def test_tokens_are_drawn_within_bounds_and_as_many_as_asked_for() -> None:
    values = torch.arange(100.0)
    drawn = drawn_between(values, 10, 59, 0.2, seed=3)
    assert int(drawn.sum()) == 20
    assert values[drawn].min() >= 10
    assert values[drawn].max() <= 59
    assert torch.equal(drawn, drawn_between(values, 10, 59, 0.2, seed=3))
    assert not torch.equal(drawn, drawn_between(values, 10, 59, 0.2, seed=4))
    assert drawn_between(values, 10, 12, 0.2, seed=3).nonzero().flatten().tolist() == [10, 11, 12]  # there are no more
    assert int(drawn_between(values, 0, 99, 0.001, seed=3).sum()) == 1  # one at least
    assert not drawn_between(values, 200, 300, 0.2, seed=3).any()
    assert drawn_between(torch.zeros(0), 0, 1, 0.2, seed=3).tolist() == []
    assert int(drawn_between(values, 0, 99, 0.2, seed=2**63 * 1_000_003).sum()) == 20  # whatever the run's seed


def test_every_token_within_the_bounds_is_drawn_as_often() -> None:
    """2 of 5 within the bounds, 4000 times: 1600 ± 31 each, so within 5 deviations."""
    values = torch.arange(10.0)
    times = sum(drawn_between(values, 2, 6, 0.2, seed=seed).int() for seed in range(4000))
    assert isinstance(times, Tensor)
    assert times[[0, 1, 7, 8, 9]].tolist() == [0] * 5
    assert ((times[2:7] - 1600).abs() < 5 * 31).all()


def test_one_token_more_within_the_bounds_changes_one_token_of_the_draw() -> None:
    values = torch.arange(100.0)
    before = drawn_between(values, 10, 59, 0.2, seed=1)
    for place in range(100):
        moved = values.clone()
        moved[place] = 30.0 if not 10 <= place <= 59 else 0.0
        after = drawn_between(moved, 10, 59, 0.2, seed=1)
        assert int((after & ~before).sum()) <= 1
        assert int((before & ~after).sum()) <= 1


def test_what_is_trained_is_what_every_choice_leaves() -> None:
    logps, advantages = _row(-1.0, -2.0, -3.0, -6.0), _row(3.0, 1.0, -1.0, -3.0)
    columns = {"logps": logps, "advantages": advantages, "entropies": _row(0.4, 0.1, 0.3, 0.2)}
    # log π about −3: 2, 1, 0, −3; A about 0: covariances 6, 1, 0, 9
    assert [marks is None or marks.tolist() for marks in choose_tokens(Objective(clipped), 1, **columns)] == [
        [True] * 4,
        True,
    ]
    both = Objective(clipped, top_entropy_quantile=0.5, clip_cov=0.25, clip_cov_min=5.0, clip_cov_max=7.0, kl_cov=0.5)
    trained, anchored = choose_tokens(both, 1, **columns)
    assert anchored is not None
    assert (trained.tolist(), anchored.tolist()) == ([False, False, True, False], [True, False, False, True])


# ---- in a run, whatever the layout

CHOICES = {
    "top entropy": {"top_entropy_quantile": 0.35},
    "top entropy of few": {"top_entropy_quantile": 0.2},
    "clip-cov": {"clip_cov": 0.3, "clip_cov_min": 0.0, "clip_cov_max": math.inf},
    "kl-cov": {"kl_cov": 0.3, "kl_cov_coef": 0.7},
}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Batch]:
    """Four groups of four, off-policy: many first tokens, hence many ties."""
    paid = ("reward=custom", "reward.name=plugs:digits", "rollout.max_new_tokens=3", "advantage=dr_grpo")
    run = built_run(*SMALL, *paid, f"run_dir={tmp_path_factory.mktemp('chosen') / 'run'}")
    batch = batch_of(run, next_experience(run, 1, clock))
    away = torch.where(torch.arange(batch.mask.shape[1]) % 2 == 0, 0.3, -0.3)
    return run, replace(batch, old_logps=batch.sampler_logps + away)


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_the_choice_is_that_of_the_step_whatever_the_layout(options: dict[str, float], step: tuple[Run, Batch]) -> None:
    run, batch = step
    plain = Objective(clipped, loss_agg="token_mean")
    objective = replace(plain, **options)  # type: ignore[arg-type]
    whole = gradient(run, batch, objective)
    assert difference(whole, gradient(run, batch, plain)) > 1e-2
    layouts = [{"packed": False}, *({"micro_batch_tokens": tokens} for tokens in (1, 7, 20, 50))]
    for layout in (*layouts, {"packed": False, "micro_batch_tokens": 9}):
        assert difference(gradient(run, batch, objective, **layout), whole) < 1e-5, layout


@pytest.mark.parametrize("share", [0.35, 0.2])
def test_the_quantiles_above_lie_among_ties(share: float, step: tuple[Run, Batch]) -> None:
    """Else the test would say nothing of them: the first tokens of a group."""
    run, batch = step
    with torch.no_grad():
        _, entropies = policy_logps(run, batch)
    tokens = entropies[batch.mask]
    assert int(((tokens - entropy_threshold(tokens, share)).abs() < 2e-5).sum()) == 4


def test_ties_that_a_layout_rounds_apart_stay_together() -> None:
    """Rows of a group, each forwarded with its own padding, get entropies of their first tokens up to 1e-6 apart."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # entropies far apart, where the contexts are not the same
    drawn = torch.randint(300, (16, 40)).tolist()
    prompts = [Prompt(index, "", tuple(drawn[index][: 5 + 3 * index])) for index in range(4)]
    completions = [tuple(drawn[row][20 : 23 + row * 5 % 7]) for row in range(16)]
    rollouts = [Rollout(prompts[row // 4], ids, (0.0,) * len(ids), "stop", "") for row, ids in enumerate(completions)]
    batch = collate(rollouts, torch.zeros(4, 4))

    def entropies(packed: bool, tokens: int) -> Tensor:
        parts = [batch.select(rows) for rows in micro_batches(batch, range(16), tokens)]
        with torch.no_grad():
            found = [completion_logps(model, part, temperature=1.0, packed=packed)[1] for part in parts]
        return torch.cat([values[part.mask] for values, part in zip(found, parts, strict=True)])

    layouts = [entropies(packed, tokens) for packed in (True, False) for tokens in (1, 15, 25, 40, 10**6)]
    for share in torch.arange(0.05, 1.0, 0.05).tolist():
        first, *others = [tokens >= entropy_threshold(tokens, share) for tokens in layouts]
        assert all(torch.equal(first, other) for other in others), share


def test_clip_cov_draws_other_tokens_each_step(step: tuple[Run, Batch]) -> None:
    run, batch = step
    objective = Objective(clipped, loss_agg="token_mean", clip_cov=0.3, clip_cov_min=0.0, clip_cov_max=math.inf)
    assert difference(gradient(run, batch, objective), gradient(run, batch, objective)) == 0
    other = replace(run, sampling=replace(run.sampling, seed=run.sampling.seed + 1))
    assert difference(gradient(other, batch, objective), gradient(run, batch, objective)) > 1e-2
