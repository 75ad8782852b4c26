"""Every advantage × objective × aggregation with a KL in the loss trains three steps, or is refused by name."""

from __future__ import annotations

from combinations import IN_LOSS, check_combinations, every_pair


@every_pair
def test_a_kl_in_the_loss(advantage: str, objective: str) -> None:
    check_combinations(advantage, objective, IN_LOSS)
