"""Checks that need neither torch nor a model: choices, ranges, and settings that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.config.source import registry
from grpo_toolbox.engines.server import addresses
from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.schedule import SCHEDULES

CHOICES: dict[str, Sequence[str]] = {
    "rollout.engine": ("local", "hf", "vllm", "sglang", "http"),
    "rollout.quantize": ("none", "float8"),
    "rollout.async.in_flight": ("none", "keep", "recompute"),
    "rollout.async.on_stale": ("drop", "mask"),
    "trainer.name": ("toolbox", "trl"),
    "rollout.sync.mode": ("auto", "adapter", "folder", "gloo", "nccl", "none"),
    "rollout.sync.dtype": ("auto", "float32", "bfloat16", "float16"),
    "rollout.sync.in_flight": ("drain", "recompute", "keep"),
    "rollout.probe.on_mismatch": ("stop", "warn"),
    "rollout.vllm.mode": ("server", "colocate"),
    "trainer.schedule": tuple(SCHEDULES),
    "trainer.optimizer": ("adamw", "adamw_8bit"),
    "trainer.precision": ("auto", "float32", "bfloat16"),
    "trainer.best_is": ("highest", "lowest"),
    "model.loader": ("transformers", "unsloth"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "data.on_long": ("error", "drop"),
}
OBJECTIVE_CHOICES = {
    "loss_agg": ("ops.py", "AGGREGATIONS"),
    "kl": ("ops.py", "KL"),
    "ratio_level": ("ratios.py", "RATIO_LEVELS"),
    "correction": ("ratios.py", "CORRECTIONS"),
}
"""Where the names that an objective may choose from are listed."""
AT_LEAST_ONE = (
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.max_rows",
    "rollout.probe.canaries",
    "rollout.probe.tokens",
    "rollout.vllm.tensor_parallel_size",
    "rollout.vllm.max_model_len",
    "rollout.steps_per_generation",
    "rollout.max_oversampling",
    "rollout.max_empty_steps",
    "trainer.max_steps",
    "trainer.ppo_epochs",
    "trainer.micro_batch_tokens",
    "trainer.keep_checkpoints",
    "trainer.eval_completions",
)
NOT_NEGATIVE = (
    "rollout.min_new_tokens",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.min_p",
    "rollout.server.start_timeout_s",
    "rollout.server.outage_timeout_s",
    "rollout.server.retries",
    "rollout.async.max_staleness",
    "critic.lr",
    "critic.pretrain_steps",
    "trainer.lr",
    "trainer.warmup_steps",
    "trainer.weight_decay",
    "trainer.adam_eps",
    "trainer.min_lr_ratio",
    "trainer.eval_every",
    "trainer.eval_temperature",
    "trainer.save_every",
    "trainer.reference_every",
    "model.lora.r",
    "data.eval_size",
)
ABOVE_ZERO = ("rollout.server.request_timeout_s",)
BELOW_ONE = ("trainer.adam_beta1", "trainer.adam_beta2", "model.lora.dropout")


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    for key, options in CHOICES.items():
        value = _get(config, key)
        if value not in options:
            raise unknown_option(key, value, options)
    for key, (file, listed) in OBJECTIVE_CHOICES.items():
        value = config.objective.get(key)
        named = (*registry(file, listed), *(("none", "auto") if key == "correction" else ()))
        if value is not None and value not in named:
            raise unknown_option(f"objective.{key}", value, named)
    for key in AT_LEAST_ONE:
        if _get(config, key) is not None and _get(config, key) < 1:
            raise ConfigError(f"{key}={_get(config, key)} must be at least 1.")
    for key in NOT_NEGATIVE:
        value = _get(config, key)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{key}={value} must be a finite number of at least 0.")
    for key in ABOVE_ZERO:
        if not 0 < _get(config, key) < math.inf:
            raise ConfigError(f"{key}={_get(config, key)} must be a finite number above 0.")
    for key in BELOW_ONE:
        if not 0 <= _get(config, key) < 1:
            raise ConfigError(f"{key}={_get(config, key)} must be at least 0 and below 1.")
    if not config.rollout.sync.timeout_s > 0:
        raise ConfigError(f"rollout.sync.timeout_s={config.rollout.sync.timeout_s} must be above 0.")
    for key in ("rollout.probe.every", "rollout.probe.limit"):
        value = _get(config, key)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{key}={value} must be a finite number of at least 0.")
    if not -(2**63) <= config.trainer.seed < 2**63:  # what torch takes
        raise ConfigError(f"trainer.seed={config.trainer.seed} must be a whole number of 64 bits.")
    _check_sampling(config)
    addresses(config.rollout.server.urls)
    if config.trainer.algorithm is not None and config.trainer.name != "trl":
        raise ConfigError(
            f"trainer.algorithm={config.trainer.algorithm} is for trainer.name=trl; else algorithms are composed of "
            "advantage= and objective=, or by method=, see `toolbox train --help`."
        )
    for key in ("name", "run_dir", "resume"):
        value = getattr(config, key)
        if value is not None and not value.strip():
            raise ConfigError(f"{key}= is blank: give it a value, or leave it out.")
    for key in ("trainer.max_grad_norm", "critic.max_grad_norm"):
        if not _get(config, key) > 0:
            raise ConfigError(f"{key}={_get(config, key)} must be above 0; inf never clips.")
    coef = config.model.router_aux_loss_coef
    if coef is not None and not 0 <= coef < math.inf:
        raise ConfigError(f"model.router_aux_loss_coef={coef} must be a finite number >= 0; null is the model's own.")
    if not 0 < config.trainer.reference_mix <= 1:
        raise ConfigError(f"trainer.reference_mix={config.trainer.reference_mix} must be in (0, 1]; 1 is a reset.")
    if config.critic.clip is not None and not config.critic.clip > 0:
        raise ConfigError(f"critic.clip={config.critic.clip} must be above 0; null never clips.")
    _check_evaluation(config)


def _check_evaluation(config: RunConfig) -> None:
    trainer, drawn = config.trainer, config.rollout.temperature
    if trainer.eval_loss and trainer.eval_temperature not in (None, drawn):
        raise ConfigError(
            f"trainer.eval_loss=true is the loss of training, on completions drawn at rollout.temperature={drawn}, and "
            f"trainer.eval_temperature={trainer.eval_temperature}: set it to null."
        )
    if trainer.eval_every and not _has_eval_data(config):
        raise ConfigError(
            f"trainer.eval_every={trainer.eval_every} has nothing to evaluate on: set data.eval_size, "
            "data.eval_path or data.eval_split, or trainer.eval_every=0."
        )


def _check_sampling(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens={rollout.min_new_tokens} is above rollout.max_new_tokens={rollout.max_new_tokens}."
        )
    if not 0 < rollout.top_p <= 1 or rollout.min_p > 1:
        raise ConfigError(f"rollout.top_p={rollout.top_p} must be in (0, 1], rollout.min_p={rollout.min_p} in [0, 1].")
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0 is greedy: all completions of a group would be equal and carry no gradient. "
            "Set rollout.temperature above 0 (1.0 samples from the policy itself)."
        )
    background = rollout.async_
    if background.enabled and background.in_flight != "none" and rollout.engine in ("hf", "http"):
        raise ConfigError(
            f"rollout.async.in_flight={background.in_flight} needs rollout.engine=local, vllm or sglang: with "
            f"{rollout.engine} completions end with the weights that they began with. Set rollout.async.in_flight=none."
        )


def _has_eval_data(config: RunConfig) -> bool:
    return bool(config.data.eval_size or config.data.eval_path or config.data.eval_split)


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, "async_" if part == "async" else part)
    return value
