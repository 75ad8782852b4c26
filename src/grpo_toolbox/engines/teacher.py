"""The trainer's own log-probs of rows of token ids, which every engine is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import collate
from grpo_toolbox.engines.probe import Row
from grpo_toolbox.models.forward import autocast, completion_logps, eval_mode
from grpo_toolbox.models.lora import has_adapter
from grpo_toolbox.types import Prompt, Rollout


class Teacher:
    """Forces rows through the training forward; log-probs come back as float32 on the processor, without gradient."""

    def __init__(self, policy: nn.Module, *, packed: bool, autocast_dtype: torch.dtype | None = None) -> None:
        self._policy: Any = policy
        self._packed = packed
        self._autocast_dtype = autocast_dtype

    @torch.no_grad()
    def logps(self, rows: Sequence[Row], first: Sequence[int], *, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of the tokens of each row from its place in `first`, at least 1, on."""
        device = next(self._policy.parameters()).device
        forced = [
            Rollout(Prompt(index, "", row[:start]), row[start:], (0.0,) * (len(row) - start), "length", "")
            for index, (row, start) in enumerate(zip(rows, first, strict=True))
        ]
        batch = collate(forced, torch.zeros(len(rows), 1)).to(device)
        with eval_mode(self._policy), autocast(device, self._autocast_dtype):
            logps, _ = completion_logps(self._policy, batch, temperature=temperature, packed=self._packed)
        return [one[: len(each.ids)].float().cpu() for one, each in zip(logps, forced, strict=True)]

    def next_logps(self, rows: Sequence[Row]) -> Tensor:
        """Return all log-probs (R, V) behind each row, at temperature 1."""
        return self._next(rows, self._autocast_dtype)

    def next_half_logps(self, rows: Sequence[Row]) -> Tensor:
        """Return them computed in bfloat16."""
        return self._next(rows, torch.bfloat16)

    def next_base_logps(self, rows: Sequence[Row]) -> Tensor | None:
        """Return them without the adapter; None where there is none."""
        if not has_adapter(self._policy):
            return None
        with self._policy.disable_adapter():
            return self._next(rows, self._autocast_dtype)

    @torch.no_grad()
    def _next(self, rows: Sequence[Row], dtype: torch.dtype | None) -> Tensor:
        """The plain forward, row by row: no padding, whatever the model."""
        device = next(self._policy.parameters()).device
        with eval_mode(self._policy), autocast(device, dtype):
            logits = [
                self._policy(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0, -1]
                for row in rows
            ]
        return torch.stack(logits).float().log_softmax(dim=-1).cpu()
