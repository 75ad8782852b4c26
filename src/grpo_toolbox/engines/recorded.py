"""One token's forward pass, recorded once and replayed: launching small kernels takes a GPU longer than running them.

Last run on a GPU: never. A recording is therefore used only after its first replay has been compared with the pass
itself, and one that fails or differs is given up for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_toolbox.engines.cache import KeyValues

log = logging.getLogger(__name__)

Work = Callable[[], Tensor]
"""A pass over tensors that stay where they are: each call reads what they hold by then."""
_TOLERANCE = 0.02
"""Largest difference of logits, as a share of the largest one, that is rounding: kernels may sum in another order."""


def cuda_graph(work: Work) -> Work:
    """Return `work` as a CUDA graph; other threads may go on using the GPU while it is recorded."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class RecordedPass:
    """Runs the passes of one `generate` call after another; what is recorded is kept while all tensors stay in place.

    `works` turns False once recording has failed.
    """

    def __init__(self, record: Callable[[Work], Work] = cuda_graph) -> None:
        self.works = True
        self._record, self._compared = record, False
        self.forget()

    def forget(self) -> None:
        """Drop the recording: weights or copies of them are about to stand elsewhere."""
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._replay: Work | None = None

    def run(self, forward: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, cache: KeyValues) -> Tensor:
        """Return the logits (N, V) of `forward(tokens, positions)`, both (N, 1), for one more token (N,) per row.

        The first pass after a change runs as it is, so that everything is loaded when the second one is recorded.
        """
        in_place = cache.begin(fixed=True)
        now = tokens.unsqueeze(1), cache.positions().unsqueeze(1)
        if self._inputs is None or not in_place:
            self.forget()
            self._inputs = now
            return forward(*now)
        for held, new in zip(self._inputs, now, strict=True):
            held.copy_(new)
        if self._replay is None:
            inputs = self._inputs

            def work() -> Tensor:
                cache.rewind()
                return forward(*inputs)

            self._replay = self._recording(work)
        return self._replay()

    def _recording(self, work: Work) -> Work:
        try:
            replay = self._record(work)
            reason = None if self._compared else _difference(replay(), work())
        except RuntimeError as error:  # whatever a model does that cannot be recorded
            reason = str(error).partition("\n")[0]
        if reason is not None:
            log.warning("a token's forward pass cannot be recorded here (%s): every one is launched anew.", reason)
            self.works = False
            return work
        self._compared = True
        return replay


def _difference(replayed: Tensor, computed: Tensor) -> str | None:
    gap = float((replayed - computed).abs().max() / computed.abs().max())
    return None if gap <= _TOLERANCE else f"its logits differ by {gap:.2g}"
