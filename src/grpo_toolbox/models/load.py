"""From `model.path` to a policy: its tokenizer, its weights, and how it is written out again.

A path is `builtin:tiny` (made on the spot, always the same weights), `builtin:smollm2` (fetched once into the cache
folder), a local folder, or the name of a model on the Hugging Face hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.models.loaders import four_bits
from grpo_toolbox.models.lora import LoraOptions, add_adapter, has_adapter, merged_state_dict, without_peft_noise
from grpo_toolbox.models.paths import ADAPTER_FILE, TINY, resolve_model_path
from grpo_toolbox.models.reference import Reference, make_reference

if TYPE_CHECKING:  # resolving a path loads no torch
    import torch
    from peft import PeftConfig
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")

__all__ = [
    "DTYPES",
    "LoraOptions",
    "Reference",
    "adopt_model",
    "count_parameters",
    "has_adapter",
    "load_config",
    "load_model",
    "load_tokenizer",
    "make_reference",
    "max_positions",
    "merged_state_dict",
    "padding_tokenizer",
    "resolve_model_path",
    "save_pretrained",
    "stop_token_ids",
]


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a model's configuration without its weights; for an adapter folder, its base model's."""
    from transformers import AutoConfig

    path = resolve_model_path(path)
    if path == TINY:
        from grpo_toolbox.models.tiny import tiny_config

        return tiny_config()
    base = _adapter_base(path)
    if base is not None:
        return load_config(base, trust_remote_code=trust_remote_code)
    with _refusals(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer; one without a pad token pads with its end token (masks come from lengths, never from ids)."""
    from transformers import AutoTokenizer

    path = resolve_model_path(path)
    if path == TINY:
        from grpo_toolbox.models.tiny import build_tokenizer

        return build_tokenizer()
    with _refusals(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    return padding_tokenizer(tokenizer, f"model.path={path}")


def padding_tokenizer(tokenizer: Any, where: str) -> Any:
    """Return a tokenizer that has a pad token, the end token where it had none; `where` is how errors call it."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"{where}: the tokenizer has neither a pad token nor an end token. "
                "Set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
    attn_implementation: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    lora: LoraOptions | PeftConfig | None = None,
    gradient_checkpointing: bool = False,
    fp32_head: bool = False,
    four_bit: bool = False,
) -> torch.nn.Module:
    """Load a causal language model in eval mode onto `device`, or spread over devices by `device_map`.

    `dtype="auto"` is float32 for whatever is trained, and always on the CPU; the frozen base of an adapter keeps the
    checkpoint's own type on an accelerator. Adapter weights are float32 on any base: half precision rounds AdamW's
    small steps away. A folder that holds an adapter is loaded as its base model with the adapter added in.
    The same `seed` draws the same fresh adapter; the global random state is left as it was. `fp32_head` multiplies the
    output head out in float32.
    """
    import torch

    if dtype not in DTYPES:
        raise unknown_option("model.dtype", dtype, DTYPES)
    if isinstance(lora, LoraOptions) and lora.r == 0:
        lora = None
    frozen_base = lora is not None and torch.device(device).type != "cpu"
    if dtype == "auto" and not frozen_base:
        dtype = "float32"
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    options |= {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    options |= {} if device_map is None else {"device_map": device_map}
    options |= {"quantization_config": four_bits(dtype)} if four_bit else {}
    with _drawing_from(seed):
        model = _equipped(_load_plain(path, options), lora)
    return _placed(model, device, gradient_checkpointing, fp32_head)


def adopt_model(
    model: Any,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    lora: LoraOptions | PeftConfig | None = None,
    gradient_checkpointing: bool = False,
    fp32_head: bool = False,
) -> torch.nn.Module:
    """Make a loaded model a policy: without dropout, with a fresh adapter where asked, on its device, in eval mode.

    A model that is spread over devices, or whose weights are quantised, stays where it is.
    """
    with _drawing_from(seed):
        model = _equipped(model, lora)
    return _placed(model, device, gradient_checkpointing, fp32_head)


def _equipped(model: Any, lora: LoraOptions | PeftConfig | None) -> Any:
    model = _without_dropout(model)
    return model if lora is None else add_adapter(model, lora)


def _placed(model: Any, device: str | torch.device, gradient_checkpointing: bool, fp32_head: bool) -> torch.nn.Module:
    from grpo_toolbox.models.forward import plain_model, same_pass_again
    from grpo_toolbox.models.head import use_float32_head

    if fp32_head:
        use_float32_head(plain_model(model))
    if getattr(model, "hf_device_map", None) is None and not getattr(model, "is_quantized", False):
        model.to(device)
    # a model that is given may have it switched on already, in a form that knows no other attention than its own
    if gradient_checkpointing or any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        again = partial(same_pass_again, model)
        # transformers gives up the older name, and older versions have no other
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": again})
    return model.eval()


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Let the block draw from `seed`, and put the global random state back afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the accelerators, too, and this fork does not put those back.
        torch.default_generator.manual_seed(seed)
        yield


_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""What modules call the noise that they put on the input of their routers in training."""


def _without_dropout(model: Any) -> Any:
    """Set the checkpoint's own dropout and router noise to 0: rollouts are sampled without, and trained as sampled.

    An adapter's own dropout stays as it is.
    """
    from torch import nn

    for place, module in model.named_modules():
        if ".lora_dropout" in place:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or name in _NOISE) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _load_plain(path: str, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    resolved = resolve_model_path(path)
    base = _adapter_base(resolved)
    if resolved == TINY:
        model = _load_tiny(options)
    elif base is not None:
        model = _load_merged(base, resolved, options)
    else:
        with _refusals(resolved):
            model = AutoModelForCausalLM.from_pretrained(resolved, **options)
    # An adapter written later names this as its base; a built-in's name holds on every machine, its folder does not.
    model.name_or_path = path if path.startswith("builtin:") else resolved
    return model


def _load_tiny(options: dict[str, Any]) -> Any:
    import torch

    from grpo_toolbox.models.tiny import build_tiny

    model, _ = build_tiny()
    if "attn_implementation" in options:
        model.set_attn_implementation(options["attn_implementation"])
    return model if options["dtype"] == "auto" else model.to(getattr(torch, options["dtype"]))


def _adapter_base(path: str) -> str | None:
    """Name the base model of an adapter folder; None for a plain checkpoint, a built-in or a hub name."""
    folder = Path(path)
    if (folder / "config.json").is_file() or not (folder / ADAPTER_FILE).is_file():
        return None
    return json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]


def _load_merged(base: str, folder: str, options: dict[str, Any]) -> Any:
    from peft import PeftModel

    model = _load_plain(base, options)
    with _refusals(folder), without_peft_noise():
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return merged.requires_grad_(True)  # PEFT has frozen what stood under the adapter


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Turn what transformers and PEFT raise for a checkpoint they cannot get or read into one line with a way out."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        if Path(path).is_dir():
            raise ConfigError(f"model.path={path} cannot be loaded: {reason}") from error
        raise ConfigError(
            f"model.path={path} is not a local folder, and the hub did not give it: {reason} "
            "Without a network, pass a folder that holds the checkpoint: model.path=/path/to/folder"
        ) from error


def max_positions(config: PretrainedConfig) -> int | None:
    """Return how many tokens the model has positions for; None where its configuration sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def stop_token_ids(source: torch.nn.Module | GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends a completion, ascending: the tokenizer's end token and the generation config's.

    `source` is a model or its generation config. Instruct models often have two: end of turn and end of text.
    """
    listed = getattr(getattr(source, "generation_config", source), "eos_token_id", None)
    ids = [*listed, tokenizer.eos_token_id] if isinstance(listed, list | tuple) else [listed, tokenizer.eos_token_id]
    return tuple(sorted({token for token in ids if token is not None}))


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the number of parameters, and of those how many are trained; a tied head counts once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def save_pretrained(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path, *, merged: bool = False
) -> None:
    """Write a checkpoint that `load_model` reads: a plain one, or with LoRA the adapter alone; and the tokenizer.

    `merged=True` writes a plain checkpoint with the adapter added in, for tools that know no adapters.
    """
    writer: Any = model
    if not has_adapter(model):
        writer.save_pretrained(folder)
    elif merged:
        writer.get_base_model().save_pretrained(folder, state_dict=merged_state_dict(model))
    else:
        # PEFT's default asks the hub whether the base's vocabulary has grown; the toolbox never resizes it.
        writer.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(str(folder))
