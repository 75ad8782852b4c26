"""Every advantage × objective × aggregation with a KL in the reward trains three steps, or is refused by name."""

from __future__ import annotations

from combinations import IN_REWARD, check_combinations, every_pair


@every_pair
def test_a_kl_in_the_reward(advantage: str, objective: str) -> None:
    check_combinations(advantage, objective, IN_REWARD)
