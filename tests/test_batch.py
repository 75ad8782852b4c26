"""From rollouts to tensors: what is trained, counted and kept together (micro-batches: `test_invariance.py`)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.batch import Batch, collate, denominators, micro_batches, pad_rows, prompt_lengths, rows_with_gradient
from grpo_toolbox.types import Prompt, Rollout

END = 2


def rollout(prompt: Prompt, *ids: int) -> Rollout:
    return Rollout(prompt, ids, tuple(-0.5 - 0.1 * place for place in range(len(ids))), "stop", "")


def two_groups() -> list[Rollout]:
    first, second = Prompt(0, "", (5, 6)), Prompt(1, "", (9,))
    return [rollout(first, 7, 8, END), rollout(first, END), rollout(second, 3, 3), rollout(second, 4, 5, 6, 7)]


def test_collate_by_hand():
    batch = collate(two_groups(), torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
    assert batch.prompts == ((5, 6), (9,))
    assert batch.group == (0, 0, 1, 1)
    assert batch.completions == ((7, 8, END), (END,), (3, 3), (4, 5, 6, 7))
    assert batch.mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.advantages.tolist() == [[1.0], [-1.0], [0.0], [2.0]]
    torch.testing.assert_close(batch.sampler_logps[0], torch.tensor([-0.5, -0.6, -0.7, 0.0]))
    assert (batch.old_logps, batch.ref_logps) == (None, None)
    assert (len(batch), batch.forward_tokens) == (4, 2 + 1 + 3 + 1 + 2 + 4)


def test_the_end_token_is_trained_and_padding_is_not_though_both_are_2():
    """Case f02.1: [7, 8, 2] padded to 5 with pad = eos = 2 has mask 1 1 1 0 0."""
    prompt = Prompt(0, "", (5,))
    batch = collate([rollout(prompt, 7, 8, END), rollout(prompt, 3, 3, 3, 3, 3)], torch.ones(1, 2))
    assert batch.mask[0].int().tolist() == [1, 1, 1, 0, 0]


def test_512_sampled_ids_are_512_ids_in_the_loss():
    """Case f03.3: the limit cuts nothing off and nothing is appended."""
    full = Rollout(Prompt(0, "", (5,)), (7,) * 512, (-1.0,) * 512, "length", "")
    batch = collate([full], torch.ones(1, 1))
    assert denominators(batch, 512).tokens == 512
    assert batch.completions[0] == full.ids
    assert batch.sampler_logps.shape == (1, 512)


def test_advantages_per_token_stay_with_their_tokens():
    advantages = torch.arange(16.0).reshape(2, 2, 4)
    batch = collate(two_groups(), advantages)
    assert batch.advantages.tolist() == advantages.reshape(4, 4).tolist()
    assert batch.select([3, 1]).advantages.tolist() == [[12.0, 13.0, 14.0, 15.0], [4.0, 5.0, 6.0, 7.0]]
    assert batch.select([1]).advantages.tolist() == [[4.0]]  # cut with the other columns


def test_advantages_of_whole_numbers_become_float32():
    assert collate(two_groups(), torch.tensor([[1, -1], [0, 2]])).advantages.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (1, 2)])
def test_advantages_of_another_batch_are_refused(shape):
    with pytest.raises(ValueError, match="do not belong to 4 rollouts"):
        collate(two_groups(), torch.zeros(shape))


def test_prompts_of_equal_text_stay_two_groups():
    twins = [rollout(Prompt(number, "", (5, 6)), 7) for number in (0, 0, 1, 1)]
    batch = collate(twins, torch.zeros(2, 2))
    assert (batch.prompts, batch.group) == (((5, 6), (5, 6)), (0, 0, 1, 1))


def test_denominators_count_rows_that_are_left_out_later():
    batch = collate(two_groups(), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    counts = denominators(batch, 8)
    assert (counts.sequences, counts.tokens, counts.length) == (4, 3 + 1 + 2 + 4, 8)
    assert rows_with_gradient(batch) == [0, 3]


def test_the_mean_length_of_a_prompts_completions_is_that_of_what_is_trained():
    # 3 and 1 token, 2 and 4: 2 and 3 on average; without the last token of row 3, 2.5
    batch = collate(two_groups(), torch.ones(2, 2))
    assert prompt_lengths(batch).tolist() == [[2.0], [2.0], [3.0], [3.0]]
    mask = batch.mask.clone()
    mask[3, 3] = False
    assert prompt_lengths(replace(batch, mask=mask)).tolist() == [[2.0], [2.0], [2.5], [2.5]]
    assert prompt_lengths(batch.select([])).shape == (0, 1)


def test_a_row_has_a_gradient_if_any_token_has_an_advantage():
    advantages = torch.zeros(2, 2, 4)
    advantages[1, 0, 1] = -1e-30
    assert rows_with_gradient(collate(two_groups(), advantages)) == [2]


def test_pad_rows_by_hand():
    assert pad_rows([(1.0, 2.0), (), (3.0,)]).tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]


def test_moving_a_batch_moves_every_tensor():
    batch = collate(two_groups(), torch.ones(2, 2)).to(torch.device("meta"))
    columns = (batch.mask, batch.advantages, batch.sampler_logps)
    assert {column.device.type for column in columns} == {"meta"}
    assert batch.completions == collate(two_groups(), torch.ones(2, 2)).completions


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Each row can be told from every other by its tokens, its advantage and its log-probs."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 6), min_size=groups * size, max_size=groups * size))
    prompts = [Prompt(number, "", (number,) * draw(st.integers(1, 5))) for number in range(groups)]
    rollouts = [rollout(prompts[row // size], *([100 + row] * length)) for row, length in enumerate(lengths)]
    return collate(rollouts, torch.arange(1.0, groups * size + 1).reshape(groups, size))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 99), tokens=st.integers(1, 40))
def test_selected_rows_keep_all_that_is_theirs(batch, seed, tokens):
    """Any rows in any order, and once more split into micro-batches: a row still stands behind its own prompt."""
    rows = random.Random(seed).sample(range(len(batch)), k=1 + seed % len(batch))
    chosen = batch.select(rows)
    parts = [chosen.select(part) for part in micro_batches(chosen, range(len(chosen)), tokens)]
    seen = []
    for part in (chosen, *parts):
        assert set(part.group) == set(range(len(part.prompts)))  # no prompt is forwarded in vain
        assert part.mask.shape[1] == max(map(len, part.completions))
        for place, ids in enumerate(part.completions):
            row = ids[0] - 100
            seen.append(row)
            assert ids == batch.completions[row]
            assert part.prompts[part.group[place]] == batch.prompts[batch.group[row]]
            assert part.mask[place].sum() == len(ids)
            assert part.advantages[place].tolist() == [row + 1.0]
            assert torch.equal(part.sampler_logps[place, : len(ids)], batch.sampler_logps[row, : len(ids)])
    assert sorted(seen) == sorted(rows * 2)
