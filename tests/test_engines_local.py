"""What only the in-process engine promises: rows that do not depend on each other, and no work done twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_toolbox.engines import local
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.types import Prompt, Rollout, Sampling
from small_models import STOP, VOCABULARY, build, chain, forced_log_probs, forced_logps, make_prompts, shared, text_ids

SOME_STOPS = tuple(range(1, 20))
LENGTHS = (60, 1, 5, 17, 2, 9)


def engine(model: Any, stop_ids: Sequence[int] = SOME_STOPS, max_rows: int = 256) -> LocalEngine:
    return LocalEngine(model, decode=lambda ids, _: " ".join(map(str, ids)), stop_ids=stop_ids, max_rows=max_rows)


def assert_same(rollouts: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    assert [one.ids for one in rollouts] == [one.ids for one in expected]
    for one, other in zip(rollouts, expected, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-4)


@contextmanager
def forwarded(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Collect the shape (rows, tokens) of everything that goes through the embedding."""
    shapes: list[tuple[int, int]] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, args, out: shapes.append(tuple(args[0].shape))
    )
    yield shapes
    handle.remove()


# ---- rows are independent --------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(len(LENGTHS))),
    count=st.integers(1, len(LENGTHS)),
    group_size=st.integers(1, 4),
    max_rows=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_a_rollout_does_not_depend_on_what_shares_its_batch(order, count, group_size, max_rows, seed):
    """Any subset of the prompts in any order, in groups of any size and in several rounds."""
    model, sampling = shared("llama"), Sampling(10, temperature=1.3, seed=seed)
    prompts = make_prompts(*LENGTHS)
    together = engine(model).generate(prompts, 4, sampling)
    chosen = [prompts[place] for place in order[:count]]
    rollouts = engine(model, max_rows=max_rows).generate(chosen, group_size, sampling)
    assert_same(rollouts, [together[4 * prompt.id + place] for prompt in chosen for place in range(group_size)])


def test_a_prompt_that_stands_twice_gives_other_completions():
    """As if its group were twice as large: nothing is sampled twice."""
    model, sampling = shared("llama"), Sampling(12, temperature=1.5)
    prompt, between = make_prompts(5, 8)
    rollouts = engine(model, stop_ids=()).generate([prompt, between, prompt], 3, sampling)
    once = engine(model, stop_ids=()).generate([prompt], 6, sampling)
    assert_same(rollouts[:3] + rollouts[6:], once)
    assert len({one.ids for one in once}) == 6


def test_equal_texts_with_different_ids_are_different_groups():
    model, sampling = shared("llama"), Sampling(12, temperature=1.5)
    rollouts = engine(model, stop_ids=()).generate([Prompt(0, "", (5, 6)), Prompt(1, "", (5, 6))], 4, sampling)
    assert len({one.ids for one in rollouts}) == 8


# ---- padding (case e06.2) --------------------------------------------------------------------------------------------


def test_left_padding_is_invisible():
    """Case e06.2: [5, 6] alone and as [pad, pad, 5, 6] give the same log-probs within 1e-5."""
    model, sampling = shared("llama"), Sampling(6, temperature=1.5)
    alone = engine(model).generate([Prompt(0, "", (5, 6))], 4, sampling)
    padded = engine(model).generate([Prompt(0, "", (5, 6)), Prompt(1, "", (9, 8, 7, 6))], 4, sampling)
    for one, other in zip(alone, padded[:4], strict=True):
        assert one.ids == other.ids
        assert one.logps == pytest.approx(other.logps, abs=1e-5)


# ---- no work twice ---------------------------------------------------------------------------------------------------


def test_each_prompt_is_prefilled_once_for_its_group():
    """3 prompts of 7 tokens, 8 completions each: 3·7 prompt tokens, then 24 rows of one token."""
    model = shared("llama")
    with forwarded(model) as shapes:
        engine(model, stop_ids=()).generate(make_prompts(7, 7, 7), 8, Sampling(4))
    assert shapes == [(1, 21), (24, 1), (24, 1), (24, 1)]  # the fourth token is drawn, not forwarded


def test_several_rounds_hold_max_rows_rows_at_most_and_whole_groups():
    model = shared("llama")
    with forwarded(model) as shapes:
        engine(model, stop_ids=(), max_rows=9).generate(make_prompts(7, 7, 7), 4, Sampling(2))
    assert shapes == [(1, 14), (8, 1), (1, 7), (4, 1)]
    with forwarded(model) as shapes:
        engine(model, stop_ids=(), max_rows=2).generate(make_prompts(7, 7), 4, Sampling(2))
    assert shapes == [(1, 7), (4, 1), (1, 7), (4, 1)]


