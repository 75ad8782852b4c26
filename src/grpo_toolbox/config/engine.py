"""The engine that a config asks for, and what its rollouts are good for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from grpo_toolbox.config.schema import RolloutConfig, RunConfig, TrainerConfig
from grpo_toolbox.data import decode_completion
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.convention import asked_convention
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.recorded import RecordedPass
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.float8 import refusal
from grpo_toolbox.models.forward import in_half_precision
from grpo_toolbox.models.load import stop_token_ids
from grpo_toolbox.run import GenerationSettings
from grpo_toolbox.types import Prompt, RunInfo, Sampling

_SHORT, _REMEMBERED = 16, 65_536
"""Tokens of a completion whose text is remembered, and how many texts: some ten megabytes."""


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
    config: RunConfig,
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    packs: bool,
    device: torch.device,
    info: RunInfo,
) -> Engine:
    """Build the engine that samples for `model`; before its first step a run has seen one sync less than its number.

    Servers are waited for, and must have the trainer's model and tokenizer. Raises EngineError where they do not.
    """

    @lru_cache(maxsize=_REMEMBERED)
    def decode_again(ids: tuple[int, ...], finish_reason: str) -> str:
        return decode_completion(ids, tokenizer, finish_reason)

    def decode(ids: Sequence[int], finish_reason: str) -> str:
        short = len(ids) <= _SHORT  # short answers come again, step after step
        return decode_again(tuple(ids), finish_reason) if short else decode_completion(ids, tokenizer, finish_reason)

    if config.rollout.engine not in ("local", "hf"):  # nothing about servers is loaded unless there are some
        from grpo_toolbox.config.servers import colocated_engine, server_engine
        from grpo_toolbox.engines.teacher import Teacher

        if config.rollout.engine == "vllm" and config.rollout.vllm.mode == "colocate":
            return colocated_engine(config, model, tokenizer, decode=decode, weights_version=info.first_step - 1)
        return server_engine(
            config.rollout,
            model,
            tokenizer,
            prompts,
            Teacher(model, packed=packs, autocast_dtype=autocast_dtype(config.trainer, device)),
            decode=decode,
            weights_version=info.first_step - 1,
            run_dir=info.run_dir,
        )
    _check_quantize(config.rollout, packs, device)
    _check_cuda_graphs(config.rollout, packs, device)
    make: Callable[..., Engine] = HfEngine
    if config.rollout.engine == "local" and packs:
        make = partial(
            LocalEngine,
            max_rows=config.rollout.max_rows,
            float8=config.rollout.quantize == "float8",
            recorded=RecordedPass() if config.rollout.cuda_graphs else None,
        )
    return make(
        model,
        decode=decode,
        stop_ids=stop_token_ids(model, tokenizer),
        autocast_dtype=autocast_dtype(config.trainer, device),
        weights_version=info.first_step - 1,
    )


def _check_quantize(rollout: RolloutConfig, packs: bool, device: torch.device) -> None:
    if rollout.quantize == "none":
        return
    reason = refusal(device) if rollout.engine == "local" and packs else "only rollout.engine=local has it"
    if reason is not None:
        raise ConfigError(f"rollout.quantize={rollout.quantize}: {reason}. Leave it out.")


def _check_cuda_graphs(rollout: RolloutConfig, packs: bool, device: torch.device) -> None:
    if rollout.cuda_graphs and not (device.type == "cuda" and rollout.engine == "local" and packs):
        raise ConfigError("rollout.cuda_graphs=true needs rollout.engine=local on a CUDA device. Leave it out.")


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
        max_staleness=rollout.async_.max_staleness,
        old_is_sampler=means_the_same and rollout.reuse_logps is not False,
        on_stale=rollout.async_.on_stale,
    )


def autocast_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype | None:
    """Return the precision of the forward pass; None is that of the weights."""
    auto = torch.bfloat16 if device.type == "cuda" else None
    return {"auto": auto, "float32": None, "bfloat16": torch.bfloat16}[trainer.precision]
