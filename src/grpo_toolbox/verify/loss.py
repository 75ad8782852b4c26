"""Checks of what the loss is made of: each term is felt, the ratio is to the right policy, masks do not leak."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from grpo_toolbox.advantages import estimate, needs_values
from grpo_toolbox.batch import Batch
from grpo_toolbox.experience import batch_of
from grpo_toolbox.measure import (
    Sample,
    difference,
    gradient,
    limits,
    moved,
    plain_logps,
    plain_objective,
    second_gradient,
    trained_logps,
)
from grpo_toolbox.objectives import Objective
from grpo_toolbox.ops import KL
from grpo_toolbox.ratios import RATIO_LEVELS
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.types import Rollout, Scores
from grpo_toolbox.update import reward_penalty, trainer_logps
from grpo_toolbox.verify.finding import Finding, compared, same_logps
from grpo_toolbox.verify.models import SHARE, reference_logps


def check_presence(run: Run, sample: Sample) -> Finding:
    """Each term of the objective changes the gradient, and every trainable parameter has one.

    KL, entropy bonus and experts' balance weigh at least 1 here, so that a small coefficient is not taken for none.
    """
    objective, batch = plain_objective(run), sample.batch
    off: dict[str, tuple[Objective, Batch]] = {}
    if objective.kl_in_loss:
        objective = replace(objective, beta=max(objective.beta, 1.0))
        off["KL"] = (replace(objective, beta=0.0), batch)
    if objective.entropy_coef or run.objective.entropy_target is not None:
        without, objective = objective, replace(objective, entropy_coef=max(objective.entropy_coef, 1.0))
        off = {name: (replace(one, entropy_coef=objective.entropy_coef), rows) for name, (one, rows) in off.items()}
        off["entropy"] = (replace(without, entropy_coef=0.0), batch)
    off["surrogate"] = (objective, replace(batch, advantages=torch.zeros_like(batch.advantages)))
    coef = run.settings.router_aux_coef and max(run.settings.router_aux_coef, 1.0)
    run = replace(run, settings=replace(run.settings, router_aux_coef=coef))
    with moved(run.policy, share=0.0):
        whole = gradient(run, batch, objective)
        changes = {name: difference(gradient(run, rows, one), whole) for name, (one, rows) in off.items()}
        if coef:
            changes["experts"] = difference(gradient(run, batch, objective, router_aux_coef=0.0), whole)
    silent = [name for name, part in whole.parts.items() if not bool(part.any())]
    limit = limits(run)[0] / 5  # what is absent changes nothing but the rounding
    shown = [f"{name} {change:.1e}" for name, change in changes.items()]
    shown += [f"{len(silent)} of {len(whole.parts)} parameters without: {', '.join(silent[:3])}"] if silent else []
    passed = not silent and all(change > limit for change in changes.values())
    meaning = "a term is only logged, or parameters count as trained and never move"
    return Finding("gradient", ", ".join(shown), f"> {limit:.0e}, every parameter", passed, meaning)


def check_penalty(run: Run, sample: Sample) -> Finding:
    """A KL in the reward is that of plain Hugging Face forwards, token by token, and reaches the advantages."""
    meaning = "the KL is of other tokens or another size, or is logged and never learnt from"
    objective = run.controlled_objective()
    if run.reference is None or objective.kl_in != "reward":
        return Finding("KL in the reward", "there is none: objective.kl_in is loss, or beta 0", "", None, meaning)
    with moved(run.policy, SHARE):  # where policy and reference are the same, every KL is 0
        policy = plain_logps(run, sample.batch)
        lengths = [len(one.ids) for one in sample.rollouts]
        said = [tuple(row[:length].tolist()) for row, length in zip(policy, lengths, strict=True)]
        rollouts = [replace(one, logps=logps) for one, logps in zip(sample.rollouts, said, strict=True)]
        penalty = reward_penalty(run, rollouts, sample.advantages.shape[1])
        by_hand = KL[objective.kl](policy, reference_logps(run, sample.batch, plain_logps))
    assert penalty is not None
    flat = penalty.flatten(0, 1)
    measured = same_logps(run, flat / objective.beta, by_hand, sample.real)
    astray = int((flat.isnan() == sample.real).sum())
    felt = _felt(run, sample, penalty)
    found = compared("KL in the reward", measured, meaning)
    shown = f"{found.measured}, {astray} tokens astray, advantages change by {felt:.1e}"
    passed = bool(found.passed) and not astray and felt > 0
    return replace(found, measured=shown, allowed=f"{found.allowed}, 0, > 0", passed=passed)


def _felt(run: Run, sample: Sample, penalty: Tensor) -> float:
    """Return how much the penalty (P, G, T) changes the estimator's advantages, at most."""
    scores = Scores(("made up",), (1.0,), sample.advantages.unsqueeze(-1), sample.advantages)
    values = torch.where(penalty.isnan(), torch.nan, 0.0) if needs_values(run.advantage) else None
    without, with_it = (estimate(run.advantage, scores, part, values) for part in (None, penalty))
    if with_it.ndim > without.ndim:
        without = without.unsqueeze(-1)
    return float((with_it - without).abs().nan_to_num(0.0).max())


