"""FIELD_MAP: what each field of TRL's configs means here; torch-free.

One table for three readers: `GRPOConfig` and `RLOOConfig` take their fields from it, the TRL backend goes through it
the other way, and docs/library.md prints it. The rows stand in `fields_training.py` (what TRL takes over from
transformers) and `fields_rl.py` (what is TRL's own).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_toolbox.config.field import Field
from grpo_toolbox.config.fields_rl import RL_FIELDS
from grpo_toolbox.config.fields_training import TRAINING_FIELDS

TRL_VERSION = "1.16"

FIELD_MAP: Mapping[str, Field] = {one.name: one for one in (*TRAINING_FIELDS, *RL_FIELDS)}
"""Every field of TRL 1.16's GRPOConfig and RLOOConfig, and names of other versions that scripts still use."""

METRIC_MAP: Mapping[str, str] = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "completion_tokens": "completions/mean_length",
    "entropy": "entropy",
    "entropy_coef": "entropy_coef",
    "kl": "kl",
    "clip_fraction": "clip_ratio/region_mean",
    "clip_fraction/low": "clip_ratio/low_mean",
    "clip_fraction/high": "clip_ratio/high_mean",
    "clip_fraction/low_min": "clip_ratio/low_min",
    "clip_fraction/high_max": "clip_ratio/high_max",
    "vespo/phi_mean": "vespo/phi_seq_mean",
    "loss": "loss",
    "policy_loss": "policy_loss",
    "aux_loss": "aux_loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "sampler/logp_gap_mean": "sampling/sampling_logp_difference/mean",
    "sampler/logp_gap_max": "sampling/sampling_logp_difference/max",
    "sampler/ratio_min": "sampling/importance_sampling_ratio/min",
    "sampler/ratio_mean": "sampling/importance_sampling_ratio/mean",
    "sampler/ratio_max": "sampling/importance_sampling_ratio/max",
    "time/step": "step_time",
    "eval/reward": "eval_reward",
    "eval/completion_tokens": "eval_completions/mean_length",
    "eval/clipped_ratio": "eval_completions/clipped_ratio",
    "time/eval": "eval_runtime",
}
"""Our names of metrics -> TRL's; lengths, components of the reward and what rewards log are called alike."""

METRIC_NOTES: Mapping[str, str] = {
    "frac_reward_zero_std": "of groups; TRL's is of the whole batch, 0 or 1, with scale_rewards='batch' and GDPO, "
    "and RLOO's of rewards less the KL",
    "entropy": "over the tokens that are forwarded; TRL forwards rows without advantage, too",
    "entropy_coef": "the one that the step was trained with; TRL's, where it adapts, is that of the next step",
    "clip_fraction": "over the step; TRL's is a mean over micro-batches. With delta it counts what is above it, too",
    "clip_fraction/high": "cispo_clip_ratio with loss_type='cispo'; none of these with sapo and vespo",
    "clip_fraction/low_min": "over the step's completions; TRL's is a mean of the minima of micro-batches",
    "clip_fraction/high_max": "over the step's completions; TRL's is a mean of the maxima of micro-batches",
    "vespo/phi_mean": "over the completions that are forwarded",
    "sampler/logp_gap_mean": "with every engine; TRL's with vLLM and its correction alone, as all of sampling/",
    "sampler/ratio_min": "of tokens, before the correction bounds it",
    "sampler/ratio_mean": "of tokens, before the correction bounds it",
    "sampler/ratio_max": "of tokens, before the correction bounds it",
    "time/step": "with the optimizer's move; TRL's is without",
}
"""Where a number is not TRL's to the last digit, and why."""


def fields_of(algorithm: str) -> dict[str, Field]:
    """Return the fields of `grpo` or `rloo`, by name, in the order of TRL's signature; then those of other versions."""
    return {name: one for name, one in FIELD_MAP.items() if algorithm in one.algorithms}


def direct_fields(algorithm: str) -> dict[str, Field]:
    """Return the fields that stand for exactly one key of ours, by that key: `theirs(ours(value)) == value`."""
    return {one.keys[0]: one for one in fields_of(algorithm).values() if one.direct and not one.since}


def default_of(field: Field, algorithm: str) -> Any:
    """Return TRL's default of a field, which is another one for some of RLOO's."""
    return field.rloo_default if algorithm == "rloo" and field.has_rloo_default else field.default
