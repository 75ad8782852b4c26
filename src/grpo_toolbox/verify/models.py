"""Checks of whose log-probs are whose: the trainer's, plain Hugging Face's, the engine's, the reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_toolbox.batch import Batch
from grpo_toolbox.measure import Sample, moved, plain_logps, trained_logps
from grpo_toolbox.run import Run
from grpo_toolbox.verify.finding import Finding, compared, gap, same_logps

SHARE = 0.01
"""How far parameters are moved, in shares of their size, to see what happens when they have moved."""


def check_logps(run: Run, sample: Sample) -> Finding:
    """The update's log-probs are those of a plain Hugging Face forward at the sampling temperature."""
    measured = same_logps(run, sample.logps, plain_logps(run, sample.batch), sample.real)
    meaning = "the trainer's forward is another function than the model: tokens, positions, prompt or temperature"
    return compared("log-probs", measured, meaning)


def check_sampler(run: Run, sample: Sample) -> Finding:
    """The engine's log-probs are the trainer's."""
    measured = same_logps(run, sample.batch.sampler_logps, sample.logps, sample.real)
    meaning = "engine and trainer disagree about the policy: the data is off-policy (try rollout.engine=hf)"
    return compared("sampler", measured, meaning)


@torch.no_grad()
def check_reference(run: Run, sample: Sample) -> Finding:
    """At the start the reference is the policy; and it stays where it is when the policy moves."""
    meaning = "the KL does not start at 0, or is taken to a reference that moves along"
    if run.reference is None:
        return Finding("reference", "no reference: objective.beta is 0", "", None, meaning)
    reference = reference_logps(run, sample.batch, trained_logps)
    with moved(run.policy, SHARE):
        went = gap(trained_logps(run, sample.batch), sample.logps, sample.real)
        came = gap(reference_logps(run, sample.batch, trained_logps), reference, sample.real)
    start = same_logps(run, sample.logps, reference, sample.real)
    return compared("reference", start | {"moves along": (came / max(went, 1e-12), 0.01)}, meaning)


def reference_logps(run: Run, batch: Batch, measure: Callable[[Run, Batch], Tensor]) -> Tensor:
    """Return what `measure` says (B, T) of the reference in the policy's place."""
    assert run.reference is not None
    with run.reference.model() as reference:
        return measure(replace(run, policy=reference), batch)
