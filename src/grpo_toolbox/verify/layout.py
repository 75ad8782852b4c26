"""Checks of how the work is laid out: none of it may change the gradient."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_toolbox.measure import Sample, collated, gradient, plain_objective, trained_logps
from grpo_toolbox.run import Run
from grpo_toolbox.verify.finding import Finding, compared, same_gradient, same_logps


def check_repeat(run: Run, sample: Sample) -> Finding:
    """The same step twice has the same gradient."""
    meaning = (
        "dropout is on: set it to 0 (model.lora.dropout, or in the model's config.json); what stands below is noise"
    )
    return compared("repeat", same_gradient(run, gradient(run, sample.batch), sample.whole), meaning)


def check_split(run: Run, sample: Sample) -> Finding:
    """One micro-batch and several give the same loss and gradient."""
    several = gradient(run, sample.batch, micro_batch_tokens=max(sample.batch.forward_tokens // 3, 1))
    meaning = "a denominator is of the micro-batch, not of the step: memory settings change what is learned"
    return compared("micro-batches", same_gradient(run, several, sample.whole), meaning)


def check_padding(run: Run, sample: Sample) -> Finding:
    """A row alone or among longer ones has the same log-probs."""
    alone = torch.zeros_like(sample.logps)
    for row, ids in enumerate(sample.batch.completions):
        alone[row, : len(ids)] = trained_logps(run, sample.batch.select([row]))[0, : len(ids)]
    measured = same_logps(run, sample.logps, alone, sample.real)
    return compared("padding", measured, "what is padding, or another row's, is attended to")


def check_packing(run: Run, sample: Sample) -> Finding:
    """Packed and padded forward give the same log-probs and gradient."""
    meaning = "the packed layout is not this model's attention: train with trainer.packing=false, and report it"
    if not run.settings.packed:
        return Finding("packing", "this run is padded", "", None, meaning)
    padded = replace(run, settings=replace(run.settings, packed=False))
    measured = same_gradient(run, sample.whole, gradient(padded, sample.batch))
    measured |= same_logps(run, sample.logps, trained_logps(padded, sample.batch), sample.real)
    return compared("packing", measured, meaning)


def check_order(run: Run, sample: Sample) -> Finding:
    """Groups and rows in the reverse order give the same gradient."""
    turned = collated(run, sample.rollouts[::-1], sample.advantages.flip(0, 1))
    assert sample.batch.ref_logps is not None
    turned = replace(turned, ref_logps=sample.batch.ref_logps.flip(0))
    measured = same_gradient(run, gradient(run, turned), sample.whole)
    return compared("order", measured, "a row is given another row's advantage, prompt or reference")


def check_skipping(run: Run, sample: Sample) -> Finding:
    """Rows of zero advantage, forwarded or not, give the same gradient."""
    meaning = "rows that are left out carry a gradient: set trainer.skip_zero_advantage=false, and report it"
    if not plain_objective(run).zero_advantage_is_zero_gradient:
        return Finding("zero advantage", "no row is skipped: each has a KL or a bonus", "", None, meaning)
    silent = (torch.arange(len(sample.batch)) % 2 == 0).unsqueeze(1)
    batch = replace(sample.batch, advantages=sample.batch.advantages.masked_fill(silent, 0.0))
    skipped, forwarded = (gradient(run, batch, skip_zero_advantage=skip) for skip in (True, False))
    return compared("zero advantage", same_gradient(run, skipped, forwarded), meaning)
