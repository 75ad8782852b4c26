"""The endless order in which prompts are trained on."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from grpo_toolbox.errors import DataError
from grpo_toolbox.types import Prompt

log = logging.getLogger(__name__)


class PromptStream:
    """Batches of exactly `batch_size` prompts without end, each epoch a new order given by (seed, epoch).

    A batch may hold the end of one epoch and the beginning of the next, so no prompt is left out of an epoch; it never
    holds the same row twice.
    """

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1 or len(prompts) < batch_size:
            raise DataError(
                f"the data is smaller than one batch: {len(prompts)} prompts, rollout.prompts_per_step={batch_size}. "
                f"Set rollout.prompts_per_step from 1 to {max(1, len(prompts))}, or give more data."
            )
        self._prompts = tuple(prompts)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._rewind()

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._prompts)

    @property
    def epoch(self) -> float:
        """How many times the data has been gone through; 1.5 is the middle of the second time."""
        return self._position / len(self._prompts)

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next batch, or the next `count` prompts, which must not be more than a batch."""
        count = self._batch_size if count is None else count
        start = self._position - self._epoch * len(self._prompts)
        batch = self._order[start : start + count]
        missing = count - len(batch)
        self._position += count
        if start + count >= len(self._prompts):
            self._begin_next_epoch(len(batch) if missing else 0, missing)
        return [self._prompts[index] for index in [*batch, *self._order[:missing]]]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts handed out, how each epoch's end was, and whose data this is."""
        return {"position": self._position, "ends": [*self._ends], "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stopped; with other data, warn and begin at the beginning."""
        self._rewind()
        if state["fingerprint"] != self._fingerprint:
            log.warning(
                "the data is not what the checkpoint was trained on: its position is dropped, the data starts at 0."
            )
            return
        for left_over, missing in state["ends"]:
            self._begin_next_epoch(left_over, missing)
        self._position = state["position"]

    def _rewind(self) -> None:
        self._position = 0
        self._epoch = 0
        self._ends: list[tuple[int, int]] = []
        self._order = self._shuffled(0)

    def _begin_next_epoch(self, left_over: int, missing: int) -> None:
        """Order the next epoch such that the batch across the boundary has no row twice.

        That batch takes the last `left_over` rows of this epoch and the first `missing` of the next.
        """
        self._epoch += 1
        self._ends.append((left_over, missing))
        last = set(self._order[len(self._order) - left_over :])
        fresh = self._shuffled(self._epoch)
        head = [index for index in fresh if index not in last][:missing]
        taken = set(head)
        self._order = head + [index for index in fresh if index not in taken]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            row = [prompt.id, prompt.text, dict(prompt.columns)]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
