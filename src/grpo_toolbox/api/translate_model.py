"""The part of the translation that is about the model: how it is loaded, and what stands in the config for objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest

IDLE = {"use_cache": None, "revision": "main", "low_cpu_mem_usage": None}
"""What scripts pass as well: of no effect, where None or with the value named."""
TAKEN = ("dtype", "torch_dtype", "attn_implementation", "device_map", "trust_remote_code", "quantization_config")


def model_keys(args: Any) -> dict[str, Any]:
    """Return the keys of the model from `model_init_kwargs` and transformers' newer name of checkpointing."""
    options = args.model_init_kwargs or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"model_init_kwargs={options!r} must be a dict such as {{'dtype': 'bfloat16'}}.")
    for name, value in options.items():
        if value is None or (name in IDLE and IDLE[name] in (None, value)):
            continue
        if name not in TAKEN:
            raise ConfigError(
                f"model_init_kwargs takes {', '.join(TAKEN)} here, not {name}.{suggest(name, TAKEN)} Load the model "
                "yourself and pass it: AutoModelForCausalLM.from_pretrained(…)."
            )
    keys: dict[str, Any] = {}
    dtype = options.get("dtype", options.get("torch_dtype"))
    if dtype is not None:
        keys["model.dtype"] = str(dtype).removeprefix("torch.")  # a torch.dtype or its name
    for name in ("attn_implementation", "device_map", "trust_remote_code"):
        if options.get(name) is not None:
            keys[f"model.{name}"] = options[name]
    keys |= four_bit_keys(options.get("quantization_config"))
    if args.activation_checkpointing is not None:
        keys["model.gradient_checkpointing"] = args.activation_checkpointing
    return keys


def four_bit_keys(quantization: Any) -> dict[str, Any]:
    """Return the keys of a quantisation: 4 bits of bitsandbytes, or none."""
    if quantization is None:
        return {}
    if getattr(quantization, "load_in_4bit", False):
        return {"model.load_in_4bit": True}
    raise ConfigError(
        f"quantization_config={type(quantization).__name__} is not BitsAndBytesConfig(load_in_4bit=True): load the "
        "model with it yourself and pass it."
    )
