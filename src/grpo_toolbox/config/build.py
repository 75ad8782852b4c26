"""From a `RunConfig` to a `Run`: everything that can be wrong is checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.advantages import ADVANTAGES, needs_values
from grpo_toolbox.checkpoint import latest_checkpoint, load_checkpoint, seed_rng
from grpo_toolbox.config.engine import autocast_dtype, build_engine, generation_settings, sampling
from grpo_toolbox.config.inputs import Inputs, fitting_reward, prompts_per_generation
from grpo_toolbox.config.options import bind, resolve
from grpo_toolbox.config.policy import described, learning_rate, load_policy, make_optimizer, pick_device
from grpo_toolbox.config.probe import check_credit, check_estimator, check_penalty, check_surrogate
from grpo_toolbox.config.schema import RunConfig, TrainerConfig
from grpo_toolbox.config.watch import correction_control, sync_watch
from grpo_toolbox.controllers import EntropyControl, KlControl
from grpo_toolbox.critic import Critic, CriticSettings
from grpo_toolbox.data import PromptStream, Row, encode_prompts
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.convention import check_sampling
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.experts import check_router, router_coefficient
from grpo_toolbox.models.load import (
    has_adapter,
    load_model,
    max_positions,
    save_pretrained,
)
from grpo_toolbox.models.packing import packing_refusal
from grpo_toolbox.models.reference import Reference, check_mix, make_reference
from grpo_toolbox.objectives import Objective, build_objective
from grpo_toolbox.rewards import Divergence, Reward
from grpo_toolbox.run import EvaluationSettings, Run, UpdateSettings
from grpo_toolbox.source import Background, Synchronous
from grpo_toolbox.surrogates import OBJECTIVES
from grpo_toolbox.trainer import restore
from grpo_toolbox.types import Prompt, RunInfo, Sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What can be built and checked without a model."""

    reward: Reward
    advantage: Callable[..., Tensor]
    objective: Objective
    tokenizer: Any
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    stream: PromptStream
    router_aux_coef: float
    """Weight of the load-balancing loss of a mixture of experts."""


def build_run(config: RunConfig, inputs: Inputs, info: RunInfo) -> Run:
    """Build a run from a checked config and its inputs; a resumed one is put back to its checkpoint."""
    parts = build_parts(config, inputs)
    trainer = config.trainer
    device = pick_device(trainer.device)
    seed_rng(trainer.seed)
    model = load_policy(config, inputs.given, device)
    check_router(model, parts.router_aux_coef)
    packs = _packs(config, model, parts, device)
    source = _source(config, model)
    sampled = source.model if isinstance(source, Background) else model
    prompts = [*parts.prompts, *parts.eval_prompts]
    engine = build_engine(config, sampled, parts.tokenizer, prompts, packs, device, info)
    _check_in_flight(config, engine)
    drawn = sampling(config)
    check_sampling(engine.traits, drawn, corrected=parts.objective.corrects)
    run = Run(
        info=info,
        policy=model,
        reference=_reference(model, trainer) if parts.objective.needs_reference else None,
        engine=engine,
        reward=parts.reward,
        advantage=parts.advantage,
        objective=parts.objective,
        optimizer=inputs.given.optimizer or make_optimizer(model, trainer, device),
        lr_at=inputs.given.lr_at or partial(learning_rate, trainer),
        data=parts.stream,
        source=source,
        eval_prompts=parts.eval_prompts,
        callbacks=inputs.callbacks,
        export=partial(_export, model, parts.tokenizer),
        sampling=drawn,
        group_size=config.rollout.group_size,
        prompts_per_step=config.rollout.prompts_per_step,
        generation=generation_settings(config, engine, drawn, model, device),
        settings=_update_settings(trainer, device, packs, parts.router_aux_coef),
        evaluation=_evaluation(trainer, drawn, parts),
        save_every=trainer.save_every,
        keep_checkpoints=trainer.keep_checkpoints,
        device=device,
        entropy_control=_entropy_control(parts.objective),
        kl_control=_kl_control(parts.objective),
        correction_control=correction_control(parts.objective, engine, drawn),
        watch=sync_watch(config, engine, sampled, [one.ids for one in parts.prompts], packs=packs, device=device),
        critic=_critic(config, parts, device, packs) if needs_values(parts.advantage) else None,
        reference_every=trainer.reference_every,
        reference_mix=trainer.reference_mix,
        reference_resets_optimizer=trainer.reference_resets_optimizer,
        divergence=Divergence(parts.reward.heldout) if parts.reward.heldout else None,
    )
    if info.first_step > 1:
        state = load_checkpoint(_newest(info.run_dir), map_location="cpu")
        restore(run, state, load_optimizer=trainer.load_optimizer)
    return run


