"""From records to tensors: a `Batch` of rows that still know their prompt, and its micro-batches.

Text lives left of `collate`, tensors right of it. Columns are `(B, T)` and padded, since they are small; what the model
forwards is packed from `prompts` and `completions`, where nothing is padded and each prompt stands once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.ops import Denominators
from grpo_toolbox.types import Rollout


@dataclass(frozen=True, eq=False)
class Batch:
    """B completions and the U prompts they continue.

    Example: prompts=((5, 6),), group=(0, 0), completions=((7, 2), (8,)), mask=[[1, 1], [1, 0]].
    """

    prompts: tuple[tuple[int, ...], ...]  # U
    group: tuple[int, ...]
    """(B,) index into `prompts`; rows of one prompt stand together."""
    completions: tuple[tuple[int, ...], ...]  # B
    mask: Tensor
    """(B, T) True on tokens that are trained; from lengths and from who wrote them, never from token ids."""
    advantages: Tensor
    """(B, 1), or (B, T) where the estimator is per token."""
    sampler_logps: Tensor
    """(B, T) what the engine reported."""
    versions: Tensor | None = None
    """(B, T) of the weights that drew each token: the number of the step that made them."""
    old_logps: Tensor | None = None
    """(B, T) under the policy that the update started from; None while that is the policy itself."""
    ref_logps: Tensor | None = None
    """(B, T) under the reference."""
    values: Tensor | None = None
    """(B, T) the critic's, when the rollouts were judged."""
    returns: Tensor | None = None
    """(B, T) what the critic is to learn; NaN where nothing."""
    trained: Tensor | None = None
    """(B, T) which of the masked tokens the surrogate trains; None is all of them."""
    anchored: Tensor | None = None
    """(B, T) which tokens are held near the policy that the update started from; None is none of them."""
    prompt_length: Tensor | None = None
    """(B, 1) `prompt_lengths` of the whole step, of these rows."""

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, rows: Sequence[int]) -> Batch:
        """Return only these rows (a micro-batch): unused prompts dropped, columns cut to their longest row."""
        if list(rows) == list(range(len(self))):
            return self
        index = torch.tensor(rows, dtype=torch.long)
        used = sorted({self.group[row] for row in rows})
        place = {old: new for new, old in enumerate(used)}
        completions = tuple(self.completions[row] for row in rows)
        width = max((len(ids) for ids in completions), default=0)

        def cut(column: Tensor) -> Tensor:
            return column[index.to(column.device)][:, : max(width, 1)]

        columns: dict[str, Any] = {name: cut(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(
            self,
            prompts=tuple(self.prompts[old] for old in used),
            group=tuple(place[self.group[row]] for row in rows),
            completions=completions,
            **columns,
        )

    @cached_property
    def distinct(self) -> tuple[Batch, Tensor | None]:
        """Return the rows that differ in prompt or completion, and where among them each row (B,) stands.

        None in place of the latter where all differ. A model without noise says the same about equal rows.
        """
        firsts: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        places = [
            firsts.setdefault(content, (len(firsts), row))[0]
            for row, content in enumerate(zip(self.group, self.completions, strict=True))
        ]
        if len(firsts) == len(self):
            return self, None
        return self.select([row for _, row in firsts.values()]), torch.tensor(places, device=self.mask.device)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on `device`."""
        tensors: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})

    @property
    def forward_tokens(self) -> int:
        """Tokens that the packed forward pass runs over."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


def collate(rollouts: Sequence[Rollout], advantages: Tensor, *, mask_truncated: bool = False) -> Batch:
    """Put P·G prompt-major rollouts and their advantages, (P, G) or (P, G, T), into one batch.

    With `mask_truncated` the tokens of completions that hit the length limit are not trained and not counted.
    """
    group_size = advantages.shape[1]
    if advantages.shape[0] * group_size != len(rollouts):
        raise ValueError(f"advantages {tuple(advantages.shape)} do not belong to {len(rollouts)} rollouts")
    per_row = advantages.flatten(0, 1).float()
    longest = max(len(rollout.ids) for rollout in rollouts)
    cut_off = torch.tensor([mask_truncated and rollout.finish_reason == "length" for rollout in rollouts])
    return Batch(
        prompts=tuple(rollout.prompt.ids for rollout in rollouts[::group_size]),
        group=tuple(row // group_size for row in range(len(rollouts))),
        completions=tuple(rollout.ids for rollout in rollouts),
        mask=written(rollouts) & ~cut_off.unsqueeze(1),
        advantages=per_row[:, :longest] if per_row.ndim == 2 else per_row.unsqueeze(1),
        sampler_logps=pad_rows([rollout.logps for rollout in rollouts]),
        versions=_versions(rollouts),
    )


def _versions(rollouts: Sequence[Rollout]) -> Tensor:
    """Return (B, T) of the weights that drew each token, zeros behind the end."""
    if any(rollout.versions for rollout in rollouts):
        return pad_rows([rollout.token_versions for rollout in rollouts]).long()
    return _inside(rollouts) * torch.tensor([rollout.weights_version for rollout in rollouts]).unsqueeze(1)


def written(rollouts: Sequence[Rollout]) -> Tensor:
    """Return (B, T) True on the tokens that the model wrote, False on what it was given to read and behind the end."""
    inside = _inside(rollouts)
    if not any(rollout.written for rollout in rollouts):
        return inside
    return inside & pad_rows([rollout.written or (True,) * len(rollout.ids) for rollout in rollouts]).bool()


def _inside(rollouts: Sequence[Rollout]) -> Tensor:
    """Return (B, T) True up to each completion's end."""
    lengths = torch.tensor([len(rollout.ids) for rollout in rollouts])
    return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)


def pad_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return (B, longest) float32 with zeros behind the shorter rows."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *([0.0] * (width - len(row)))] for row in rows], dtype=torch.float32)


def denominators(batch: Batch, length: float) -> Denominators:
    """Count what the losses of this whole step are divided by, before any row is left out or split off."""
    return Denominators(sequences=len(batch), tokens=float(batch.mask.sum()), length=length)


def prompt_lengths(batch: Batch) -> Tensor:
    """Return (B, 1) how many tokens of a completion are trained, on average over all completions of its prompt."""
    group = torch.tensor(batch.group, dtype=torch.long, device=batch.mask.device)
    rows = torch.bincount(group, minlength=len(batch.prompts)).float()
    tokens = torch.zeros_like(rows).index_add(0, group, batch.mask.sum(dim=1).float())
    return (tokens / rows)[group].unsqueeze(1)


def rows_with_gradient(batch: Batch) -> list[int]:
    """Return the rows with a trained token whose advantage is not exactly zero."""
    return ((batch.advantages != 0) & batch.mask).any(dim=1).nonzero().squeeze(1).tolist()


def micro_batches(batch: Batch, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Split `rows` into runs that forward at most about `tokens` tokens each; groups stay whole where they fit.

    A single row that is longer than the budget still forms a run of its own.
    """
    runs: list[list[int]] = []
    room = 0
    for members in _by_group(batch, rows):
        prompt = len(batch.prompts[batch.group[members[0]]])
        whole = prompt + sum(len(batch.completions[row]) for row in members)
        if not runs or (whole > room and whole <= tokens):
            runs.append([])
            room = tokens
        cost = prompt
        for row in members:
            cost += len(batch.completions[row])
            if runs[-1] and cost > room:
                runs.append([])
                room = tokens
                cost = prompt + len(batch.completions[row])
            runs[-1].append(row)
            room -= cost
            cost = 0
    return [run for run in runs if run]


def _by_group(batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(batch.group[row], []).append(row)
    return list(groups.values())
