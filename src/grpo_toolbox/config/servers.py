"""The engine over rollout servers that a config asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_toolbox.config.schema import RolloutConfig, RunConfig, ServerConfig
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.dialect import Dialect
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.identity import TEXTS, Identity
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.reading import Decode
from grpo_toolbox.engines.server import Limits, Server, addresses
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync.choose import ChosenSync, Kind, SyncSettings
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.engines.vllm import StampedVllmDialect, VllmDialect
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.load import resolve_model_path, stop_token_ids
from grpo_toolbox.types import Prompt

log = logging.getLogger(__name__)

_CANARIES = 3


def server_engine(
    rollout: RolloutConfig,
    policy: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    teacher: Teacher,
    *,
    decode: Decode,
    weights_version: int,
    run_dir: Path,
) -> ServerEngine:
    """Wait for the servers and return the engine over them. Raises EngineError for servers that do not fit the run."""
    given = rollout.server
    limits = Limits(
        start_timeout_s=given.start_timeout_s,
        outage_timeout_s=given.outage_timeout_s,
        request_timeout_s=given.request_timeout_s,
        retries=given.retries,
        max_in_flight=rollout.max_rows,
    )
    stop_ids = stop_token_ids(policy, tokenizer)
    identity = Identity(
        tokenized={text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS},
        positions=max(len(one.ids) for one in prompts) + rollout.max_new_tokens,
        rows=[one.ids for one in prompts[:_CANARIES]],
        stop_ids=stop_ids,
        forced=lambda rows, first, temperature: [
            one.tolist() for one in teacher.logps(rows, first, temperature=temperature)
        ],
    )
    sync = None
    if rollout.sync.mode == "none":
        log.warning("rollout.sync.mode=none: completions come from weights that stay as they are")
    elif rollout.engine == "http":
        raise ConfigError(
            "rollout.engine=http has no way of sending weights: its completions would be those of a policy that never "
            "moves. Set rollout.engine=vllm or sglang, or rollout.sync.mode=none to train on them all the same."
        )
    else:
        sync = _weight_sync("vllm" if rollout.engine == "vllm" else "sglang", rollout, policy, run_dir)
    engine = ServerEngine(
        _dialect(rollout),
        [Server(url, limits, _key(given)) for url in addresses(given.urls)],
        policy,
        decode=decode,
        stop_ids=stop_ids,
        identity=identity,
        sync=sync,
        model=given.model,
        weights_version=weights_version,
    )
    return engine.start()


def colocated_engine(
    config: RunConfig, policy: nn.Module, tokenizer: Any, *, decode: Decode, weights_version: int
) -> Engine:
    """Load vLLM beside the policy. Raises ConfigError where this environment has none."""
    from grpo_toolbox.engines.colocate import ColocateEngine, Colocation

    given, on_gpu = config.rollout.vllm, next(policy.parameters()).is_cuda
    options = Colocation(
        model=resolve_model_path(config.model.path),
        dtype="auto" if on_gpu and config.trainer.precision != "float32" else "float32",
        tensor_parallel_size=given.tensor_parallel_size,
        gpu_memory_utilization=given.gpu_memory_utilization or 0.3,
        max_model_len=given.max_model_len,
        max_rows=config.rollout.max_rows,
        sleep=given.sleep,
    )
    return ColocateEngine(
        policy,
        options,
        decode=decode,
        stop_ids=stop_token_ids(policy, tokenizer),
        weights_version=weights_version,
    )


def _dialect(rollout: RolloutConfig) -> Dialect:
    if rollout.engine == "http":
        return HttpDialect()
    pushed = rollout.async_.in_flight if rollout.async_.enabled else "none"
    if rollout.engine == "sglang":
        return SglangDialect(in_place=pushed == "keep")
    return VllmDialect() if pushed == "none" else StampedVllmDialect()


def _weight_sync(kind: Kind, rollout: RolloutConfig, policy: nn.Module, run_dir: Path) -> ChosenSync:
    given, background = rollout.sync, rollout.async_
    in_flight = background.in_flight if background.enabled and background.in_flight != "none" else given.in_flight
    settings = SyncSettings(
        mode=given.mode,  # type: ignore[arg-type]  # checked against its choices
        folder=given.folder,
        address=given.address,
        dtype=None if given.dtype == "auto" else getattr(torch, given.dtype),
        in_flight=in_flight,  # type: ignore[arg-type]
        timeout_s=given.timeout_s,
    )
    return ChosenSync(kind, settings, policy, run_dir)


def _key(server: ServerConfig) -> str | None:
    if server.api_key_env is None:
        return None
    key = os.environ.get(server.api_key_env)
    if not key:
        raise ConfigError(f"rollout.server.api_key_env={server.api_key_env}: that variable is not set.")
    return key