def build_parts(config: RunConfig, inputs: Inputs) -> Parts:
    """Check settings against each other and the data; only a tokenizer and, last, a reward's model is loaded."""
    advantage = _named(
        "advantage",
        config.advantage,
        lambda name, options: bind("advantage", resolve("advantage", name, ADVANTAGES), options),
    )
    objective = _named("objective", config.objective, _objective)
    check_estimator(advantage, config.rollout.group_size)
    check_surrogate(objective)
    if objective.needs_reference and objective.kl_in == "reward":
        check_penalty(advantage, config.rollout.group_size)
    if objective.needs_reference and config.trainer.reference_every:
        check_mix(config.trainer.reference_mix, adapted=config.model.lora.r > 0 or inputs.given.adapter is not None)
    model_config, tokenizer = described(config.model, inputs.given)
    router_aux_coef = router_coefficient(model_config, config.model.router_aux_loss_coef)
    prompts, eval_prompts = (encoded(config, rows, tokenizer, model_config) for rows in (inputs.rows, inputs.eval_rows))
    stream = PromptStream(
        prompts,
        batch_size=prompts_per_generation(config.rollout),
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
    )
    reward = inputs.reward or fitting_reward(config, inputs.rows)
    check_credit(advantage, reward)
    return Parts(reward, advantage, objective, tokenizer, prompts, eval_prompts, stream, router_aux_coef)


def encoded(config: RunConfig, rows: Sequence[Row], tokenizer: Any, model_config: Any) -> list[Prompt]:
    """Tokenise checked rows into the prompts of this run; no rows are no prompts."""
    if not rows:
        return []
    return encode_prompts(
        rows,
        tokenizer,
        system_prompt=config.data.system_prompt,
        chat=config.data.chat,
        chat_template_kwargs=config.data.chat_template_kwargs,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_positions=max_positions(model_config),
        max_new_tokens=config.rollout.max_new_tokens,
        on_long=config.data.on_long,  # type: ignore[arg-type]  # checked against its choices
    )


def _named(group: str, values: Mapping[str, Any], build: Callable[[str, dict[str, Any]], Any]) -> Any:
    options = dict(values)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{group}.name={name!r}: set it to one of the group's options, or to my_module:my_fn.")
    return build(name, options)


def _objective(name: str, options: dict[str, Any]) -> Objective:
    own = {field.name for field in dataclasses.fields(Objective)} - {"surrogate"}
    surrogate = resolve("objective", name, OBJECTIVES)
    bind("objective", surrogate, {key: value for key, value in options.items() if key not in own})
    return build_objective(surrogate, **options)


def _source(config: RunConfig, model: nn.Module) -> Synchronous | Background:
    background = config.rollout.async_
    return Background(model, in_flight=background.in_flight) if background.enabled else Synchronous()


def _check_in_flight(config: RunConfig, engine: Engine) -> None:
    """Raise ConfigError where weights are to come in flight to an engine that cannot take them."""
    background = config.rollout.async_
    if background.enabled and background.in_flight != "none" and not hasattr(engine, "in_flight"):
        raise ConfigError(
            f"rollout.async.in_flight={background.in_flight} needs a model that takes the packed layout, and "
            f"{config.model.path} does not: set rollout.async.in_flight=none."
        )


def _packs(config: RunConfig, model: nn.Module, parts: Parts, device: torch.device) -> bool:
    """Tell whether the model takes the packed layout, and say so once where it does not."""
    if not config.trainer.packing and config.rollout.engine != "local":
        return False
    refusal = packing_refusal(model, len(parts.tokenizer), _longest(config, parts), device)
    if refusal is not None:
        log.warning(
            "%s does not take the packed layout (%s): it is trained with padding and sampled with plain generate, "
            "which is slower and gives the same numbers.",
            config.model.path,
            refusal,
        )
    return refusal is None


