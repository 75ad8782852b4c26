"""Log-probs of completions under a model: packed, with each prompt forwarded once, or padded where that cannot be.

Both give the same numbers on a model that `models/packing.py` has nothing to say about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch
from grpo_toolbox.gradients import goes_in_place, is_bare, looked_up
from grpo_toolbox.models.attention import Layout, PackedLayout, layout_attention, packed_layout, same_attention_again
from grpo_toolbox.models.dense import DenseLayout, dense_layout
from grpo_toolbox.models.head import Float32Head
from grpo_toolbox.models.linear import fast_linear, same_forwards_again
from grpo_toolbox.models.shelf import Shelf
from grpo_toolbox.ops import head_logps_and_entropy, logps_and_entropy

_SHORT_GROUP = 64
"""Tokens of a prompt and all its completions up to which one dense row per group takes less time than many views."""


def completion_logps(
    model: nn.Module, batch: Batch, *, temperature: float, packed: bool, shelf: Shelf | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (B, T) in nats of the batch's completions at `temperature`; zeros off the mask.

    What backward needs of a packed pass is put on `shelf`, which must stay as it is until then.
    """
    plain = plain_model(model)
    return _packed(plain, batch, temperature, shelf or Shelf()) if packed else _padded(plain, batch, temperature)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Run the block in `dtype` where the weights are float32; None leaves everything as it is."""
    with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def in_half_precision(model: nn.Module, autocast_dtype: torch.dtype | None) -> bool:
    """Tell whether a forward pass rounds to 16 bits, so that another layout has other log-probs."""
    dtypes = {parameter.dtype for parameter in model.parameters()} | {autocast_dtype}
    return not dtypes.isdisjoint((torch.bfloat16, torch.float16))


def plain_model(model: Any) -> Any:
    """Return the Hugging Face model itself; under PEFT its adapter layers are already inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block; afterwards every module that was in training mode is so again."""
    noisy = [module for module in model.modules() if module.training]
    try:
        for module in noisy:
            module.training = False
        yield
    finally:
        for module in noisy:
            module.training = True


def same_pass_again(model: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return torch's two contexts of gradient checkpointing: what a backward pass computes again, outside the blocks
    of its forward pass, is computed as it was there."""
    return nullcontext(), _both(same_attention_again(model), same_forwards_again())


@contextmanager
def _both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


def completion_hidden(model: nn.Module, batch: Batch, *, packed: bool) -> Tensor:
    """Return the last hidden state (N, H) that predicts each token of the completions, row after row."""
    plain = plain_model(model)
    return _packed_hidden(plain, _packing(batch), Shelf()) if packed else _padded_hidden(plain, batch)


@dataclass(frozen=True)
class _Packing:
    """A batch as one sequence of N tokens, each prompt once: what every model that forwards it needs alike."""

    ids: Tensor
    """(1, N), and `positions` (1, N) in each token's own row."""
    positions: Tensor
    predictors: Tensor
    """(M,) which position predicts each completion token, and `targets` (M,) which token that is."""
    targets: Tensor
    layout: Layout


_PACKINGS: WeakKeyDictionary[Batch, _Packing] = WeakKeyDictionary()
"""Policy and reference, and all epochs, run over the same packing."""
_WORTH_KEEPING = 2**20
"""Bytes of a packing's mask up to which it is kept for the next pass: it grows with the square of the lengths, takes
little time to make beside a pass that long, and a step's micro-batches would all hold theirs at once."""


def _packing(batch: Batch) -> _Packing:
    packing = _PACKINGS.get(batch)
    if packing is None:
        packing = _pack(batch)
        layout = packing.layout
        if not isinstance(layout, PackedLayout | DenseLayout) or layout.mask.nbytes <= _WORTH_KEEPING:
            _PACKINGS[batch] = packing
    return packing


def _pack(batch: Batch) -> _Packing:
    device = batch.mask.device
    heads = [ids[:-1] for ids in batch.completions]  # the last token predicts nothing that is trained
    prompt_lengths, lengths = [len(ids) for ids in batch.prompts], [len(ids) for ids in heads]
    positions = [place for length in prompt_lengths for place in range(length)]
    for group, length in zip(batch.group, lengths, strict=True):
        positions.extend(range(prompt_lengths[group], prompt_lengths[group] + length))
    return _Packing(
        ids=torch.tensor([[token for part in (*batch.prompts, *heads) for token in part]], device=device),
        positions=torch.tensor([positions], device=device),
        predictors=_predictors(batch, prompt_lengths, lengths).to(device),
        targets=torch.tensor([token for row in batch.completions for token in row], device=device),
        layout=_layout(prompt_lengths, lengths, list(batch.group), device),
    )


def _packed(model: Any, batch: Batch, temperature: float, shelf: Shelf) -> tuple[Tensor, Tensor]:
    packing = _packing(batch)
    hidden = _packed_hidden(model, packing, shelf)
    head = _plain_head(model)
    in_float32 = isinstance(head, Float32Head)
    logps, entropy = head_logps_and_entropy(hidden, head.weight, packing.targets, temperature, in_float32=in_float32)
    return spread(logps, batch), spread(entropy, batch)


