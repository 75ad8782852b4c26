"""Other ways to load a policy: its weights in 4 bits (bitsandbytes), or by Unsloth."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:  # settings are checked without loading torch
    import torch
    from transformers import BitsAndBytesConfig

    from grpo_toolbox.models.lora import LoraOptions


def check_four_bit(adapted: bool) -> None:
    """Raise ConfigError where weights of 4 bits cannot be loaded, or nothing could be trained on them."""
    import torch

    if not adapted:
        raise ConfigError(
            "model.load_in_4bit=true freezes the weights: train an adapter on them, model.lora.r=16, or a peft_config."
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.load_in_4bit=true needs a GPU, and there is none here: set model.load_in_4bit=false and, for less "
            "memory, model.dtype=bfloat16."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("model.load_in_4bit=true needs bitsandbytes: pip install 'grpo-toolbox[quant]'.")


def four_bits(dtype: str) -> BitsAndBytesConfig:
    """Return how QLoRA (Dettmers et al., 2023) holds a frozen base: NormalFloat of 4 bits, quantised twice."""
    import torch
    from transformers import BitsAndBytesConfig

    computed = torch.bfloat16 if dtype in ("auto", "bfloat16") else getattr(torch, dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
    )


def load_with_unsloth(
    path: str, *, lora: LoraOptions | None, seed: int, four_bit: bool, max_tokens: int
) -> torch.nn.Module:
    """Load a policy by Unsloth's FastLanguageModel, with its adapter; ConfigError where Unsloth is not installed."""
    if importlib.util.find_spec("unsloth") is None:
        raise ConfigError(
            "model.loader=unsloth needs Unsloth, which is not installed (it asks for a GPU and environment of its own, "
            "see unsloth.ai): install it, or set model.loader=transformers."
        )
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(model_name=path, max_seq_length=max_tokens, load_in_4bit=four_bit)
    if lora is None:
        return model.eval()
    adapter: dict[str, Any] = {
        "r": lora.r,
        "lora_alpha": 2 * lora.r if lora.alpha is None else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_gradient_checkpointing": "unsloth",
        "random_state": seed,
    }
    if lora.target_modules != "all-linear":  # which is Unsloth's own choice
        adapter["target_modules"] = lora.target_modules
    return FastLanguageModel.get_peft_model(model, **adapter).eval()