def test_finished_rows_leave_the_batch():
    """No step forwards more than 1/0.85 of the rows that go on, and none is forwarded after the last has ended."""
    model = shared("llama")
    with forwarded(model) as shapes:
        rollouts = engine(model).generate(make_prompts(4, 4), 16, Sampling(40, temperature=2.0))
    lengths = [len(one.ids) for one in rollouts]
    rows = [count for count, width in shapes if width == 1]
    assert len(rows) == min(max(lengths), 40) - 1
    for step, count in enumerate(rows, start=1):
        going_on = sum(length > step for length in lengths)
        assert going_on <= count < going_on / 0.85
    assert rows[-1] < 32


def test_waiting_prompts_take_the_places_of_finished_rows():
    """24 prompts in groups of 4 and 32 places: while prompts wait, seven places in eight are at work."""
    model = shared("llama")
    with forwarded(model) as shapes:
        local = engine(model, stop_ids=(1, 2, 3), max_rows=32)
        rollouts = local.generate(make_prompts(*[6] * 24), 4, Sampling(40, temperature=2.0))
    prefills = [step for step, (_, tokens) in enumerate(shapes) if tokens > 1]
    assert sum(shapes[step][1] for step in prefills) == 24 * 6
    assert len(prefills) > 4  # not all at once
    rows = [count for count, tokens in shapes[: prefills[-1]] if tokens == 1]
    assert max(rows) <= 32
    assert sum(rows) / len(rows) > 28
    rounds = [rollouts[first : first + 32] for first in (0, 32, 64)]
    assert len(shapes) - len(prefills) < sum(max(len(one.ids) for one in part) - 1 for part in rounds)


def test_each_rollout_is_reported_when_it_ends():
    """Shorter completions first, each once, as the very record that is returned."""
    model, heard = shared("llama"), []
    prompts = make_prompts(4, 9)
    rollouts = engine(model).generate(prompts, 8, Sampling(12, temperature=2.0), lambda *one: heard.append(one))
    assert sorted(row for row, _ in heard) == list(range(16))
    assert all(rollouts[row] is one for row, one in heard)
    lengths = [len(one.ids) for _, one in heard]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


class Widest(TorchDispatchMode):
    """Remembers the largest number of places in any buffer of keys or values (rows, heads, places, D)."""

    places = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 4:
            self.places = max(self.places, out.shape[2])
        return out


@pytest.mark.parametrize(("tokens", "room"), [(3, 32), (33, 32), (34, 64), (66, 128)])
def test_the_cache_grows_with_the_tokens_and_not_with_the_limit(tokens, room):
    """Room for 32 tokens, twice as many when it is full; the last token drawn needs none, 5 000 are allowed."""
    model = chain({5: 5}, positions=8192)
    stop_after = iter([6] * (tokens - 1) + [STOP])
    with Widest() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "sample", lambda logits, *_: (torch.tensor([next(stop_after)]), torch.zeros(1)))
        (one,) = engine(model, stop_ids=(STOP,)).generate([Prompt(0, "", (5,))], 1, Sampling(5000))
    assert len(one.ids) == tokens
    assert seen.places == room


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def test_frequencies_of_the_first_token_are_the_softmax():
    """20 000 draws after one prompt. Tokens expected fewer than 20 times are counted as one; χ² far below its tail.

    With n cells, χ² has mean n − 1 and variance 2(n − 1); four standard deviations above is a one-in-20 000 event.
    """
    model, draws = shared("llama"), 20_000
    prompt = Prompt(0, "", text_ids(6))
    rollouts = engine(model, max_rows=draws).generate([prompt], draws, Sampling(1, temperature=1.4))
    probs = forced_log_probs(model, prompt.ids, [2], 1.4)[0].exp().double()
    counts = torch.bincount(torch.tensor([one.ids[0] for one in rollouts]), minlength=VOCABULARY).double()
    common = probs * draws >= 20
    expected = torch.cat([probs[common], probs[~common].sum(0, keepdim=True)]) * draws
    observed = torch.cat([counts[common], counts[~common].sum(0, keepdim=True)])
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert degrees > 10
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_a_layer_that_attends_twice_keeps_two_sets_of_values():
    """Differential attention: what the second call stored must not overwrite the first."""
    model = shared("diffllama")
    for one in engine(model).generate(make_prompts(20, 3), 3, Sampling(8)):
        expected = forced_logps(model, one.prompt.ids, one.ids)
        assert one.logps == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_half_precision_policy_is_sampled_with_float32_log_probs():
    """bfloat16 keeps 8 bits: a plain forward differs by rounding, but a probability is never above 1."""
    model = build("llama").bfloat16()
    rollouts = engine(model, stop_ids=(STOP,)).generate(make_prompts(20, 3), 4, Sampling(8))
    for one in rollouts:
        expected = forced_logps(model, one.prompt.ids, one.ids)
        assert one.logps == pytest.approx(expected.tolist(), abs=0.5)
        assert all(-100 < logp <= 0 for logp in one.logps)
