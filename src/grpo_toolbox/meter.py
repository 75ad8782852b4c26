"""What an update measures on its way: sums over a step's tokens, whatever the split into micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from grpo_toolbox.mismatch import MismatchMeter


class Meter:
    """Losses, per-token terms and what the clip held back, of one step and its passes over the batch."""

    def __init__(self, of_completions: bool = False) -> None:
        """`of_completions`: the ratio is that of whole completions, and so is what is clipped."""
        self._of_completions = of_completions
        self._loss = 0.0
        self._sums: dict[str, float] = defaultdict(float)
        self._per_row: set[str] = set()
        self._tokens, self._rows = 0.0, 0
        self._clips: list[ClipMeter] = []
        self.mismatch = MismatchMeter()

    def begin_pass(self) -> None:
        """A pass over the batch begins."""
        self._clips.append(ClipMeter(self._of_completions))

    def add(self, loss: Tensor, terms: Mapping[str, Tensor], advantages: Tensor, mask: Tensor) -> None:
        """Count one micro-batch: its share of the loss, terms per token (B, T) or row (B,), advantages (B, 1|T)."""
        self._loss += float(loss.detach())
        self._tokens += float(mask.sum())
        self._rows += len(mask)
        self._clips[-1].add(terms["clip_fraction"], terms["ratio"], advantages, mask)
        for name, values in terms.items():
            if name != "clip_fraction":
                self._sums[name] += float((values if values.dim() == 1 else values[mask]).sum())
                self._per_row |= {name} if values.dim() == 1 else set()

    def is_finite(self) -> bool:
        """Whether the loss so far is a number."""
        return abs(self._loss) < float("inf")

    def metrics(self, tokens: float, completions: int) -> dict[str, float]:
        """Return means of the terms over what was forwarded, the loss per pass, and the mismatch with the sampler.

        `tokens` and `completions` are those of the whole step, of which the clip's shares are.
        """
        sizes = {name: self._rows if name in self._per_row else self._tokens for name in self._sums}
        means = {name: value / sizes[name] for name, value in self._sums.items() if sizes[name]}
        each = [one.metrics(tokens, completions) for one in self._clips]
        clipped = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        return clipped | means | self.mismatch.metrics() | {"loss": self._loss / len(each)}


class ClipMeter:
    """Counts of one pass over a step: tokens, or whole completions where the ratio is that of a completion.

    A token is held back from rising (A > 0, ρ > 1), from falling (A < 0, ρ < 1), or in another way of the surrogate's.
    """

    def __init__(self, of_completions: bool) -> None:
        self._of_completions = of_completions
        self._counts: dict[str, float] = defaultdict(float)
        self._least_low, self._most_high, self._rows = 1.0, 0.0, 0

    def add(self, is_clipped: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor) -> None:
        """Count one micro-batch, all (B, T); `advantages` may be (B, 1)."""
        low = is_clipped & (advantages < 0) & (ratio < 1)
        high = is_clipped & (advantages > 0) & (ratio > 1)
        shares = {
            name: _row_means(values, mask) for name, values in (("all", is_clipped), ("low", low), ("high", high))
        }
        weights = 1.0 if self._of_completions else mask.sum(dim=1)
        for name, share in shares.items():
            self._counts[name] += float((share * weights).sum())
        self._rows += len(mask)
        wrote = mask.any(dim=1)
        self._least_low = min([self._least_low, *shares["low"][wrote].tolist()])
        self._most_high = max(self._most_high, float(shares["high"].max()))

    def metrics(self, tokens: float, completions: int) -> dict[str, float]:
        """Return shares of all `tokens` or `completions` of the step; rows that were not forwarded are not clipped."""
        total = max(completions if self._of_completions else tokens, 1)
        return {
            "clip_fraction": self._counts["all"] / total,
            "clip_fraction/low": self._counts["low"] / total,
            "clip_fraction/high": self._counts["high"] / total,
            "clip_fraction/low_min": self._least_low if self._rows == completions else 0.0,
            "clip_fraction/high_max": self._most_high,
        }


def _row_means(marks: Tensor, mask: Tensor) -> Tensor:
    """The share of each row's tokens that is marked (B,); 0 for a row without any."""
    return (marks & mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
