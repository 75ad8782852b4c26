"""The real update takes the step that the gradient says, however the work is split."""

from __future__ import annotations

import copy
import math
from dataclasses import MISSING, fields, replace

import pytest
import torch
from torch import Tensor, nn

from exact_llama import (
    OBJECTIVES,
    PLAIN,
    TEMPERATURE,
    assert_same,
    full_batch,
    small_llama,
    some_silent,
    step_gradient,
)
from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import Reference
from grpo_toolbox.objectives import Objective
from grpo_toolbox.run import Run, UpdateSettings
from grpo_toolbox.types import Rollout, Sampling
from grpo_toolbox.update import policy_logps, update
from toolbox_runs import built_run

objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def _trained(settings_: UpdateSettings, objective: Objective, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Parameters after one `update` with plain gradient descent, whose step is the gradient itself, and its metrics."""
    policy = small_llama()
    used = {
        "policy": policy,
        "reference": Reference(_other(policy)) if objective.beta > 0 else None,
        "objective": objective,
        "optimizer": torch.optim.SGD(policy.parameters(), lr=0.0),
        "lr_at": lambda step: 0.1,
        "sampling": Sampling(max_new_tokens=7, temperature=TEMPERATURE),
        "settings": settings_,
    }
    defaults = {one.name for one in fields(Run) if one.default is not MISSING or one.default_factory is not MISSING}
    other_stages = dict.fromkeys({one.name for one in fields(Run)} - defaults - set(used))
    run = Run(**used, **other_stages)  # an update needs none of the stages around it
    metrics = update(run, batch, 1)
    return _flat(policy), metrics


def _other(policy: nn.Module) -> nn.Module:
    """A policy nearby."""
    other = copy.deepcopy(policy)
    nn.utils.vector_to_parameters(0.9 * _flat(policy), other.parameters())
    return other


def _flat(policy: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


@objectives
@pytest.mark.parametrize("epochs", [1, 3])
def test_update_does_not_depend_on_the_split(objective: Objective, epochs: int):
    batch = replace(some_silent(full_batch(PLAIN)), old_logps=None, ref_logps=None)
    plain = UpdateSettings(epochs, 10**6, math.inf, packed=False, skip_zero_advantage=False)
    expected, logged = _trained(plain, objective, batch)
    start = _flat(small_llama())
    for changed in (
        UpdateSettings(epochs, 10**6, math.inf),
        UpdateSettings(epochs, 1, math.inf),
        UpdateSettings(epochs, 20, math.inf, packed=False),
        UpdateSettings(epochs, 20, math.inf, skip_zero_advantage=False),
    ):
        parameters, metrics = _trained(changed, objective, batch)
        assert_same(parameters - start, expected - start)
        assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-9)
        assert metrics["loss"] == pytest.approx(logged["loss"], rel=1e-9, abs=1e-12)


@objectives
def test_two_epochs_are_two_gradient_steps_against_the_first_policy(objective: Objective):
    batch = replace(some_silent(full_batch(PLAIN)), old_logps=None, ref_logps=None)
    policy = small_llama()
    with torch.no_grad():
        first, _ = completion_logps(policy, batch, temperature=TEMPERATURE, packed=False)
        reference, _ = completion_logps(_other(policy), batch, temperature=TEMPERATURE, packed=False)
    for epoch in range(2):
        step = replace(batch, old_logps=None if epoch == 0 else first, ref_logps=reference)
        gradient = step_gradient(policy, step, objective, packed=False)
        moved = _flat(policy) - 0.1 * gradient
        nn.utils.vector_to_parameters(moved, policy.parameters())
    parameters, metrics = _trained(UpdateSettings(2, 20, math.inf), objective, batch)
    start = _flat(small_llama())
    assert_same(parameters - start, moved - start)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()))
    assert metrics["lr"] == 0.1


@pytest.mark.parametrize("packed", [True, False])
def test_equal_completions_are_forwarded_once_and_count_as_often_as_they_stand(packed, tmp_path):
    """Four rows of which three are equal, with advantages that do not cancel: the gradient of the padded forward."""
    run = built_run(f"run_dir={tmp_path / 'run'}", "experiment=grpo_tiny", "objective.beta=0.1")
    prompt = run.data.next(1)[0]
    rollouts = [Rollout(prompt, ids, (-1.0,) * 3, "length", "") for ids in ((5, 6, 7), (5, 6, 7), (6, 5, 7), (5, 6, 7))]
    batch = collate(rollouts, torch.tensor([[1.0, 0.5, -1.0, 2.0]]))

    def gradient(batch: Batch, settings: UpdateSettings) -> list[Tensor]:
        run.settings = settings
        logps, entropy = policy_logps(run, batch)
        run.policy.zero_grad()
        ((logps * batch.advantages) + 0.1 * entropy)[batch.mask].sum().backward()
        return [one.grad.clone() for one in run.policy.parameters()]

    ours = gradient(batch, replace(run.settings, packed=packed))
    plain = gradient(batch, replace(run.settings, packed=False))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    rows, place = batch.distinct
    assert (rows.completions, place.tolist()) == (((5, 6, 7), (6, 5, 7)), [0, 0, 1, 0])
    assert rows.forward_tokens == len(prompt.ids) + 6
    assert rows.distinct == (rows, None)
