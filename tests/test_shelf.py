"""What a training pass keeps for backward stands side by side, as it was, until the pass is over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_toolbox.batch import Batch
from grpo_toolbox.gradients import in_place
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.shelf import Shelf
from small_models import build

LARGE = 2**15  # numbers of four bytes: from here on a place on the shelf is worth having


def states(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_copies_stand_one_behind_the_other_and_stay_what_they_were():
    shelf, first, second = Shelf(), states(0, LARGE + 3), states(1, 2, LARGE).double()
    copy = shelf.put(first)
    version = copy._version
    copies = copy, shelf.put(second)
    assert copy._version == version  # else autograd would take what came later for a change of it
    rounded = -(-4 * (LARGE + 3) // 64) * 64
    assert copies[1].data_ptr() - copies[0].data_ptr() == rounded
    expected = first.clone(), second.clone()
    first.zero_()
    second.zero_()
    for copy, before in zip(copies, expected, strict=True):
        assert torch.equal(copy, before)


def test_a_turned_tensor_is_copied_as_it_reads():
    turned = states(0, 256, 300).T
    assert torch.equal(Shelf().put(turned), turned)


def test_the_same_tensor_again_is_the_same_copy_unless_it_has_changed():
    shelf, x = Shelf(), states(0, LARGE)
    copy = shelf.put(x)
    assert shelf.put(x) is copy
    x.mul_(2)
    assert torch.equal(shelf.put(x), x)
    assert not torch.equal(copy, x)


def test_another_tensor_in_the_same_memory_is_another_one():
    shelf, memory = Shelf(), states(0, LARGE)
    shelf.put(memory.view(LARGE))
    copy = shelf.put(memory.view(LARGE))
    memory.zero_()
    assert torch.equal(shelf.put(memory.view(LARGE)), torch.zeros(LARGE))
    assert not torch.equal(copy, memory)


def test_small_tensors_and_a_closed_shelf_keep_things_where_they_are():
    small, large = states(0, 8), states(0, LARGE)
    assert Shelf().put(small) is small
    assert Shelf(closed=True).put(large) is large


def test_more_than_a_block_holds_goes_on_in_the_next():
    shelf, whole = Shelf(), 64 * 2**20 // 4
    parts = [states(seed, whole // 3) for seed in range(4)] + [states(5, whole + 1)]
    copies = [shelf.put(part) for part in parts]
    assert all(torch.equal(copy, part) for copy, part in zip(copies, parts, strict=True))


def test_after_clearing_the_next_pass_stands_in_the_same_place():
    shelf = Shelf()
    place = shelf.put(states(0, LARGE)).data_ptr()
    shelf.clear()
    assert shelf.put(states(1, LARGE)).data_ptr() == place


@pytest.mark.parametrize("recompute", [True, False])
def test_one_shelf_for_several_micro_batches_gives_the_gradient_bit_for_bit_that_keeping_in_place_does(recompute):
    """A second pass that wrote over what the first still needs, or read what the first left, would show."""
    model = build("llama", hidden_size=512, intermediate_size=300, num_attention_heads=4, num_key_value_heads=2).train()
    batches = []
    for seed in range(2):
        tokens = [3 + (7 * place + seed) % 20 for place in range(200)]
        rows = tuple(tuple(tokens[9 * row : 9 * row + 20 + row]) for row in range(4))
        mask = torch.arange(23) < torch.tensor([len(row) for row in rows]).unsqueeze(1)
        batches.append(Batch((tuple(tokens),), (0,) * 4, rows, mask, torch.zeros(4, 1), torch.zeros(4, 23)))

    def gradients(shelf: Shelf) -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            with in_place():
                logps, entropy = completion_logps(model, batch, temperature=1.0, packed=True, shelf=shelf)
                ((logps + 0.1 * entropy) * batch.mask).sum().backward()
            shelf.clear()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    ours, in_their_place = gradients(Shelf(recompute_mlp=recompute)), gradients(Shelf(closed=True))
    assert len(ours) == len(list(model.parameters()))
    for one, other in zip(ours, in_their_place, strict=True):
        assert torch.equal(one, other)