def check_later(run: Run, sample: Sample) -> Finding:
    """Later steps on the same rollouts take the ratio to the policy before the first of them."""
    meaning = "the ratio is to another policy, or to that of other tokens: what is clipped is the wrong thing"
    portions, batch, objective = run.generation.steps_per_generation, sample.batch, plain_objective(run)
    if portions == 1 == run.settings.ppo_epochs:
        return Finding("later steps", "there are none: every rollout is trained once", "", None, meaning)
    start = replace(batch, old_logps=sample.logps)
    measured: dict[str, tuple[float, float]] = {}
    if portions > 1:
        portion = _later_portion(run, sample)
        assert portion.old_logps is not None
        measured |= same_logps(run, portion.old_logps, sample.logps, sample.real)
        start = replace(batch, old_logps=portion.old_logps)
    with moved(run.policy, SHARE):
        by_ratio = gradient(run, start)
        level = RATIO_LEVELS[objective.ratio_level](trained_logps(run, batch), sample.logps, batch.mask)
    by_hand = float(level.exp().expand_as(batch.mask)[batch.mask].mean())
    limit, _ = limits(run)
    if portions == 1:
        measured["second pass"] = (difference(second_gradient(run, batch, SHARE), by_ratio), limit)
    measured[f"ratio {by_hand:.3f} off by"] = (abs(by_ratio.ratio - by_hand), min(limit, abs(by_hand - 1) / 2))
    return compared("later steps", measured, meaning)


def _later_portion(run: Run, sample: Sample) -> Batch:
    """Return the batch of a step that is not the first of those that share a generation."""
    scores = Scores((), (), torch.zeros(*sample.advantages.shape, 0), sample.advantages)
    experience = Experience(sample.rollouts, scores, sample.advantages, range(len(sample.advantages)))
    if not run.generation.reuse_logps:
        experience = replace(experience, old_logps=trainer_logps(run, batch_of(run, experience)))
    return batch_of(run, replace(experience, off_policy=True))


def check_masks(run: Run, sample: Sample) -> Finding:
    """Every token of a completion is trained, the stop token too, and nothing else: NaN there changes no gradient."""
    meaning = "masks come from token ids, or are leaky: stopping is never learned, or what is padding or cut off is"
    batch, stopped = sample.batch, [row for row, one in enumerate(sample.rollouts) if one.finish_reason == "stop"]
    trained = sum(bool(batch.mask[row, len(batch.completions[row]) - 1]) for row in stopped)
    ends = {sample.rollouts[row].ids[-1] for row in stopped}
    behind = sum(_goes_on(one, ends) for one in sample.rollouts)
    wrong = int((batch.mask != sample.real).sum())
    limit, _ = limits(run)
    leak = _leak(run, sample)
    shown = f"{trained} of {len(stopped)} stop tokens trained, {wrong} tokens astray, {behind} rows go on behind a stop"
    passed = trained == len(stopped) and not wrong and not behind and leak <= limit
    return Finding("masks", f"{shown}, gradient {leak:.1e}", f"all, 0, 0, ≤ {limit:.0e}", passed, meaning)


def _goes_on(one: Rollout, ends: set[int]) -> bool:
    """Tell whether the model wrote a token right behind one that ends a turn."""
    marks = one.written or (True,) * len(one.ids)
    return any(token in ends and marks[place : place + 2] == (True, True) for place, token in enumerate(one.ids))


def _leak(run: Run, sample: Sample) -> float:
    """Return how much NaN where nothing is trained changes the gradient: behind a short row, and in one left out."""
    lengths = [len(one.ids) for one in sample.rollouts]
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    left_out = next((row for row in range(len(lengths)) if row not in (short, long)), short)
    batch = sample.batch.select([short, long, left_out])
    mask = batch.mask.clone()
    mask[2] = False
    clean = replace(batch, mask=mask)

    def dirty(column: Tensor) -> Tensor:
        return column.expand_as(mask).masked_fill(~mask, math.nan)

    assert batch.ref_logps is not None
    nans = replace(
        clean,
        sampler_logps=dirty(batch.sampler_logps),
        ref_logps=dirty(batch.ref_logps),
        advantages=dirty(batch.advantages),
    )
    # the row that is left out is forwarded, so that it could leak
    one, other = (gradient(run, rows, skip_zero_advantage=False) for rows in (nans, clean))
    return difference(one, other)