def _longest(config: RunConfig, parts: Parts) -> int:
    """Return the most tokens that a prompt and its completion may have."""
    return max(len(one.ids) for one in (*parts.prompts, *parts.eval_prompts)) + config.rollout.max_new_tokens


def _critic(config: RunConfig, parts: Parts, device: torch.device, packs: bool) -> Critic:
    """Load the critic: the policy's checkpoint once more, without an adapter, or one of its own."""
    path = config.critic.path or config.model.path
    model: Any = load_model(
        path,
        device=device,
        device_map=config.model.device_map,
        attn_implementation=config.model.attn_implementation,
        gradient_checkpointing=config.model.gradient_checkpointing,
        trust_remote_code=config.model.trust_remote_code,
    )
    room = model.get_input_embeddings().num_embeddings
    if room < len(parts.tokenizer):
        raise ConfigError(
            f"critic.path={path} knows {room} tokens, and the policy's tokenizer has {len(parts.tokenizer)}: set "
            "critic.path to a model with the policy's tokenizer, or to null for the policy's own weights."
        )
    packed = config.trainer.packing and packs
    if packed and config.critic.path:
        packed = packing_refusal(model, len(parts.tokenizer), _longest(config, parts), device) is None
    settings = CriticSettings(
        lr=config.critic.lr,
        clip=config.critic.clip,
        max_grad_norm=config.critic.max_grad_norm,
        pretrain_steps=config.critic.pretrain_steps,
        micro_batch_tokens=_micro_batch_tokens(config.trainer, device),
        packed=packed,
        autocast=autocast_dtype(config.trainer, device),
    )
    return Critic(model, settings, device)


def _reference(model: nn.Module, trainer: TrainerConfig) -> Reference:
    reference = make_reference(model)
    if trainer.reference_every:
        check_mix(trainer.reference_mix, adapted=has_adapter(model))  # a checkpoint may bring an adapter of its own
    return reference


def _entropy_control(objective: Objective) -> EntropyControl | None:
    if objective.entropy_target is None:
        return None
    return EntropyControl(target=objective.entropy_target, value=objective.entropy_coef)


def _kl_control(objective: Objective) -> KlControl | None:
    if objective.kl_target is None:
        return None
    return KlControl(target=objective.kl_target, horizon=objective.kl_horizon, beta=objective.beta)


def _update_settings(
    trainer: TrainerConfig, device: torch.device, packs: bool, router_aux_coef: float
) -> UpdateSettings:
    return UpdateSettings(
        ppo_epochs=trainer.ppo_epochs,
        micro_batch_tokens=_micro_batch_tokens(trainer, device),
        max_grad_norm=trainer.max_grad_norm,
        packed=trainer.packing and packs,
        recompute_mlp=trainer.recompute_mlp,
        skip_zero_advantage=trainer.skip_zero_advantage,
        recompute_old_logps=trainer.recompute_old_logps,
        router_aux_coef=router_aux_coef,
        autocast=autocast_dtype(trainer, device),
    )


def _evaluation(trainer: TrainerConfig, drawn: Sampling, parts: Parts) -> EvaluationSettings:
    asked = trainer.eval_temperature
    own = drawn if asked is None else dataclasses.replace(drawn, temperature=asked, min_new_tokens=0)
    return EvaluationSettings(
        sampling=own,
        completions=trainer.eval_completions,
        with_loss=trainer.eval_loss,
        every=trainer.eval_every if parts.eval_prompts else 0,
        at_start=trainer.eval_at_start,
        best_metric=trainer.best_metric,
        best_is_lowest=trainer.best_is == "lowest",
    )


def _micro_batch_tokens(trainer: TrainerConfig, device: torch.device) -> int:
    """On a processor few tokens are faster than many: what a layer wrote is still in the cache when the next reads."""
    return trainer.micro_batch_tokens or (1024 if device.type == "cpu" else 8192)


def _export(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    save_pretrained(model, tokenizer, folder)


def _newest(run_dir: Path) -> Path:
    newest = latest_checkpoint(run_dir / "checkpoints")
    if newest is None:
        raise ConfigError(f"{run_dir} holds no whole checkpoint to resume from: start a new run in another run_dir=.")
    return newest
