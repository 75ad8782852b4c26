"""The probe of what a sync brought, as a config asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from grpo_toolbox.config.engine import autocast_dtype
from grpo_toolbox.config.schema import ProbeConfig, RunConfig
from grpo_toolbox.controllers import CorrectionControl
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.probe import DRAWN, Probe, Row, Target, canary_rows
from grpo_toolbox.engines.targets import EngineTarget, SglangTarget, VllmTarget
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.engines.watch import SyncWatch
from grpo_toolbox.models.forward import plain_model
from grpo_toolbox.models.load import max_positions
from grpo_toolbox.objectives import Objective
from grpo_toolbox.types import Sampling

log = logging.getLogger(__name__)


def sync_watch(
    config: RunConfig, engine: Engine, sampled: nn.Module, prompts: Sequence[Row], *, packs: bool, device: torch.device
) -> SyncWatch | None:
    """Return the probe of a run, against the model that is `sampled`; None where it is switched off.

    It is so by itself for engines on the policy's own weights: those cannot miss a sync, and each step compares all
    their log-probs with the trainer's anyway (`sampler/*`).
    """
    given = config.rollout.probe
    never = engine.traits.shares_weights or config.rollout.sync.mode == "none"
    every = (0 if never else 1) if given.every is None else given.every
    if every == 0:
        return None
    dtype = autocast_dtype(config.trainer, device)
    teacher = Teacher(sampled, packed=config.trainer.packing and packs, autocast_dtype=dtype)
    rows = canaries(given, prompts, max_positions(plain_model(sampled).config))
    targets = probe_targets(engine, config.rollout.server.request_timeout_s)
    return SyncWatch(Probe(rows, teacher, given.limit), targets, every, stops=given.on_mismatch == "stop")


def canaries(given: ProbeConfig, prompts: Sequence[Row], positions: int | None) -> list[Row]:
    """Return rows of prompt text that leave room for what is drawn behind them."""
    length = given.tokens if positions is None else min(given.tokens, positions - DRAWN - 1)
    return canary_rows(prompts, given.canaries, length)


def probe_targets(engine: Engine, timeout_s: float) -> Callable[[], Sequence[Target]]:
    """Return what is asked of an engine: every server that is up, or the engine as a whole where no server scores."""
    if engine.traits.shares_weights:
        return lambda: [EngineTarget("the engine", engine)]
    from grpo_toolbox.engines.pool import ServerEngine

    if not isinstance(engine, ServerEngine) or engine.dialect.name == "http":
        return lambda: [EngineTarget("the engine", engine)]
    if engine.dialect.name == "vllm":
        return lambda: [VllmTarget(server, timeout_s) for server in engine.servers if server.up]
    return lambda: [SglangTarget(server, timeout_s) for server in engine.servers if server.up]


def correction_control(objective: Objective, engine: Engine, drawn: Sampling) -> CorrectionControl | None:
    """Return the control of objective.correction=auto; None for a correction that is named.

    Where the draw is cut, what is measured is the cut: tokens are weighted one by one, and that stays.
    """
    if objective.correction != "auto":
        return None
    if drawn.cuts:
        log.warning("objective.correction=auto: token_truncate, for %s restricts the draw", ", ".join(drawn.cuts))
    return CorrectionControl("token_truncate" if drawn.cuts or not engine.traits.exact else "none", bool(drawn.cuts))
