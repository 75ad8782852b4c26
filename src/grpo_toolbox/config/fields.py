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
    "completions/clipped_ratio": "completions/clipped_ratio",
    "entropy": "entropy",
    "entropy_coef": "entropy_coef",
    "kl": "kl",
    "clip_fraction": "clip_ratio/region_mean",
    "loss": "loss",
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
}
"""Our names of metrics -> TRL's; `rewards/<name>/mean` and what rewards log is called alike."""


def fields_of(algorithm: str) -> dict[str, Field]:
    """Return the fields of `grpo` or `rloo`, by name, in the order of TRL's signature; then those of other versions."""
    return {name: one for name, one in FIELD_MAP.items() if algorithm in one.algorithms}


def direct_fields(algorithm: str) -> dict[str, Field]:
    """Return the fields that stand for exactly one key of ours, by that key: `theirs(ours(value)) == value`."""
    return {one.keys[0]: one for one in fields_of(algorithm).values() if one.direct and not one.since}


def default_of(field: Field, algorithm: str) -> Any:
    """Return TRL's default of a field, which is another one for some of RLOO's."""
    return field.rloo_default if algorithm == "rloo" and field.has_rloo_default else field.default
