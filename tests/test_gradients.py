"""Gradients that are added where they are computed are autograd's, and need no table of the weight's size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.gradients import goes_in_place, in_place, lay_out
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.onednn import works
from grpo_toolbox.types import Rollout
from small_models import VOCABULARY, build, make_prompts, text_ids

WIDE = {"hidden_size": 256, "intermediate_size": 300, "vocab_size": 300}
"""Large enough that linear layers and head go through oneDNN."""
PARTS = ([0, 1], [2], [3])


def a_batch() -> Batch:
    prompts = make_prompts(4, 3)
    rows = [Rollout(prompts[place // 2], text_ids(5, place), (0.0,) * 5, "length", "", 0) for place in range(4)]
    return collate(rows, torch.ones(2, 2))


def loss(model: Any, batch: Batch) -> Tensor:
    logps, entropy = completion_logps(model, batch, temperature=0.9, packed=True)
    return (logps * torch.linspace(-1, 1, logps.shape[1])).sum() + 0.1 * entropy.sum()


def gradients(model: Any, directly: bool) -> dict[str, Tensor]:
    """Three micro-batches."""
    model.zero_grad(set_to_none=True)
    for part in PARTS:
        with in_place() if directly else torch.enable_grad():
            loss(model, a_batch().select(part)).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [WIDE, {}], ids=["oneDNN", "torch"])
@pytest.mark.parametrize("pad", [None, int(text_ids(5)[2])], ids=["no padding token", "a padding token in the text"])
def test_they_are_autograd_s(tied, sizes, pad):
    model = build("llama", tie_word_embeddings=tied, pad_token_id=pad, **sizes)
    ours, plain = gradients(model, directly=True), gradients(model, directly=False)
    assert ours.keys() == plain.keys() == {name for name, _ in model.named_parameters()}
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-4, rtol=1e-4, msg=name)


def test_under_an_adapter_only_the_adapter_gets_any():
    model = get_peft_model(build("llama", **WIDE), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    ours, plain = gradients(model, directly=True), gradients(model, directly=False)
    assert ours.keys() == plain.keys()
    assert all("lora" in name for name in ours)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=2e-4, rtol=1e-4, msg=name)


def test_outside_the_block_autograd_hands_them_out():
    model = build("llama", tie_word_embeddings=True, **WIDE)
    table = model.get_input_embeddings().weight
    (handed,) = torch.autograd.grad(loss(model, a_batch()), table)
    assert table.grad is None
    assert handed.abs().sum() > 0


def test_a_weight_that_somebody_watches_a_half_precision_one_and_a_view_go_the_usual_way():
    weight, watched = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    watched.register_hook(lambda grad: grad * 2)
    with in_place():
        assert goes_in_place(weight)
        assert not goes_in_place(watched)
        assert not goes_in_place(nn.Parameter(torch.ones(2, 2).bfloat16()))
        assert not goes_in_place(weight.T)
    assert not goes_in_place(weight)


class Tables(TorchDispatchMode):
    """Counts new tensors of the vocabulary's size."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {one.data_ptr() for one in args if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape[:1] == (VOCABULARY,) and out.numel() == VOCABULARY * 256:
            self.made += out.data_ptr() not in known
        return out


@pytest.mark.skipif(not works(), reason="torch was built without oneDNN's operators")
def test_later_micro_batches_make_no_table_of_the_vocabulary_s_size():
    """Autograd's way makes the head's gradient, the embedding's, and their sum."""
    model = build("llama", tie_word_embeddings=True, hidden_size=256)
    counts = []
    for block in (in_place, torch.enable_grad):
        model.zero_grad(set_to_none=True)
        loss(model, a_batch()).backward()
        with block(), Tables() as tables:
            loss(model, a_batch()).backward()
        counts.append(tables.made)
    assert counts[0] == 0
    assert counts[1] >= 2


def test_gradients_laid_out_stand_in_one_block_per_precision_and_are_added_to():
    """Places are rounded up to 16 numbers: 6 and 20 numbers take 16 and 32 in one block of 48."""
    first, second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(20))
    turned, half = nn.Parameter(torch.ones(3, 2).T), nn.Parameter(torch.ones(4, dtype=torch.float16))
    lay_out([first, second, turned, half])
    storage = first.grad.untyped_storage()
    assert storage.data_ptr() == second.grad.untyped_storage().data_ptr()
    assert storage.nbytes() == 4 * 48
    assert second.grad.storage_offset() == 16
    (first.sum() * 2 + second.sum() * 3 + turned.sum() * 5 + half.sum() * 7).backward()
    assert [float(one.grad.sum()) for one in (first, second, turned, half)] == [12, 60, 30, 28]
    assert first.grad.untyped_storage().data_ptr() == storage.data_ptr()
    assert turned.grad.stride() == turned.stride()


def test_each_thread_says_for_itself_whether_they_are_added_directly():
    """Two that train at once end in any order, and a third wants its gradients handed out."""
    weight = nn.Parameter(torch.ones(2))
    first, second = in_place(), in_place()
    first.__enter__()
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(goes_in_place, weight).result()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert not goes_in_place(weight)
        assert other.submit(goes_in_place, weight).result()
        other.submit(second.__exit__, None, None, None).result()
        assert not other.submit(goes_in_place, weight).result()
    assert not goes_in_place(weight)


def test_the_head_s_are_where_its_forward_pass_said():
    """On an accelerator a backward pass runs in a thread of its own; here the block has ended by then."""
    model = build("llama", vocab_size=300)
    with in_place():
        total = loss(model, a_batch())
    total.backward()
    ours = model.lm_head.weight.grad.clone()
    (handed_out,) = torch.autograd.grad(loss(model, a_batch()), model.lm_head.weight)
    torch.testing.assert_close(ours, handed_out, atol=2e-4, rtol=1e-4)
