"""Other forms of the packed layout attend to the same: dense rows, and the block-sparse kernel's mask.

The speed and gradients of the kernel need a GPU (see models/flex.py).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.models import flex
from grpo_toolbox.models.attention import packed_layout
from grpo_toolbox.models.dense import dense_layout
from grpo_toolbox.models.flex import flex_layout, flex_works, gap_to_gathered

CPU = torch.device("cpu")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    completions=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 2)), min_size=1, max_size=5),
)
@torch.no_grad()
def test_it_attends_to_what_the_gathered_layout_attends_to(prompts, completions):
    lengths = [length for length, _ in completions]
    group = [owner % len(prompts) for _, owner in completions]
    total = sum(prompts) + sum(lengths)
    generator = torch.Generator().manual_seed(total)
    query, key, value = (torch.randn(1, heads, total, 16, generator=generator) for heads in (4, 2, 2))
    gathered = packed_layout(prompts, lengths, group, CPU)
    expected = gathered.attend(0, query, key, value, 0.25)
    for layout in (
        flex_layout(prompts, lengths, group, CPU, compiled=False),
        dense_layout(prompts, lengths, group, CPU),
    ):
        torch.testing.assert_close(layout.attend(0, query, key, value, 0.25), expected, atol=2e-6, rtol=0)
        assert layout.span == gathered.span


def test_a_processor_gathers():
    assert not flex_works(CPU)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_is_tried_with_gradients_wherever_it_is_first_asked_for(around):
    """A run's first packed pass is its probe, which wants none: the kernel must not be given up for that."""
    same, other = packed_layout(*flex._PROBE, CPU), packed_layout([40, 7], [30, 1, 64, 12], [1, 1, 0, 0], CPU)
    with around(), torch.autocast("cpu", torch.bfloat16):
        assert gap_to_gathered(same, CPU, torch.float32) == 0
        assert gap_to_gathered(other, CPU, torch.float32) > 0.1


@torch.no_grad()
def test_under_autocast_all_it_is_given_is_rounded_alike():
    """As rotary embeddings leave it: queries and keys in float32, values in bfloat16."""
    flexible, gathered = (make([3, 2], [4, 1], [0, 1], CPU) for make in (_uncompiled, packed_layout))
    query, key, value = (torch.randn(1, heads, 10, 16) for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (one.attend(0, query, key, value.bfloat16(), 0.25) for one in (flexible, gathered))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)


def _uncompiled(*lengths):
    return flex_layout(*lengths, compiled=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_runs_and_gives_the_same_gradients():
    assert all(flex_works(torch.device("cuda"), dtype) for dtype in (torch.float32, torch.bfloat16))
