"""`rollout` refuses an engine that breaks its contract, before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.rollout import rollout
from grpo_toolbox.types import Prompt, Rollout, Sampling
from small_models import STOP, build, make_prompts, shared

PROMPTS = make_prompts(4, 2, 4)
SAMPLING = Sampling(5, temperature=1.5)


class Spoilt:
    """The local engine, with its rollouts changed on their way out."""

    def __init__(self, change: Callable[[list[Rollout]], list[Rollout]], model=None) -> None:
        model = shared("llama") if model is None else model
        self._engine = LocalEngine(model, decode=lambda ids, _: str(ids), stop_ids=(STOP,))
        self._change = change

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, on_finished=lambda row, one: None
    ) -> list[Rollout]:
        rollouts = self._change(self._engine.generate(prompts, group_size, sampling))
        for row, one in enumerate(rollouts):
            on_finished(row, one)
        return rollouts

    def sync(self, version: int | None = None) -> int:
        return self._engine.sync(version)

    def close(self) -> None:
        self._engine.close()


def spoil(row: int, **values: object) -> Callable[[list[Rollout]], list[Rollout]]:
    return lambda rollouts: [replace(one, **values) if place == row else one for place, one in enumerate(rollouts)]


def test_a_rollout_knows_which_weights_drew_each_of_its_tokens():
    plain = Rollout(PROMPTS[0], (5, 6, 7), (-1.0,) * 3, "length", "", weights_version=4)
    assert (plain.oldest_version, plain.token_versions) == (4, [4, 4, 4])
    mixed = replace(plain, versions=((2, 1), (4, 2)))
    assert (mixed.oldest_version, mixed.token_versions) == (2, [2, 4, 4])


def test_rollouts_come_prompt_major():
    rollouts = rollout(Spoilt(list), PROMPTS, 2, SAMPLING)
    assert [one.prompt.id for one in rollouts] == [0, 0, 1, 1, 2, 2]
    assert all(len(one.ids) == len(one.logps) > 0 for one in rollouts)


@pytest.mark.parametrize(
    "change", [lambda rollouts: rollouts[:-1], lambda rollouts: [*rollouts, rollouts[0]], lambda _: []]
)
def test_a_wrong_number_of_rollouts_is_refused(change):
    with pytest.raises(ToolboxError, match=r"returned \d rollouts for 3 prompts × 2 completions"):
        rollout(Spoilt(change), PROMPTS, 2, SAMPLING)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (lambda rollouts: rollouts[::-1], 0),
        (lambda rollouts: [rollouts[place] for place in (0, 2, 4, 1, 3, 5)], 1),  # completion-major
        (spoil(3, logps=(-1.0,)), 3),
        (spoil(5, prompt=replace(PROMPTS[2])), 5),  # an equal prompt that is not the one that was asked for
    ],
)
def test_rollouts_out_of_order_or_of_uneven_columns_are_refused(change, row):
    with pytest.raises(ToolboxError, match=f"rollout {row} is out of order"):
        rollout(Spoilt(change), PROMPTS, 2, SAMPLING)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_refused(value):
    change = spoil(3, ids=(4,), logps=(value,))
    with pytest.raises(ToolboxError, match="not finite for prompt 1"):
        rollout(Spoilt(change), PROMPTS, 2, SAMPLING)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_are_refused_and_not_sampled_from(temperature):
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(ToolboxError, match="weights or its logits are broken"):
        rollout(Spoilt(list, model), PROMPTS, 2, replace(SAMPLING, temperature=temperature))


def test_each_group_is_handed_out_once_when_its_last_member_has_ended():
    """Groups of 8 of unequal length, each in row order, all before the call returns."""
    engine = LocalEngine(shared("llama"), decode=lambda ids, _: str(ids), stop_ids=tuple(range(1, 20)))
    groups: dict[int, list[Rollout]] = {}
    rollouts = rollout(
        engine, PROMPTS, 8, Sampling(12, temperature=2.0), lambda group, rows: groups.update({group: [*rows]})
    )
    assert {group: rollouts[8 * group : 8 * group + 8] for group in range(3)} == groups
    longest = {group: max(len(one.ids) for one in rows) for group, rows in groups.items()}
    assert [longest[group] for group in groups] == sorted(longest.values())


def test_a_group_is_checked_before_it_is_handed_out():
    heard: list[int] = []
    with pytest.raises(ToolboxError, match="log-prob that is not finite for prompt 1"):
        rollout(Spoilt(spoil(3, logps=(math.nan,) * 5)), PROMPTS, 2, SAMPLING, lambda group, _: heard.append(group))
    assert heard == [0]


def test_a_group_whose_end_is_not_reported_is_an_error():
    class Silent(Spoilt):
        def generate(self, prompts, group_size, sampling, on_finished=None):
            return super().generate(prompts, group_size, sampling)

    with pytest.raises(ToolboxError, match="did not report the end of group 0"):
        rollout(Silent(list), PROMPTS, 2, SAMPLING, lambda group, _: None)
