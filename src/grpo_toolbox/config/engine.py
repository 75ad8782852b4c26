"""The engine that a config asks for, and what its rollouts are good for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from grpo_toolbox.config.schema import RunConfig, TrainerConfig
from grpo_toolbox.data import decode_completion
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.convention import asked_convention
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.forward import in_half_precision
from grpo_toolbox.models.load import stop_token_ids
from grpo_toolbox.run import GenerationSettings
from grpo_toolbox.types import Sampling


def sampling(config: RunConfig) -> Sampling:
    """Return how rollouts are drawn; a correction needs log-probs of what is left where something is cut."""
    rollout = config.rollout
    plain = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        seed=config.trainer.seed,
    )
    corrected = config.objective.get("correction") not in (None, "none")
    return dataclasses.replace(plain, drawn_logps=corrected and bool(plain.cuts))


def build_engine(
    config: RunConfig, model: nn.Module, tokenizer: Any, packs: bool, device: torch.device, *, weights_version: int
) -> Engine:
    """Build the engine that samples for `model`; `weights_version` is how many syncs the run has seen before."""

    def decode(ids: Sequence[int], finish_reason: str) -> str:
        return decode_completion(ids, tokenizer, finish_reason)

    make: Callable[..., Engine] = HfEngine
    if config.rollout.engine == "local" and packs:
        make = partial(LocalEngine, max_rows=config.rollout.max_rows)
    return make(
        model,
        decode=decode,
        stop_ids=stop_token_ids(model, tokenizer),
        autocast_dtype=autocast_dtype(config.trainer, device),
        weights_version=weights_version,
    )


def generation_settings(
    config: RunConfig, engine: Engine, drawn: Sampling, model: nn.Module, device: torch.device
) -> GenerationSettings:
    """Return how rollouts are made and used: an engine on the trainer's weights in float32 rounds as little as it."""
    rollout = config.rollout
    means_the_same = asked_convention(engine.traits, drawn).is_trainers
    if rollout.reuse_logps and not means_the_same:
        raise ConfigError(
            "rollout.reuse_logps=true takes the engine's log-probs for the trainer's, and they are those of what "
            f"{', '.join(f'rollout.{cut}' for cut in drawn.cuts)} left to draw from: leave one of the two out."
        )
    rounds = in_half_precision(model, autocast_dtype(config.trainer, device))
    reuse = engine.traits.exact and means_the_same and not rounds
    return GenerationSettings(
        steps_per_generation=rollout.steps_per_generation,
        reuse_logps=reuse if rollout.reuse_logps is None else rollout.reuse_logps,
        dynamic_sampling=rollout.dynamic_sampling,
        max_oversampling=rollout.max_oversampling,
        max_empty_steps=rollout.max_empty_steps,
    )


def autocast_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype | None:
    """Return the precision of the forward pass; None is that of the weights."""
    auto = torch.bfloat16 if device.type == "cuda" else None
    return {"auto": auto, "float32": None, "bfloat16": torch.bfloat16}[trainer.precision]
