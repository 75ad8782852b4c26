"""New weights in the middle of completions: which drew what, and what the cache holds afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from grpo_toolbox.models.snapshot import adopt, own_copy, snapshot
from grpo_toolbox.types import Rollout, Sampling
from small_models import build, forced_logps, make_prompts

SOME_STOPS = tuple(range(1, 6))
LENGTHS = (60, 1, 5, 17, 2, 9)


def changed(model: Any, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: value + 0.3 * torch.randn(value.shape, generator=noise) for name, value in snapshot(model).items()}


def arriving(model: Any, at: dict[int, dict[str, torch.Tensor]]) -> Callable[[], int | None]:
    """Weights that come at the n-th question, as the versions 1, 2, …"""
    asked, versions = [0], {question: version for version, question in enumerate(sorted(at), 1)}

    def newer() -> int | None:
        asked[0] += 1
        if asked[0] in at:
            adopt(model, at[asked[0]])
        return versions.get(asked[0])

    return newer


def sampled(model: Any, at: dict[int, Any], *, recompute: bool, tokens: int = 24, max_rows: int = 256) -> list[Rollout]:
    engine = LocalEngine(model, decode=lambda ids, _: " ".join(map(str, ids)), stop_ids=SOME_STOPS, max_rows=max_rows)
    engine.in_flight(arriving(model, at), recompute=recompute)
    return engine.generate(make_prompts(*LENGTHS), 3, Sampling(tokens, temperature=1.3))


def gaps(models: list[Any], one: Rollout) -> list[tuple[int, float]]:
    """Per token: which weights drew it, and how far its log-prob is from theirs on all that came before."""
    forced = [forced_logps(model, one.prompt.ids, one.ids, 1.3) for model in models]
    return [
        (version, abs(float(forced[version][place]) - one.logps[place]))
        for place, version in enumerate(one.token_versions)
    ]


@pytest.mark.parametrize("tokens", [12, 24], ids=["plain copies", "blocked copies"])
@pytest.mark.parametrize("max_rows", [256, 9], ids=["at once", "in turns"])
def test_with_a_cache_computed_anew_each_token_has_the_log_prob_of_the_weights_that_drew_it(tokens: int, max_rows: int):
    first = build("llama")
    weights = [changed(first, 1), changed(first, 2)]
    models = [own_copy(first) for _ in range(3)]
    for model, values in zip(models[1:], weights, strict=True):
        adopt(model, values)
    at = dict(zip((4, 9), weights, strict=True))
    rollouts = sampled(own_copy(first), at, recompute=True, tokens=tokens, max_rows=max_rows)
    seen = [pair for one in rollouts for pair in gaps(models, one)]
    assert {version for version, _ in seen} == {0, 1, 2}
    assert max(gap for _, gap in seen) < 1e-4
    if max_rows == 256:  # all rows begin together: four tokens by the first weights, five by the second
        longest = max(rollouts, key=lambda one: len(one.ids))
        assert longest.versions == ((0, 4), (1, 5), (2, len(longest.ids) - 9))
        assert (longest.weights_version, longest.oldest_version) == (2, 0)


def test_a_cache_that_is_kept_is_that_of_the_former_weights():
    """The token after the change is drawn by new weights that look at old keys and values."""
    first = build("llama")
    weights = changed(first, 1)
    models = [own_copy(first), own_copy(first)]
    adopt(models[1], weights)
    kept = sampled(own_copy(first), {4: weights}, recompute=False)
    old, new = ([gap for one in kept for version, gap in gaps(models, one) if version == v] for v in (0, 1))
    assert max(old) < 1e-4
    assert max(new) > 0.01
    again = sampled(own_copy(first), {4: weights}, recompute=True)
    assert [one.ids[:4] for one in kept] == [one.ids[:4] for one in again]
    assert [one.ids for one in kept] != [one.ids for one in again]


def test_rows_that_end_before_the_change_are_of_the_first_weights_alone():
    first = build("llama")
    rollouts = sampled(own_copy(first), {4: changed(first, 1)}, recompute=True)
    short = [one for one in rollouts if len(one.ids) <= 4]
    assert short
    assert {(one.weights_version, one.versions) for one in short} == {(0, ())}


def test_weights_that_come_when_all_have_ended_change_nothing():
    first = build("llama")
    plain = sampled(own_copy(first), {}, recompute=True, tokens=3)
    late = sampled(own_copy(first), {3: changed(first, 1)}, recompute=True, tokens=3)
    assert late == plain


def test_an_adapter_is_changed_within_the_blocked_copies_that_it_is_merged_into():
    first = add_adapter(build("llama"), LoraOptions(r=4))
    weights = changed(first, 1)
    models = [own_copy(first), own_copy(first)]
    adopt(models[1], weights)
    assert next(models[0].parameters()) is next(first.parameters())  # what never moves is not copied
    rollouts = sampled(own_copy(first), {4: weights}, recompute=True)
    seen = [pair for one in rollouts for pair in gaps(models, one)]
    assert {version for version, _ in seen} == {0, 1}
    assert max(gap for _, gap in seen) < 1e-4