def _packed_hidden(model: Any, packing: _Packing, shelf: Shelf) -> Tensor:
    # a layer that is computed twice as a whole need not compute parts of it thrice
    if any(vars(module).get("gradient_checkpointing") for module in model.modules()):
        shelf = Shelf(frugal=shelf.frugal, closed=True)
    layout = packing.layout
    if isinstance(layout, PackedLayout) and not shelf.closed:
        layout = replace(layout, shelf=shelf)
    with layout_attention(model), fast_linear(model, shelf):
        hidden = decoder(model)(
            **_inputs(model, packing.ids),
            position_ids=packing.positions,
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]  # (N, H)
    if hidden.requires_grad:
        shelf.tidy()
        hidden.register_hook(lambda _: shelf.tidy())  # the head's probabilities are gone by then
    return hidden[packing.predictors]


def _inputs(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Token ids, or their embeddings where those of a plain table get their gradient added in place."""
    table = model.get_input_embeddings()
    if type(table) is nn.Embedding and torch.is_grad_enabled() and table.weight.requires_grad:
        plain = not (table.sparse or table.scale_grad_by_freq or table.max_norm)
        if plain and is_bare(table) and goes_in_place(table.weight):
            return {"inputs_embeds": looked_up(table, ids)}
    return {"input_ids": ids}


def _layout(prompt_lengths: list[int], lengths: list[int], group: list[int], device: torch.device) -> Layout:
    if device.type == "cuda":
        from grpo_toolbox.models.flex import flex_layout, flex_works

        if flex_works(device, torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32):
            return flex_layout(prompt_lengths, lengths, group, device)
    sizes = list(prompt_lengths)
    for owner, length in zip(group, lengths, strict=True):
        sizes[owner] += length
    lay_out = dense_layout if max(sizes) <= _SHORT_GROUP else packed_layout
    return lay_out(prompt_lengths, lengths, group, device)


def decoder(model: Any) -> Any:
    """Return the model without its language-model head."""
    return model.get_decoder()


def _plain_head(model: Any) -> nn.Linear:
    """Return a head that is one matrix and nothing else: a bias or an adapter can be zero at first and grow unseen,
    and so can a scale that a kind of its own has learnt from 1 on."""
    head: Any = model.get_output_embeddings()
    if type(head) not in (nn.Linear, Float32Head) or head.bias is not None:
        raise NotImplementedError("an output head that is more than one matrix")
    return head


def _predictors(batch: Batch, prompt_lengths: list[int], lengths: list[int]) -> Tensor:
    """Return, for each completion token, the position in the packed sequence that predicts it.

    The first token of a completion is predicted by the last token of its prompt, which the group shares.
    """
    sizes = [*prompt_lengths, *lengths]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    predictors: list[int] = []
    for row, (group, ids) in enumerate(zip(batch.group, batch.completions, strict=True)):
        first = starts[len(prompt_lengths) + row]
        if ids:
            predictors += [starts[group] + prompt_lengths[group] - 1, *range(first, first + len(ids) - 1)]
    return torch.tensor(predictors, dtype=torch.long)


def spread(flat: Tensor, batch: Batch) -> Tensor:
    """Put values of all completion tokens, row after row, back into (B, T)."""
    lengths = torch.tensor([len(ids) for ids in batch.completions], device=flat.device)
    real = torch.arange(batch.mask.shape[1], device=flat.device) < lengths.unsqueeze(1)
    return torch.zeros(batch.mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(real, flat)


def _padded(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """The plain way: one row per completion, prompt repeated, padded on the right, full logits."""
    input_ids, real, targets, inside = _padded_rows(batch)
    logits = model(input_ids=input_ids, attention_mask=real.long(), use_cache=False).logits  # (B, S, V)
    row = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
    logps, entropy = logps_and_entropy(logits[row, targets - 1], input_ids[row, targets], temperature)
    return torch.where(inside, logps, 0.0), torch.where(inside, entropy, 0.0)


def _padded_hidden(model: Any, batch: Batch) -> Tensor:
    input_ids, real, targets, inside = _padded_rows(batch)
    hidden = decoder(model)(input_ids=input_ids, attention_mask=real.long(), use_cache=False).last_hidden_state
    row = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
    return hidden[row, targets - 1][inside]


def _padded_rows(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token ids (B, S), which of them are real, where each completion token stands (B, T), and which exist."""
    device = batch.mask.device
    rows = [(*batch.prompts[group], *ids) for group, ids in zip(batch.group, batch.completions, strict=True)]
    width = max(map(len, rows))
    input_ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    real = torch.arange(width, device=device) < lengths.unsqueeze(1)
    starts = torch.tensor([len(batch.prompts[group]) for group in batch.group], device=device)
    targets = starts.unsqueeze(1) + torch.arange(batch.mask.shape[1], device=device)  # (B, T)
    inside = targets < lengths.unsqueeze(1)
    return input_ids, real, targets.clamp(max=width - 1), inside
