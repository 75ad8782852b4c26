"""The order in which prompts are trained on, and how it is resumed."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from grpo_toolbox.data import PromptStream
from grpo_toolbox.errors import DataError
from grpo_toolbox.types import Prompt


def prompts(count: int, answer: str = "1") -> list[Prompt]:
    return [Prompt(index, f"p{index}", (index,), {"answer": answer}) for index in range(count)]


def ids(stream: PromptStream, batches: int) -> list[list[int]]:
    return [[prompt.id for prompt in stream.next()] for _ in range(batches)]


def test_seven_prompts_in_threes_are_all_seen_equally_often() -> None:
    stream = PromptStream(prompts(7), batch_size=3, seed=0)
    seen = Counter(itertools.chain(*ids(stream, 7)))  # 7 batches of 3 are 3 epochs of 7
    assert seen == dict.fromkeys(range(7), 3)
    assert stream.epoch == 3


@pytest.mark.parametrize("size", [3, 4, 5, 7, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_each_prompt_once_and_no_batch_has_a_row_twice(size: int, shuffle: bool) -> None:
    for seed in range(5):
        batches = ids(PromptStream(prompts(size), batch_size=3, seed=seed, shuffle=shuffle), size * 4)
        flat = list(itertools.chain(*batches))
        epochs = [flat[start : start + size] for start in range(0, len(flat), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert all(len(set(batch)) == 3 for batch in batches)


def test_order_depends_on_seed_and_epoch() -> None:
    first, again = (ids(PromptStream(prompts(20), batch_size=20, seed=1), 2) for _ in range(2))
    other = ids(PromptStream(prompts(20), batch_size=20, seed=2), 1)
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    stream = PromptStream(prompts(5), batch_size=2, seed=0, shuffle=False)
    assert ids(stream, 5) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_data_smaller_than_one_batch_is_an_error() -> None:
    with pytest.raises(DataError, match=r"smaller than one batch: 2 prompts, rollout\.prompts_per_step=3.*from 1 to 2"):
        PromptStream(prompts(2), batch_size=3, seed=0)


@pytest.mark.parametrize("taken", [0, 1, 2, 7, 40])
def test_resumed_stream_goes_on_as_if_it_had_never_stopped(taken: int) -> None:
    stream = PromptStream(prompts(7), batch_size=3, seed=5)
    ids(stream, taken)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(prompts(7), batch_size=3, seed=5)
    ids(resumed, 4)
    resumed.load_state_dict(state)
    assert ids(resumed, 20) == ids(stream, 20)


@pytest.mark.parametrize("data", [prompts(7, answer="2"), prompts(4), prompts(9)])
def test_resuming_with_other_data_warns_and_starts_at_the_beginning(
    data: list[Prompt], caplog: pytest.LogCaptureFixture
) -> None:
    old = PromptStream(prompts(7), batch_size=3, seed=0)
    ids(old, 40)
    new = PromptStream(data, batch_size=3, seed=0)
    new.load_state_dict(old.state_dict())
    assert "its position is dropped" in caplog.text
    assert ids(new, 10) == ids(PromptStream(data, batch_size=3, seed=0), 10)


def test_resuming_with_the_same_data_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    stream = PromptStream(prompts(7), batch_size=3, seed=0)
    PromptStream(prompts(7), batch_size=3, seed=0).load_state_dict(stream.state_dict())
    assert caplog.text == ""


def test_draws_of_any_size_have_no_row_twice_lose_none_and_go_on_after_a_resume() -> None:
    """As dynamic sampling draws: a batch, then what it lacks. 100 draws of 1 to 5 of 9 prompts."""
    sizes = [1 + (index * 7) % 5 for index in range(100)]
    stream = PromptStream(prompts(9), batch_size=5, seed=0)
    drawn = [[one.id for one in stream.next(size)] for size in sizes]
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    flat = [index for batch in drawn for index in batch]
    epochs = [flat[start : start + 9] for start in range(0, len(flat) - 8, 9)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    for stop in (0, 3, 50, 99):
        first = PromptStream(prompts(9), batch_size=5, seed=0)
        for size in sizes[:stop]:
            first.next(size)
        second = PromptStream(prompts(9), batch_size=5, seed=0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [[one.id for one in second.next(size)] for size in sizes[stop:]] == drawn[stop:]
