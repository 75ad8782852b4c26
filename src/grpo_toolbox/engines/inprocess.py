"""What engines on the policy's own weights share: how drawn tokens become rollouts, versions, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing

import torch
from torch import nn

from grpo_toolbox.engines import OnFinished, Traits
from grpo_toolbox.engines.reading import Decode, Reader
from grpo_toolbox.errors import Cancelled
from grpo_toolbox.models.forward import autocast, eval_mode
from grpo_toolbox.types import Prompt, Rollout, Sampling

Drawn = tuple[int, list[int], list[float], Sequence[tuple[int, int]]]
"""A finished row: its number, its ids, their log-probs, and which weights drew them: (version, number of tokens)."""


class InProcessEngine:
    """Samples in the trainer's process; a kind of engine says in `_draw` how, and with whose weights.

    `weights_version` is how many syncs a resumed run has seen before.
    """

    traits = Traits(shares_weights=True, exact=True, logps="tempered", drawn_logps=True)

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Decode,
        stop_ids: Sequence[int],
        autocast_dtype: torch.dtype | None = None,
        weights_version: int = 0,
    ) -> None:
        self._model = model
        self._decode = decode
        self._stop_ids = tuple(stop_ids)
        self._autocast_dtype = autocast_dtype
        self._version = weights_version
        self._cancelled = threading.Event()

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major; `on_finished(row, rollout)` hears of each."""
        self._cancelled.clear()
        rollouts: dict[int, Rollout] = {}
        kind = "processed" if sampling.drawn_logps else self.traits.logps
        reader = Reader(self._decode, self._stop_ids, sampling, kind)
        device = next(self._model.parameters()).device
        # in the precision of the training forward, or the two would disagree about log-probs
        with (
            eval_mode(self._model),
            torch.inference_mode(),
            autocast(device, self._autocast_dtype),
            closing(self._draw(prompts, group_size, sampling)) as drawn,
        ):
            for row, ids, logps, versions in drawn:
                rollouts[row] = reader.rollout(prompts[row // group_size], ids, logps, versions)
                if on_finished is not None:
                    on_finished(row, rollouts[row])
        return [rollouts[row] for row in range(len(prompts) * group_size)]

    def cancel(self) -> None:
        """Make the `generate` that is under way raise Cancelled at its next token."""
        self._cancelled.set()

    def sync(self, version: int | None = None) -> int:
        """The weights are the model's own, so nothing has to move; count the version, or take the one given."""
        self._version = self._version + 1 if version is None else version
        return self._version

    def close(self) -> None:
        """Nothing to release."""

    def _draw(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> Generator[Drawn]:
        raise NotImplementedError

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the generation of rollouts was cancelled.")
