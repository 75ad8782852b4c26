"""The same gradient however the work is laid out: micro-batches, packing, padding, order, skipped rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from exact_llama import (
    OBJECTIVES,
    PLAIN,
    TEMPERATURE,
    Shape,
    assert_same,
    full_batch,
    random_rollouts,
    shared_llama,
    some_silent,
    step_gradient,
)
from grpo_toolbox.batch import collate, denominators, micro_batches, rows_with_gradient
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.tiny import build_tiny
from grpo_toolbox.objectives import Objective, clipped, reinforce
from grpo_toolbox.ops import AGGREGATIONS
from grpo_toolbox.types import Prompt, Rollout

objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
SINGLE_TOKENS: Shape = [(3, [1, 1]), (2, [1, 1])]
SOME_EMPTY: Shape = [(3, [0, 4]), (2, [0, 0])]
ALL_EMPTY: Shape = [(3, [0, 0])]
UNEQUAL_PROMPTS: Shape = [(1, [2, 3]), (60, [3, 1])]
LONG_GROUP: Shape = [(5, [6, 6, 6, 6]), (1, [1, 1, 1, 1])]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return shared_llama()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group_size = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 6), min_size=group_size, max_size=group_size)
    return draw(st.lists(st.tuples(st.integers(1, 12), lengths), min_size=1, max_size=3))


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [OBJECTIVES["grpo"], OBJECTIVES["dapo"]], ids=["grpo", "dapo"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(shape=shapes(), tokens=st.integers(1, 60), packed=st.booleans())
@example(SINGLE_TOKENS, 4, True)
@example(SOME_EMPTY, 3, True)
@example(SOME_EMPTY, 3, False)
@example(ALL_EMPTY, 3, True)
@example(UNEQUAL_PROMPTS, 64, True)
@example(LONG_GROUP, 12, True)
def test_micro_batches_of_any_size(model: nn.Module, objective: Objective, shape: Shape, tokens: int, packed: bool):
    batch = full_batch(shape)
    whole = step_gradient(model, batch, objective, packed=packed)
    assert_same(step_gradient(model, batch, objective, tokens=tokens, packed=packed), whole)


@objectives
@pytest.mark.parametrize("shape", [PLAIN, SINGLE_TOKENS, SOME_EMPTY, UNEQUAL_PROMPTS, LONG_GROUP])
def test_packed_equals_padded(model: nn.Module, objective: Objective, shape: Shape):
    batch = full_batch(shape)
    padded = step_gradient(model, batch, objective, packed=False)
    assert (padded != 0).any()
    assert_same(step_gradient(model, batch, objective), padded)


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_per_token_advantages_split_with_their_rows(model: nn.Module, objective: Objective, packed: bool):
    batch = full_batch(PLAIN, per_token=True)
    whole = step_gradient(model, batch, objective, packed=False)
    assert_same(step_gradient(model, batch, objective, tokens=14, packed=packed), whole)


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_extra_padding_columns_of_nan(model: nn.Module, objective: Objective, packed: bool):
    batch = full_batch(PLAIN, per_token=True)

    def wide(column: Tensor, fill: float) -> Tensor:
        return torch.cat([column, torch.full((len(batch), 5), fill, dtype=column.dtype)], dim=1)

    wider = replace(
        batch,
        mask=wide(batch.mask, False),
        advantages=wide(batch.advantages, math.nan),
        old_logps=wide(batch.old_logps, math.nan),
        ref_logps=wide(batch.ref_logps, math.nan),
    )
    logps, entropy = completion_logps(model, wider, temperature=TEMPERATURE, packed=packed)
    assert logps.shape == entropy.shape == (9, 11)
    assert_same(
        step_gradient(model, wider, objective, packed=packed), step_gradient(model, batch, objective, packed=packed)
    )


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_nan_in_every_column_where_the_mask_is_off(model: nn.Module, objective: Objective, packed: bool):
    batch = full_batch(PLAIN, per_token=True)
    columns = ("advantages", "sampler_logps", "old_logps", "ref_logps")
    planted = {name: torch.where(batch.mask, getattr(batch, name), math.nan) for name in columns}
    assert all(value.isnan().any() for value in planted.values())
    dirty = replace(batch, **planted)
    assert_same(
        step_gradient(model, dirty, objective, packed=packed), step_gradient(model, batch, objective, packed=packed)
    )


@objectives
def test_order_of_rows_and_groups(model: nn.Module, objective: Objective):
    batch = full_batch(PLAIN)
    expected = step_gradient(model, batch, objective)
    for order in ([2, 0, 1, 5, 3, 4, 8, 7, 6], [6, 7, 8, 0, 1, 2, 3, 4, 5], [8, 0, 4, 1, 6, 3, 5, 2, 7]):
        shuffled = batch.select(order)
        assert [shuffled.completions[place] for place in range(9)] == [batch.completions[row] for row in order]
        assert_same(step_gradient(model, shuffled, objective), expected)
        assert_same(step_gradient(model, batch, objective, rows=order, tokens=20), expected)


def test_groups_collated_in_another_order(model: nn.Module):
    advantages = torch.randn(3, 3, generator=torch.Generator().manual_seed(4))
    rollouts = random_rollouts(PLAIN)
    turned = collate([*rollouts[6:], *rollouts[:6]], advantages[[2, 0, 1]])
    objective = OBJECTIVES["dapo"]
    assert_same(step_gradient(model, turned, objective), step_gradient(model, collate(rollouts, advantages), objective))


@pytest.mark.parametrize("surrogate", [clipped, reinforce])
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_rows_of_zero_advantage_can_stay_at_home(model: nn.Module, surrogate: object, loss_agg: str):
    batch = some_silent(full_batch(PLAIN))
    objective = Objective(surrogate, loss_agg=loss_agg)  # type: ignore[arg-type]
    assert objective.zero_advantage_is_zero_gradient
    rows = rows_with_gradient(batch)
    assert rows == [0, 2, 7, 8]
    assert_same(step_gradient(model, batch, objective, rows=rows), step_gradient(model, batch, objective))


def test_a_row_is_skipped_only_if_all_its_tokens_have_zero_advantage():
    batch = replace(full_batch([(2, [3, 3, 3])]), advantages=torch.tensor([[0.0, 0, 0], [0, -1e-30, 0], [0, 0, 2]]))
    assert rows_with_gradient(batch) == [1, 2]


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_masked_out_counts_as_a_sequence_and_gives_no_gradient(model: nn.Module, packed: bool):
    batch = full_batch(PLAIN)
    mask = batch.mask.clone()
    mask[4] = False
    objective = OBJECTIVES["grpo"]
    others = [row for row in range(9) if row != 4]
    silent = replace(batch, mask=mask)
    expected = step_gradient(model, batch, objective, rows=others)  # the mean over sequences still divides by 9
    assert_same(step_gradient(model, silent, objective, packed=packed), expected)


def test_masks_come_from_lengths():
    # every completion is made of the padding and the stop token alone, and every token of it is trained
    prompt = Prompt(0, "", (5, 0))
    rollouts = [Rollout(prompt, ids, (-1.0,) * len(ids), "length", "") for ids in ((0, 0, 1), (1,), ())]
    batch = collate(rollouts, torch.ones(1, 3))
    assert batch.mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert denominators(batch, 8.0) == denominators(batch.select([2, 0, 1]), 8.0)
    assert (denominators(batch, 8.0).sequences, denominators(batch, 8.0).tokens) == (3, 4)


# ---- the split itself ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shape=shapes(), tokens=st.integers(1, 80), data=st.data())
def test_every_row_is_in_one_micro_batch_of_at_most_the_budget(shape: Shape, tokens: int, data: st.DataObject):
    batch = collate(random_rollouts(shape), torch.ones(len(shape), len(shape[0][1])))
    rows = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True)) if len(batch) else []
    parts = micro_batches(batch, rows, tokens)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert all(part for part in parts)
    assert all(batch.select(part).forward_tokens <= tokens or len(part) == 1 for part in parts)
    for group, (prompt, _) in enumerate(shape):
        members = {row for row in rows if batch.group[row] == group}
        whole = prompt + sum(len(batch.completions[row]) for row in members)
        if members and whole <= tokens:
            assert any(members <= set(part) for part in parts)


def test_micro_batches_by_hand():
    # group 0: 4 + (3, 5, 1) = 13 tokens; group 1: 9 + (2, 2, 6) = 19; group 2: 1 + (4, 1, 3) = 9
    batch = full_batch(PLAIN)
    assert micro_batches(batch, range(9), 100) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert micro_batches(batch, range(9), 32) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert micro_batches(batch, range(9), 13) == [[0, 1, 2], [3, 4], [5], [6, 7, 8]]  # 9 + 2 + 2 = 13; 9 + 6 = 15 > 13
    assert micro_batches(batch, [], 13) == []


def test_select_keeps_rows_with_their_columns():
    batch = full_batch(PLAIN)
    part = batch.select([7, 3])
    assert part.prompts == (batch.prompts[1], batch.prompts[2])
    assert part.group == (1, 0)
    assert part.completions == (batch.completions[7], batch.completions[3])
    assert part.mask.tolist() == [[True, False], [True, True]]  # cut to the longest, 2
    assert part.forward_tokens == 9 + 1 + 2 + 1
    assert torch.equal(part.advantages, batch.advantages[[7, 3]])
    for name in ("sampler_logps", "old_logps", "ref_logps"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[[7, 3], :2])


# ---- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_logps_and_entropies_are_those_of_plain_transformers(packed: bool):
    policy, _ = build_tiny()
    rollouts = random_rollouts([*PLAIN, (60, [0, 2, 5])])
    batch = collate(rollouts, torch.ones(4, 3))
    with torch.no_grad():
        logps, entropy = completion_logps(policy, batch, temperature=TEMPERATURE, packed=packed)
        for row, one in enumerate(rollouts):
            logits = policy(torch.tensor([[*one.prompt.ids, *one.ids]])).logits[0] / TEMPERATURE
            start, count = len(one.prompt.ids), len(one.ids)
            log_probs = logits[start - 1 : start + count - 1].log_softmax(-1)
            expected = log_probs[range(count), list(one.ids)]
            torch.testing.assert_close(logps[row, :count], expected, atol=1e-5, rtol=0)
            expected = -(log_probs.exp() * log_probs).sum(-1)
            torch.testing.assert_close(entropy[row, :count], expected, atol=1e-5, rtol=0)
            assert not logps[row, count:].any()
            assert not entropy[row, count:].any()


@pytest.mark.parametrize("packed", [True, False])
def test_case_e06_2_padding_is_invisible(model: nn.Module, packed: bool):
    # prompt (5, 6) with completion (7, 8), alone and beside a longer prompt and longer completions
    short = Rollout(Prompt(0, "", (5, 6)), (7, 8), (-1.0, -1.0), "stop", "")
    long = Rollout(Prompt(1, "", (3, 1, 4, 1, 5, 9, 2)), (6, 5, 3, 5, 8), (-1.0,) * 5, "stop", "")
    with torch.no_grad():
        alone, _ = completion_logps(model, collate([short], torch.ones(1, 1)), temperature=TEMPERATURE, packed=packed)
        beside, _ = completion_logps(
            model, collate([long, short], torch.ones(2, 1)), temperature=TEMPERATURE, packed=packed
        )
    torch.testing.assert_close(beside[1, :2], alone[0], atol=1e-12, rtol=0)


def test_the_attention_of_the_model_is_put_back(model: nn.Module):
    completion_logps(model, full_batch(PLAIN), temperature=1.0, packed=True)
    assert model.config._attn_implementation == "sdpa"
