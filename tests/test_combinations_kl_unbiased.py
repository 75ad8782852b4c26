"""Every advantage × objective × aggregation with a KL times the ratio trains three steps, or is refused by name."""

from __future__ import annotations

from combinations import UNBIASED, check_combinations, every_pair


@every_pair
def test_an_unbiased_kl(advantage: str, objective: str) -> None:
    check_combinations(advantage, objective, UNBIASED)
