"""`toolbox verify`: is the gradient of this very run what its formulas say, however the work is laid out?

Every check looks at a few rollouts of the run's own engine, measures with `measure.py`, and returns a `Finding`.
Parameters are afterwards what they were, bit for bit.

    layout.py   split, padding, packing, order and skipped rows change nothing
    models.py   log-probs are those of a plain forward, of the engine, of the reference
    loss.py     each term is felt, later steps know their old policy, masks do not leak
    critic.py   the value model reads the right state, and all of it learns
    grader.py   the reward tells right from wrong
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from grpo_toolbox.errors import RewardError, TrainingError
from grpo_toolbox.measure import Sample, draw_sample, modes_kept
from grpo_toolbox.models.forward import eval_mode
from grpo_toolbox.run import Run
from grpo_toolbox.verify.critic import check_critic
from grpo_toolbox.verify.finding import Finding
from grpo_toolbox.verify.grader import check_grader
from grpo_toolbox.verify.layout import (
    check_order,
    check_packing,
    check_padding,
    check_repeat,
    check_skipping,
    check_split,
)
from grpo_toolbox.verify.loss import check_later, check_masks, check_penalty, check_presence
from grpo_toolbox.verify.models import check_logps, check_reference, check_sampler


def verify(run: Run, watch: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Run every check; modes, gradients, random states, parameters and the data's position are left as they were.

    `watch` hears the name of each check before it starts.
    """
    findings = []
    with modes_kept(run.policy), eval_mode(run.policy), torch.random.fork_rng():
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
    "critic": check_critic,
    "grader": check_grader,
}
