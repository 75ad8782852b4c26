"""`toolbox verify`: is the gradient of this very run what its formulas say, however the work is laid out?

Every check looks at a few rollouts of the run's own engine, measures with `measure.py`, and returns a `Finding`.
Parameters are afterwards what they were, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_toolbox.batch import Batch
from grpo_toolbox.errors import RewardError, TrainingError
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
    trained_logps,
)
from grpo_toolbox.models.forward import eval_mode
from grpo_toolbox.objectives import Objective
from grpo_toolbox.rewards.selftest import Trial, graders, try_grader
from grpo_toolbox.run import Run
from grpo_toolbox.update import policy_logps

MOST_WRONG = 0.25
"""Share of wrong answers that a grader may accept: the last number of a prompt is sometimes the answer."""


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


def verify(run: Run) -> list[Finding]:
    """Run every check; modes, gradients, random states, parameters and the data's position are left as they were."""
    findings = []
    with eval_mode(run.policy), torch.random.fork_rng():
        sample = draw_sample(run)
        for name, check in CHECKS.items():
            try:
                findings.append(check(run, sample))
            except (TrainingError, RewardError) as error:  # what the update and the user's reward refuse
                reason = str(error).partition(". ")[0]
                findings.append(Finding(name, reason, "", False, "the check could not be finished"))
            run.policy.zero_grad(set_to_none=True)
    return findings


# ---- judging ---------------------------------------------------------------------------------------------------------


def _compared(name: str, measured: dict[str, tuple[float, float]], meaning: str) -> Finding:
    """Judge measured values against their limits; NaN is never within one."""
    shown = ", ".join(f"{what} {value:.1e}" for what, (value, _) in measured.items())
    limits = ", ".join(dict.fromkeys(f"{limit:.0e}" for _, limit in measured.values()))
    return Finding(name, shown, f"≤ {limits}", all(value <= limit for value, limit in measured.values()), meaning)


def _gap(one: Tensor, other: Tensor, where: Tensor) -> float:
    return float((one - other)[where].abs().max())


def _same_logps(run: Run, one: Tensor, other: Tensor, where: Tensor) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean |Δ log-prob|: in half precision single tokens are far off, but not all."""
    _, limit = limits(run)
    return {
        "log-probs": (_gap(one, other, where), limit),
        "mean": (float((one - other)[where].abs().mean()), limit / 10),
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
    """A row alone, among longer ones, and behind extra columns of NaN gives the same log-probs and gradient."""
    batch = sample.batch

    def wide(column: Tensor, fill: float) -> Tensor:
        return torch.cat([column, torch.full((len(batch), 5), fill).to(column.dtype)], dim=1)

    assert batch.ref_logps is not None
    wider = replace(
        batch,
        mask=wide(batch.mask, 0),
        sampler_logps=wide(batch.sampler_logps, math.nan),
        ref_logps=wide(batch.ref_logps, math.nan),
    )
    together = trained_logps(run, wider)[:, : batch.mask.shape[1]]
    alone = torch.zeros_like(together)
    for row, ids in enumerate(batch.completions):
        alone[row, : len(ids)] = trained_logps(run, batch.select([row]))[0, : len(ids)]
    rows = gradient(run, batch, micro_batch_tokens=1)
    measured = _same_gradient(run, rows, sample.whole)
    measured |= _same_logps(run, together, alone, sample.real)
    return _compared("padding", measured, "tokens that are padding, or another row's, are attended to or trained")


def check_packing(run: Run, sample: Sample) -> Finding:
    """Packed and padded forward give the same log-probs and gradient."""
    meaning = "the packed layout is not this model's attention: train with trainer.packing=false, and report it"
    if not run.settings.packed:
        return Finding("packing", "this run is padded", "", None, meaning)
    padded = replace(run, settings=replace(run.settings, packed=False))
    measured = _same_gradient(run, sample.whole, gradient(padded, sample.batch))
    logps = trained_logps(run, sample.batch), trained_logps(padded, sample.batch)
    return _compared("packing", measured | _same_logps(run, *logps, sample.real), meaning)


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
    measured = _same_logps(run, trained_logps(run, sample.batch), plain_logps(run, sample.batch), sample.real)
    meaning = "the trainer's forward is another function than the model: tokens, positions, prompt or temperature"
    return _compared("log-probs", measured, meaning)


def check_sampler(run: Run, sample: Sample) -> Finding:
    """The engine's log-probs are the trainer's."""
    measured = _same_logps(run, sample.batch.sampler_logps, trained_logps(run, sample.batch), sample.real)
    meaning = "engine and trainer disagree about the policy: the data is off-policy (try rollout.engine=hf)"
    return _compared("sampler", measured, meaning)


@torch.no_grad()
def check_reference(run: Run, sample: Sample) -> Finding:
    """At the start the reference is the policy; and it stays where it is when the policy moves."""
    meaning = "the KL does not start at 0, or is taken to a reference that moves along"
    if run.reference is None:
        return Finding("reference", "no reference: objective.beta is 0", "", None, meaning)

    def both() -> tuple[Tensor, Tensor]:
        policy = trained_logps(run, sample.batch)
        assert run.reference is not None
        with run.reference.model() as reference:
            return policy, policy_logps(replace(run, policy=reference), sample.batch.to(run.device))[0].cpu()

    policy, reference = both()
    with moved(run.policy, share=0.01):
        policy_later, reference_later = both()
    went = _gap(policy_later, policy, sample.real)
    came_along = _gap(reference_later, reference, sample.real) / max(went, 1e-12)
    start = _same_logps(run, policy, reference, sample.real)
    return _compared("reference", start | {"moves along": (came_along, 0.01)}, meaning)


def check_masks(run: Run, sample: Sample) -> Finding:
    """Every token of a completion is trained, the stop token too, and nothing else is: NaN there changes nothing."""
    meaning = "masks come from token ids: stopping is never learned, or padding is trained"
    batch, stopped = sample.batch, [row for row, one in enumerate(sample.rollouts) if one.finish_reason == "stop"]
    trained = sum(bool(batch.mask[row, len(batch.completions[row]) - 1]) for row in stopped)
    ends = {sample.rollouts[row].ids[-1] for row in stopped}
    behind = sum(bool(ends & {*one.ids[:-1]}) for one in sample.rollouts)
    wrong = int((batch.mask != sample.real).sum())
    off = ~batch.mask
    off[0] = True  # as if the first completion had been cut off, so that there is something off the mask
    clean = replace(batch, mask=~off)
    assert batch.ref_logps is not None
    dirty = replace(
        clean,
        sampler_logps=batch.sampler_logps.masked_fill(off, math.nan),
        ref_logps=batch.ref_logps.masked_fill(off, math.nan),
        advantages=batch.advantages.expand_as(off).masked_fill(off, math.nan),
    )
    limit, _ = limits(run)
    gap = difference(gradient(run, dirty), gradient(run, clean))
    shown = f"{trained} of {len(stopped)} stop tokens trained, {wrong} tokens astray, {behind} behind a stop"
    passed = trained == len(stopped) and not wrong and not behind and gap <= limit
    return Finding("masks", f"{shown}, gradient {gap:.1e}", f"all, 0, 0, ≤ {limit:.0e}", passed, meaning)


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
    "masks": check_masks,
    "grader": check_grader,
}
