"""Evaluations that a program asks for, beside those of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_toolbox.config.build import build_engine
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.evaluation import evaluate, measure, sample
from grpo_toolbox.models.packing import plain_attention_limit
from grpo_toolbox.run import Run
from grpo_toolbox.source import Synchronous
from grpo_toolbox.types import Prompt


def evaluate_policy(
    config: RunConfig, run: Run, tokenizer: Any, prompts: Sequence[Prompt], *, training: bool
) -> dict[str, float]:
    """Evaluate a run's policy as it is: while it trains by its engine, otherwise in this process.

    Outside of training servers are let go and may have other weights, and so may the copy that samples in advance.
    """
    run = _fitting(config, run, tokenizer, prompts)
    if training:
        return measure(run, run.source.evaluate(run, partial(sample, run, prompts)))
    if isinstance(run.source, Synchronous) and run.engine.traits.shares_weights:
        return evaluate(run, prompts)
    inside = replace(config, rollout=replace(config.rollout, engine="local"))
    engine = build_engine(inside, run.policy, tokenizer, prompts, run.settings.packed, run.device, run.info)
    return evaluate(replace(run, engine=engine), prompts)


def _fitting(config: RunConfig, run: Run, tokenizer: Any, prompts: Sequence[Prompt]) -> Run:
    """Return the run with padding and plain `generate` where its model packs rows, but none as long as these."""
    limit = plain_attention_limit(run.policy)
    if limit is None or max(len(one.ids) for one in prompts) + run.evaluation.sampling.max_new_tokens <= limit:
        return run
    engine = run.engine
    if engine.traits.shares_weights:
        inside = replace(config, rollout=replace(config.rollout, engine="local"))
        engine = build_engine(inside, run.policy, tokenizer, prompts, False, run.device, run.info)
    return replace(run, engine=engine, settings=replace(run.settings, packed=False))
