"""`toolbox verify`: is the gradient of this very run what its formulas say, however the work is laid out?

Every check looks at a few rollouts of the run's own engine, measures with `measure.py`, and returns a `Finding`.
Parameters are afterwards what they were, bit for bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_toolbox.advantages import estimate, needs_values
from grpo_toolbox.batch import Batch
from grpo_toolbox.errors import RewardError, TrainingError
from grpo_toolbox.experience import batch_of
from grpo_toolbox.measure import (
    Gradient,
    Sample,
    collated,
    difference,
    draw_sample,
    gradient,
    limits,
    moved,
    plain_logps,
    plain_objective,
    second_gradient,
    trained_logps,
)
from grpo_toolbox.models.forward import eval_mode
from grpo_toolbox.objectives import Objective
from grpo_toolbox.ops import KL
from grpo_toolbox.ratios import RATIO_LEVELS
from grpo_toolbox.rewards.selftest import Trial, graders, try_grader
from grpo_toolbox.run import Experience, Run
from grpo_toolbox.types import Rollout, Scores
from grpo_toolbox.update import reward_penalty, trainer_logps

MOST_WRONG = 0.25
"""Share of wrong answers that a grader may accept: the last number of a prompt is sometimes the answer."""
_SHARE = 0.01
"""How far parameters are moved, in shares of their size, to see what happens when they have moved."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    measured: str
    allowed: str
    passed: bool | None
    """None where the check does not apply to this run; `measured` says why."""
    meaning: str
    """What a failure means, and where to look."""


