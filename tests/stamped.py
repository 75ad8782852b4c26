"""Weights that come to a server in the middle of completions, and what its log-probs then have to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache

from engine_contract import changed
from grpo_toolbox.models.snapshot import own_copy
from grpo_toolbox.types import Rollout
from small_models import forced_logps

TOLERANCE = 1e-3
"""Nats between a server's log-prob and that of the weights that drew a token; those of others are off by far more."""


def arriving(made: Any, models: list[Any], every: int, pushes: int) -> Callable[[], int | None]:
    """Move the policy at every so many looks while a server is up; `models` gets a copy of each."""
    looked = [0]
    models.append(own_copy(made.policy))

    def newer() -> int | None:
        looked[0] += made.engine.servers[0].up
        if looked[0] < every or len(models) > pushes:
            return None
        looked[0] = 0
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


def assert_stamped(models: Sequence[Any], rollouts: Sequence[Rollout], *, kept: bool) -> None:
    """To the token: at most changes, one place earlier or later, the other weights would have said something else."""
    assert {version for one in rollouts for version in one.token_versions} == set(range(len(models)))
    seen = 0
    for one in rollouts:
        told, forced = torch.tensor(one.logps), [forced_logps(model, one.prompt.ids, one.ids) for model in models]
        expected = with_kept_cache(models, one) if kept else computed_anew(models, one)
        torch.testing.assert_close(told, expected, atol=TOLERANCE, rtol=0)
        at = 0
        for (version, count), (after, _) in pairwise(one.versions):
            at += count
            earlier = abs(float(told[at - 1] - forced[after][at - 1]))
            later = abs(float(told[at] - forced[version][at]))
            seen += min(earlier, later) > 10 * TOLERANCE
    assert seen > 0.5 * sum(len(one.versions) - 1 for one in rollouts) > 0
