"""Log-probs of completions under a model: packed, with each prompt forwarded once, or padded where that cannot be.

Both give the same numbers; `packing_gap` measures by how much they differ on the model at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch
from grpo_toolbox.models.attention import layout_attention, packed_layout
from grpo_toolbox.ops import head_logps_and_entropy, logps_and_entropy


def completion_logps(model: nn.Module, batch: Batch, *, temperature: float, packed: bool) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (B, T) in nats of the batch's completions at `temperature`; zeros off the mask."""
    return (_packed if packed else _padded)(plain_model(model), batch, temperature)


def plain_model(model: Any) -> Any:
    """Return the Hugging Face model itself; under PEFT its adapter layers are already inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _packed(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    device = batch.mask.device
    heads = [ids[:-1] for ids in batch.completions]  # the last token predicts nothing that is trained
    prompt_lengths, lengths = [len(ids) for ids in batch.prompts], [len(ids) for ids in heads]
    ids = [token for part in (*batch.prompts, *heads) for token in part]
    positions = [place for length in prompt_lengths for place in range(length)]
    for group, length in zip(batch.group, lengths, strict=True):
        positions.extend(range(prompt_lengths[group], prompt_lengths[group] + length))
    layout = packed_layout(prompt_lengths, lengths, list(batch.group), device)
    with layout_attention(model):
        hidden = decoder(model)(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]  # (N, H)
    logps, entropy = head_logps_and_entropy(
        hidden[_predictors(batch, prompt_lengths, lengths).to(device)],
        model.get_output_embeddings().weight,
        torch.tensor([token for row in batch.completions for token in row], device=device),
        temperature,
    )
    return _spread(logps, batch), _spread(entropy, batch)


def decoder(model: Any) -> Any:
    """Return the model without its language-model head."""
    return model.get_decoder()


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


def _spread(flat: Tensor, batch: Batch) -> Tensor:
    """Put values of all completion tokens, row after row, back into (B, T)."""
    lengths = torch.tensor([len(ids) for ids in batch.completions], device=flat.device)
    real = torch.arange(batch.mask.shape[1], device=flat.device) < lengths.unsqueeze(1)
    return torch.zeros(batch.mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(real, flat)


def _padded(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """The plain way: one row per completion, prompt repeated, padded on the right, full logits."""
    device = batch.mask.device
    rows = [(*batch.prompts[group], *ids) for group, ids in zip(batch.group, batch.completions, strict=True)]
    width = max(map(len, rows))
    input_ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    real = torch.arange(width, device=device) < lengths.unsqueeze(1)
    logits = model(input_ids=input_ids, attention_mask=real.long(), use_cache=False).logits  # (B, S, V)
    starts = torch.tensor([len(batch.prompts[group]) for group in batch.group], device=device)
    targets = starts.unsqueeze(1) + torch.arange(batch.mask.shape[1], device=device)  # (B, T)
    inside = targets < lengths.unsqueeze(1)
    targets = targets.clamp(max=width - 1)
    row = torch.arange(len(rows), device=device).unsqueeze(1)
    logps, entropy = logps_and_entropy(logits[row, targets - 1], input_ids[row, targets], temperature)
    return torch.where(inside, logps, 0.0), torch.where(inside, entropy, 0.0)


@torch.no_grad()
def packing_gap(model: nn.Module, vocabulary: int, device: torch.device) -> float:
    """Return the largest |Δ log-prob| between the packed and the plain forward on a small probe; inf if it cannot run.

    Sliding windows, linear attention, score caps, scaled logits and absolute positions all show here, before training.
    """
    tokens = [(7 * place + 3) % vocabulary for place in range(40)]
    prompts = (tuple(tokens[:9]), tuple(tokens[9:12]))
    completions = (tuple(tokens[12:26]), tuple(tokens[26:31]), tuple(tokens[31:40]))
    mask = torch.arange(14, device=device) < torch.tensor([14, 5, 9], device=device).unsqueeze(1)
    zeros = torch.zeros(3, 14, device=device)
    probe = Batch(prompts, (0, 0, 1), completions, mask, zeros[:, :1], zeros)
    plain, _ = completion_logps(model, probe, temperature=1.0, packed=False)
    try:
        packed, _ = completion_logps(model, probe, temperature=1.0, packed=True)
    except (NotImplementedError, TypeError, AttributeError, KeyError, RuntimeError):
        return float("inf")  # a decoder that does not take a layout, or has no single decoder and head
    return float((packed - plain).abs().max())
