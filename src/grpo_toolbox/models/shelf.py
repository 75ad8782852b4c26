"""Where a training pass on a processor puts what it keeps for backward: side by side, in memory of its own.

Kept where they were made, tensors that stay come to lie between tensors that go, and the gaps fit nothing any more: a
pass then takes twice the memory of what it keeps.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from grpo_toolbox.allocator import hand_back_freed_memory

_BLOCK = 64 * 2**20
"""Bytes that are asked for at a time: a mapping of their own."""
_WORTH_PUTTING = 2**17
"""Bytes of a tensor from which on its place matters."""
_LINE = 64
"""Bytes to whose multiple a place is rounded up."""


class Shelf:
    """Copies of one pass's tensors, one behind the other.

    With `recompute_mlp` an MLP's wide activations are not among them. With `frugal` what the pass has freed is given
    back at its turning points, at the price of clearing the pages anew. A `closed` one takes nothing: for passes whose
    layers are computed again as a whole.
    """

    def __init__(self, *, recompute_mlp: bool = False, frugal: bool = False, closed: bool = False) -> None:
        self.recompute_mlp, self.frugal, self.closed = recompute_mlp, frugal, closed
        self._blocks: list[torch.UntypedStorage] = []
        self.clear()

    def clear(self) -> None:
        """Make room for the next pass: what stands here must not be read any more, as after `loss.backward()`."""
        self._number, self._used = -1, 0
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def put(self, x: Tensor) -> Tensor:
        """Return a copy of `x`, without its history, that stands on the shelf; `x` where that would gain nothing.

        Put again right away, as by layers that share their input, it is the same copy.
        """
        if self.closed or x.device.type != "cpu" or x.nbytes < _WORTH_PUTTING:
            return x
        if self._last is not None and self._last[0]() is x and self._last[1] == x._version:
            return self._last[2]
        copy = self._place(x.nbytes, x.dtype).view(x.shape)
        with torch.no_grad():
            copy.copy_(x)
        self._last = weakref.ref(x), x._version, copy
        return copy

    def tidy(self) -> None:
        """Give back what the pass has freed so far, where that is asked for."""
        if self.frugal:
            hand_back_freed_memory()

    def _place(self, size: int, dtype: torch.dtype) -> Tensor:
        while self._number < 0 or self._used + size > self._blocks[self._number].nbytes():
            self._number, self._used = self._number + 1, 0
            if self._number == len(self._blocks):
                self._blocks.append(torch.UntypedStorage(max(size, _BLOCK)))
        start = self._used // dtype.itemsize
        self._used += -(-size // _LINE) * _LINE
        # a tensor of its own, not a view: what is put beside it later does not count as a change of it
        return torch.empty(0, dtype=dtype).set_(self._blocks[self._number], start, (size // dtype.itemsize,), (1,))
