"""The packed layout of short groups: a dense row for each, its prompt and then all its completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_toolbox.models.attention import flat, gathered, grouped_attention


@dataclass(frozen=True)
class DenseLayout:
    """Prompts and then completions in one sequence of N tokens; each of the U groups is one row of L tokens.

    Scores between completions of a group are computed and thrown away, which takes less time than many small views.
    """

    index: Tensor
    """(U, L) position in the sequence of each token of a group; 0 behind the end of a shorter one."""
    mask: Tensor
    """(U, 1, L, L) True where a token may look."""
    source: Tensor
    """(N,) flat places in (U, L) of the tokens, in the order of the sequence."""
    span: int
    """Tokens of the longest prompt and the longest completion together."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return (1, N, heads, D) for the packed sequence of `query` (1, heads, N, D), `key`, `value` (1, kv, N, D)."""
        q, k, v = (gathered(states[0].transpose(0, 1), self.index) for states in (query, key, value))
        return flat(grouped_attention(q, k, v, self.mask, scaling))[self.source].unsqueeze(0)


def dense_layout(
    prompt_lengths: list[int], completion_lengths: list[int], group: list[int], device: torch.device
) -> DenseLayout:
    """Lay out U prompts and B completions as `packed_layout` does, as one row per group."""
    lengths = torch.tensor([*prompt_lengths, *completion_lengths])
    count = len(prompt_lengths)
    run = torch.arange(len(lengths)).repeat_interleave(lengths)  # (N,) the prompt or completion that a token is of
    owner = torch.tensor([*range(count), *group])[run]  # (N,) and its group
    sizes = torch.bincount(owner, minlength=count)
    order = owner.argsort(stable=True)  # group after group, a prompt before its completions
    width = int(sizes.max())
    places = torch.arange(len(run)) - (sizes.cumsum(0) - sizes)[owner[order]] + owner[order] * width
    index = torch.zeros(count * width, dtype=torch.long).index_copy(0, places, order)
    runs = torch.full((count * width,), -1).index_copy(0, places, run[order]).view(count, 1, width)
    alike = (runs == runs.transpose(1, 2)) | (runs == torch.arange(count).view(-1, 1, 1))
    source = torch.empty_like(places).index_copy(0, order, places)
    span = max(prompt_lengths) + max(completion_lengths, default=0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return DenseLayout(
        index.view(count, width).to(device), (alike & causal).unsqueeze(1).to(device), source.to(device), span
    )
