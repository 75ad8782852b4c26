"""New weights for a real vLLM in the middle of completions: which drew what, and what the cache holds afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine_contract import Subject, assert_trainers, changed, prompts, sums
from grpo_toolbox.engines.vllm import StampedVllmDialect
from grpo_toolbox.models.snapshot import own_copy
from grpo_toolbox.types import Rollout, Sampling
from small_models import forced_logps
from test_vllm import engine_over
from vllm_server import vllm  # noqa: F401

TOLERANCE = 1e-3
"""Nats between vLLM's log-prob and that of the weights that drew a token; those of others are off by a hundred times
as much."""


def arriving(made: Subject, models: list[Any], every: int, pushes: int) -> Callable[[], int | None]:
    """Move the policy at every so many looks; `models` gets a copy of each."""
    looked = [0]
    models.append(own_copy(made.policy))

    def newer() -> int | None:
        looked[0] += 1
        if looked[0] % every or len(models) > pushes:
            return None
        changed(made.policy, 0.3, seed=len(models))
        models.append(own_copy(made.policy))
        return len(models) - 1

    return newer


@torch.no_grad()
def with_kept_cache(models: Sequence[Any], one: Rollout) -> torch.Tensor:
    """Return the log-prob of each token by the weights that drew it, on keys and values of those before."""
    cache, whole, read, found = DynamicCache(), [*one.prompt.ids, *one.ids], 0, []
    end = len(one.prompt.ids)
    for version, count in one.versions or [(one.weights_version, len(one.ids))]:
        end += count
        logits = models[version](torch.tensor([whole[read : end - 1]]), past_key_values=cache).logits[0, -count:]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(whole[end - count : end])[:, None])[:, 0])
        read = end - 1
    return torch.cat(found)


@torch.no_grad()
def computed_anew(models: Sequence[Any], one: Rollout) -> torch.Tensor:
    """Return the log-prob of each token by the weights that drew it, on keys and values of their own."""
    forced = [forced_logps(model, one.prompt.ids, one.ids) for model in models]
    return torch.stack([forced[version][place] for place, version in enumerate(one.token_versions)])


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_each_token_bears_the_weights_that_drew_it(how: str, vllm: Any, tmp_path: Any) -> None:  # noqa: F811
    """To the token: at most changes, one place earlier or later, the other weights would have said something else."""
    models: list[Any] = []
    expected = with_kept_cache if how == "keep" else computed_anew
    with engine_over(vllm, tmp_path, StampedVllmDialect(), stop_ids=(), in_flight=how) as made:
        made.engine.in_flight(arriving(made, models, every=4, pushes=2), recompute=how == "recompute")
        rollouts = made.engine.generate(sums(5), 3, Sampling(300))
    assert {version for one in rollouts for version in one.token_versions} == {0, 1, 2}
    changes = 0
    for one in rollouts:
        told = torch.tensor(one.logps)
        torch.testing.assert_close(told, expected(models, one), atol=TOLERANCE, rtol=0)
        forced = [forced_logps(model, one.prompt.ids, one.ids) for model in models]
        at = 0
        for (version, count), (after, _) in zip(one.versions, one.versions[1:], strict=False):
            at += count
            earlier = abs(float(told[at - 1] - forced[after][at - 1]))
            later = abs(float(told[at] - forced[version][at]))
            changes += earlier > 10 * TOLERANCE and later > 10 * TOLERANCE
    assert changes > 0.5 * sum(len(one.versions) - 1 for one in rollouts) > 0


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
