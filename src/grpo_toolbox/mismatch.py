"""How far the sampler's log-probs are from the trainer's over a step, in all and by the age of its weights."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from grpo_toolbox.objectives import mismatch

OLDEST = 8
"""Tokens this many updates old and older are counted together, so that the log does not grow new columns for ever."""


class MismatchMeter:
    """Sums over the tokens of a step, whatever the split into micro-batches."""

    def __init__(self) -> None:
        self._by_age: dict[int, _Sums] = defaultdict(_Sums)

    def add(self, trainer_logps: Tensor, sampler_logps: Tensor, mask: Tensor, ages: Tensor) -> None:
        """Count one micro-batch, all (B, T); `ages` tells how many updates old the weights were that drew a token."""
        ages = ages.clamp(0, OLDEST)
        for age in ages[mask].unique().tolist():
            self._by_age[int(age)].add(trainer_logps, sampler_logps, mask & (ages == age))

    def metrics(self) -> dict[str, float]:
        """Return means and extremes; by age, too, where a token is not of the newest weights."""
        if not self._by_age:
            return {}
        found = _total(list(self._by_age.values())).metrics("sampler")
        if set(self._by_age) != {0}:
            for age, sums in sorted(self._by_age.items()):
                one = sums.metrics(f"sampler/age_{age}")
                names = ("logp_gap_mean", "logp_gap_max", "kl", "ess", "tokens")
                found |= {f"sampler/age_{age}/{name}": one[f"sampler/age_{age}/{name}"] for name in names}
        return {name: value for name, value in found.items() if name != "sampler/tokens"}


class _Sums:
    def __init__(self) -> None:
        self.added: dict[str, float] = defaultdict(float)
        self.extremes = {"gap_max": 0.0, "ratio_max": 0.0, "ratio_min": float("inf")}

    def add(self, trainer_logps: Tensor, sampler_logps: Tensor, mask: Tensor) -> None:
        sums = {name: float(value) for name, value in mismatch(trainer_logps, sampler_logps, mask).items()}
        self.include({**sums, "tokens": float(torch.count_nonzero(mask))})

    def include(self, sums: dict[str, float]) -> None:
        for name in ("gap", "kl", "ratio", "ratio_squared", "tokens"):
            self.added[name] += sums[name]
        for name, value in self.extremes.items():
            self.extremes[name] = (min if name == "ratio_min" else max)(value, sums[name])

    def metrics(self, prefix: str) -> dict[str, float]:
        sums, tokens = self.added, self.added["tokens"]
        return {
            f"{prefix}/logp_gap_mean": sums["gap"] / tokens,
            f"{prefix}/logp_gap_max": self.extremes["gap_max"],
            f"{prefix}/kl": sums["kl"] / tokens,
            f"{prefix}/ratio_mean": sums["ratio"] / tokens,
            f"{prefix}/ratio_min": self.extremes["ratio_min"],
            f"{prefix}/ratio_max": self.extremes["ratio_max"],
            f"{prefix}/ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
            f"{prefix}/tokens": tokens,
        }


def _total(parts: list[_Sums]) -> _Sums:
    total = _Sums()
    for part in parts:
        total.include({**part.added, **part.extremes})
    return total