def verify(run: Run, watch: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Run every check; modes, gradients, random states, parameters and the data's position are left as they were.

    `watch` hears the name of each check before it starts.
    """
    findings = []
    with eval_mode(run.policy), torch.random.fork_rng():
        watch("a few rollouts")
        sample = draw_sample(run)
        for name in CHECKS:
            watch(name)
            findings.append(look(name, run, sample))
    return findings


def look(name: str, run: Run, sample: Sample) -> Finding:
    """Run the check of this name; one that the update or the user's reward breaks off has failed."""
    try:
        return CHECKS[name](run, sample)
    except (TrainingError, RewardError) as error:
        return Finding(name, str(error).partition(". ")[0], "", False, "the check could not be finished")
    finally:
        run.policy.zero_grad(set_to_none=True)


def claim(name: str) -> str:
    """Return in one sentence what the check of this name has seen where it passes."""
    return (inspect.getdoc(CHECKS[name]) or "").partition("\n")[0]


# ---- judging ---------------------------------------------------------------------------------------------------------


def _compared(name: str, measured: dict[str, tuple[float, float]], meaning: str) -> Finding:
    """Judge measured values against their limits; NaN is never within one."""
    shown = ", ".join(f"{what} {value:.1e}" for what, (value, _) in measured.items())
    first = next(iter(measured.values()))[1]
    others = [f"{what} ≤ {limit:.0e}" for what, (_, limit) in measured.items() if limit != first]
    allowed = ", ".join([f"≤ {first:.0e}", *others])
    return Finding(name, shown, allowed, all(value <= limit for value, limit in measured.values()), meaning)


def _gap(one: Tensor, other: Tensor, where: Tensor) -> float:
    return float((one - other)[where].abs().max())


def _same_logps(run: Run, one: Tensor, other: Tensor, where: Tensor) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean |Δ log-prob|: in half precision single tokens are far off, but not all."""
    _, limit = limits(run)
    return {
        "log-probs": (_gap(one, other, where), limit),
        "their mean": (float((one - other)[where].abs().mean()), limit / 10),
    }


def _same_gradient(run: Run, one: Gradient, other: Gradient) -> dict[str, tuple[float, float]]:
    limit, _ = limits(run)
    loss = abs(one.loss - other.loss) / max(abs(other.loss), 1.0)
    return {"gradient": (difference(one, other), limit), "loss": (loss, limit)}


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_repeat(run: Run, sample: Sample) -> Finding:
    """The same step twice has the same gradient."""
    meaning = (
        "dropout is on: set it to 0 (model.lora.dropout, or in the model's config.json); what stands below is noise"
    )
    return _compared("repeat", _same_gradient(run, gradient(run, sample.batch), sample.whole), meaning)


def check_split(run: Run, sample: Sample) -> Finding:
    """One micro-batch and several give the same loss and gradient."""
    several = gradient(run, sample.batch, micro_batch_tokens=max(sample.batch.forward_tokens // 3, 1))
    meaning = "a denominator is of the micro-batch, not of the step: memory settings change what is learned"
    return _compared("micro-batches", _same_gradient(run, several, sample.whole), meaning)


def check_padding(run: Run, sample: Sample) -> Finding:
    """A row alone or among longer ones has the same log-probs."""
    alone = torch.zeros_like(sample.logps)
    for row, ids in enumerate(sample.batch.completions):
        alone[row, : len(ids)] = trained_logps(run, sample.batch.select([row]))[0, : len(ids)]
    measured = _same_logps(run, sample.logps, alone, sample.real)
    return _compared("padding", measured, "what is padding, or another row's, is attended to")


def check_packing(run: Run, sample: Sample) -> Finding:
    """Packed and padded forward give the same log-probs and gradient."""
    meaning = "the packed layout is not this model's attention: train with trainer.packing=false, and report it"
    if not run.settings.packed:
        return Finding("packing", "this run is padded", "", None, meaning)
    padded = replace(run, settings=replace(run.settings, packed=False))
    measured = _same_gradient(run, sample.whole, gradient(padded, sample.batch))
    measured |= _same_logps(run, sample.logps, trained_logps(padded, sample.batch), sample.real)
    return _compared("packing", measured, meaning)


def check_order(run: Run, sample: Sample) -> Finding:
    """Groups and rows in the reverse order give the same gradient."""
    turned = collated(run, sample.rollouts[::-1], sample.advantages.flip(0, 1))
    assert sample.batch.ref_logps is not None
    turned = replace(turned, ref_logps=sample.batch.ref_logps.flip(0))
    measured = _same_gradient(run, gradient(run, turned), sample.whole)
    return _compared("order", measured, "a row is given another row's advantage, prompt or reference")


def check_skipping(run: Run, sample: Sample) -> Finding:
    """Rows of zero advantage, forwarded or not, give the same gradient."""
    meaning = "rows that are left out carry a gradient: set trainer.skip_zero_advantage=false, and report it"
    if not plain_objective(run).zero_advantage_is_zero_gradient:
        return Finding("zero advantage", "no row is skipped: each has a KL or a bonus", "", None, meaning)
    silent = (torch.arange(len(sample.batch)) % 2 == 0).unsqueeze(1)
    batch = replace(sample.batch, advantages=sample.batch.advantages.masked_fill(silent, 0.0))
    skipped, forwarded = (gradient(run, batch, skip_zero_advantage=skip) for skip in (True, False))
    return _compared("zero advantage", _same_gradient(run, skipped, forwarded), meaning)


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


def check_logps(run: Run, sample: Sample) -> Finding:
    """The update's log-probs are those of a plain Hugging Face forward at the sampling temperature."""
    measured = _same_logps(run, sample.logps, plain_logps(run, sample.batch), sample.real)
    meaning = "the trainer's forward is another function than the model: tokens, positions, prompt or temperature"
    return _compared("log-probs", measured, meaning)


def check_sampler(run: Run, sample: Sample) -> Finding:
    """The engine's log-probs are the trainer's."""
    measured = _same_logps(run, sample.batch.sampler_logps, sample.logps, sample.real)
    meaning = "engine and trainer disagree about the policy: the data is off-policy (try rollout.engine=hf)"
    return _compared("sampler", measured, meaning)


@torch.no_grad()
def check_reference(run: Run, sample: Sample) -> Finding:
    """At the start the reference is the policy; and it stays where it is when the policy moves."""
    meaning = "the KL does not start at 0, or is taken to a reference that moves along"
    if run.reference is None:
        return Finding("reference", "no reference: objective.beta is 0", "", None, meaning)
    reference = _reference_logps(run, sample.batch, trained_logps)
    with moved(run.policy, _SHARE):
        went = _gap(trained_logps(run, sample.batch), sample.logps, sample.real)
        came = _gap(_reference_logps(run, sample.batch, trained_logps), reference, sample.real)
    start = _same_logps(run, sample.logps, reference, sample.real)
    return _compared("reference", start | {"moves along": (came / max(went, 1e-12), 0.01)}, meaning)


def _reference_logps(run: Run, batch: Batch, measure: Callable[[Run, Batch], Tensor]) -> Tensor:
    assert run.reference is not None
    with run.reference.model() as reference:
        return measure(replace(run, policy=reference), batch)


def check_penalty(run: Run, sample: Sample) -> Finding:
    """A KL in the reward is that of plain Hugging Face forwards, token by token, and reaches the advantages."""
    meaning = "the KL is of other tokens or another size, or is logged and never learnt from"
    objective = run.controlled_objective()
    if run.reference is None or objective.kl_in != "reward":
        return Finding("KL in the reward", "there is none: objective.kl_in is loss, or beta 0", "", None, meaning)
    with moved(run.policy, _SHARE):  # where policy and reference are the same, every KL is 0
        policy = plain_logps(run, sample.batch)
        lengths = [len(one.ids) for one in sample.rollouts]
        said = [tuple(row[:length].tolist()) for row, length in zip(policy, lengths, strict=True)]
        rollouts = [replace(one, logps=logps) for one, logps in zip(sample.rollouts, said, strict=True)]
        group_size = sample.advantages.shape[1]
        penalty = reward_penalty(replace(run, group_size=group_size), rollouts)
        by_hand = KL[objective.kl](policy, _reference_logps(run, sample.batch, plain_logps))
    assert penalty is not None
    flat = penalty.flatten(0, 1)
    measured = _same_logps(run, flat / objective.beta, by_hand, sample.real)
    astray = int((flat.isnan() == sample.real).sum())
    felt = _felt(run, sample, penalty)
    found = _compared("KL in the reward", measured, meaning)
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
        measured |= _same_logps(run, portion.old_logps, sample.logps, sample.real)
        start = replace(batch, old_logps=portion.old_logps)
    with moved(run.policy, _SHARE):
        by_ratio = gradient(run, start)
        level = RATIO_LEVELS[objective.ratio_level](trained_logps(run, batch), sample.logps, batch.mask)
    by_hand = float(level.exp().expand_as(batch.mask)[batch.mask].mean())
    limit, _ = limits(run)
    if portions == 1:
        measured["second pass"] = (difference(second_gradient(run, batch, _SHARE), by_ratio), limit)
    measured[f"ratio {by_hand:.3f} off by"] = (abs(by_ratio.ratio - by_hand), min(limit, abs(by_hand - 1) / 2))
    return _compared("later steps", measured, meaning)


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


def check_grader(run: Run, sample: Sample) -> Finding:
    """The data's own answers score at least 1 in some form, and what is no answer does not."""
    meaning = "the reward does not tell right answers from wrong ones: nothing, or something else, is learned"
    tried = {grader.name: try_grader(grader, sample.prompts) for grader in graders(run.reward)}
    trials = [one for one in tried.values() if isinstance(one, Trial)]
    if not trials:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in tried.items())
        return Finding("grader", reasons or "no part of the reward compares with the data", "", None, meaning)
    shown = "; ".join(_shares(one) for one in trials)
    passed = all(max(one.right.values()) > 0.5 and max(one.wrong.values()) <= MOST_WRONG for one in trials)
    allowed = f"a form > 50%; {', '.join(trials[0].wrong)} ≤ {MOST_WRONG:.0%}"
    return Finding("grader", shown, allowed, passed, meaning)


def _shares(trial: Trial) -> str:
    read = [f"{form} {share:.0%}" for form, share in trial.right.items() if share] or ["no form of the answer"]
    return ", ".join([*read, *(f"{text} {share:.0%}" for text, share in trial.wrong.items())])


CHECKS: dict[str, Callable[[Run, Sample], Finding]] = {
    "repeat": check_repeat,
    "micro-batches": check_split,
    "padding": check_padding,
    "packing": check_packing,
    "order": check_order,
    "zero advantage": check_skipping,
    "gradient": check_presence,
    "log-probs": check_logps,
    "sampler": check_sampler,
    "reference": check_reference,
    "KL in the reward": check_penalty,
    "later steps": check_later,
    "masks": check_masks,
    "grader": check_grader,
}
