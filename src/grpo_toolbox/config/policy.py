"""The policy, its tokenizer and its optimizer: loaded by the names in the config, or taken as a program gives them."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from grpo_toolbox.config.inputs import Given
from grpo_toolbox.config.schema import ModelConfig, RunConfig, TrainerConfig
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.load import (
    LoraOptions,
    adopt_model,
    load_config,
    load_model,
    load_tokenizer,
    padding_tokenizer,
)
from grpo_toolbox.models.loaders import check_four_bit, load_with_unsloth
from grpo_toolbox.schedule import lr_factor

log = logging.getLogger(__name__)


def described(model: ModelConfig, given: Given) -> tuple[Any, Any]:
    """Return the policy's configuration and its tokenizer, without loading weights; refuses what cannot be loaded."""
    adapted = model.lora.r > 0 or given.adapter is not None
    if model.load_in_4bit:
        check_four_bit(adapted)
    trust = model.trust_remote_code
    config = load_config(model.path, trust_remote_code=trust) if given.model is None else given.model.config
    if given.tokenizer is None:
        return config, load_tokenizer(model.path, trust_remote_code=trust)
    return config, padding_tokenizer(given.tokenizer, "processing_class")


def load_policy(config: RunConfig, given: Given, device: torch.device) -> Any:
    """Load the policy, or take the one that is given, onto the device and with its adapter, ready to be trained."""
    model = config.model
    adapter = given.adapter or (LoraOptions(**vars(model.lora)) if model.lora.r else None)
    if given.model is not None:
        return adopt_model(
            given.model,
            device=device,
            seed=config.trainer.seed,
            lora=adapter,
            gradient_checkpointing=model.gradient_checkpointing,
            fp32_head=model.fp32_head,
        )
    if model.loader == "unsloth":
        return load_with_unsloth(
            model.path,
            lora=adapter,
            seed=config.trainer.seed,
            four_bit=model.load_in_4bit,
            max_tokens=(config.data.max_prompt_tokens or 1024) + config.rollout.max_new_tokens,
        )
    return load_model(
        model.path,
        dtype=model.dtype,
        device=device,
        seed=config.trainer.seed,
        attn_implementation=model.attn_implementation,
        device_map=model.device_map,
        lora=adapter,
        gradient_checkpointing=model.gradient_checkpointing,
        fp32_head=model.fp32_head,
        trust_remote_code=model.trust_remote_code,
        four_bit=model.load_in_4bit,
    )


def make_optimizer(model: nn.Module, trainer: TrainerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW over what is trained; its 8-bit form where that was asked for and can be had."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: unfreeze it, or train an adapter on it.")
    options: dict[str, Any] = {
        "lr": trainer.lr,
        "betas": (trainer.adam_beta1, trainer.adam_beta2),
        "eps": trainer.adam_eps,
        "weight_decay": trainer.weight_decay,
    }
    if trainer.optimizer == "adamw_8bit":
        missing = "a GPU" if device.type != "cuda" else "bitsandbytes (pip install bitsandbytes)"
        if device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
            import bitsandbytes

            return bitsandbytes.optim.AdamW8bit(trained, **options)
        log.warning(
            "trainer.optimizer=adamw_8bit needs %s: plain AdamW takes its place, with four times its state in memory.",
            missing,
        )
    return torch.optim.AdamW(trained, **options, fused=True)


def learning_rate(trainer: TrainerConfig, step: int) -> float:
    """Return the learning rate of step `step`, counted from 1."""
    return trainer.lr * lr_factor(
        trainer.schedule,
        step,
        max_steps=trainer.max_steps,
        warmup_steps=trainer.warmup_steps,
        min_ratio=trainer.min_lr_ratio,
    )


def pick_device(name: str) -> torch.device:
    """Return the device of a name; ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # how torch refuses a name, and a device that is not there
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"trainer.device={name!r} cannot be used ({reason:.60}): auto, cpu, cuda, cuda:1, mps."
        ) from error
