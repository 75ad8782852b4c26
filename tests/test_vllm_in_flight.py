"""New weights for a real vLLM in the middle of completions: which drew what, and what the cache holds afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from engine_contract import assert_trainers, prompts, sums
from grpo_toolbox.engines.vllm import StampedVllmDialect
from grpo_toolbox.types import Sampling
from stamped import arriving, assert_stamped
from test_vllm import engine_over
from vllm_server import vllm  # noqa: F401


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_each_token_bears_the_weights_that_drew_it(how: str, vllm: Any, tmp_path: Any) -> None:  # noqa: F811
    models: list[Any] = []
    with engine_over(vllm, tmp_path, StampedVllmDialect(), stop_ids=(), in_flight=how) as made:
        made.engine.in_flight(arriving(made, models, every=4, pushes=2), recompute=how == "recompute")
        rollouts = made.engine.generate(sums(5), 3, Sampling(300))
    assert_stamped(models, rollouts, kept=how == "keep")


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_weights_that_come_in_flight_leave_no_stale_prefix(how: str, vllm: Any, tmp_path: Any) -> None:  # noqa: F811
    """Newer weights come while long prompts are gone on from; afterwards nothing of the former ones is used."""
    long, models = prompts("the same long prompt, asked again and again " * 5), list[Any]()
    with engine_over(vllm, tmp_path, StampedVllmDialect(), in_flight=how) as made:
        made.engine.in_flight(arriving(made, models, every=4, pushes=1), recompute=how == "recompute")
        under_way = made.engine.generate(long, 4, Sampling(200, temperature=1.5))
        assert len(models) == 2, "all completions had ended before the weights came"
        assert {one.oldest_version for one in under_way} == {0}
        after = made.engine.generate(long, 2, Sampling(12, temperature=0))
        assert {one.weights_version for one in after} == {1}
        assert_trainers(made, after)
