"""Low-rank adapters: how a policy is trained through one, and how it is added back into plain weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, unknown_option

if TYPE_CHECKING:  # options are read without loading torch
    import torch
    from peft import PeftConfig


@dataclass(frozen=True)
class LoraOptions:
    """A low-rank adapter (Hu et al., 2021): every adapted W becomes W + alpha / r · B·A, with B = 0 at the start."""

    r: int
    """Rank of the adapter; 0 trains all weights instead."""
    alpha: float | None = None
    """None is 2·r."""
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"
    """`all-linear` (every linear layer but the output head), names of layers, or one regular expression."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ConfigError(f"model.lora.r={self.r} is negative: set a rank such as 16, or 0 to train all weights.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.lora.dropout={self.dropout} is not in [0, 1): set model.lora.dropout=0.")


def has_adapter(model: torch.nn.Module) -> bool:
    """Tell whether the model is trained through an adapter."""
    return hasattr(model, "peft_config")


def trains_biases(model: Any) -> bool:
    """Tell whether biases of the base are trained beside the adapter: they stay when it is switched off."""
    return any(getattr(config, "bias", "none") != "none" for config in model.peft_config.values())


def add_adapter(model: Any, lora: LoraOptions | PeftConfig) -> Any:
    """Return the model with a fresh adapter, the only thing that requires gradients; its output is unchanged.

    Adapter weights are float32 on a half-precision base. Draws from torch's global random state.
    """
    from peft import get_peft_model, prepare_model_for_kbit_training

    if has_adapter(model):
        raise ConfigError(
            "the model has an adapter already and is to get another: pass it without peft_config, or merge it first "
            "(model.merge_and_unload())."
        )
    config = _peft_config(lora) if isinstance(lora, LoraOptions) else lora
    targets = getattr(config, "target_modules", None)
    layers = _linear_layers(model)
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    try:
        with without_peft_noise():
            adapted = get_peft_model(model, config)
    except ValueError as error:  # PEFT matches the names itself and raises this where none fits
        if "lora_dropout" in str(error):
            raise ConfigError(
                f"model.lora.dropout={config.lora_dropout} cannot be had for a mixture of experts, whose adapters "
                "stand on weights and not on layers: set model.lora.dropout=0, or other model.lora.target_modules."
            ) from error
        raise unknown_option("model.lora.target_modules", targets, {"all-linear", *layers}) from error
    _refuse_tied(adapted, targets)
    return adapted


def _peft_config(lora: LoraOptions) -> PeftConfig:
    from peft import LoraConfig

    targets = lora.target_modules
    return LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


@contextmanager
def without_peft_noise() -> Iterator[None]:
    """Silence, inside the block, what PEFT warns of and no user could mend: a name that transformers is giving up, and
    ranks that it sets for experts which it then does not find."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        yield


def _linear_layers(model: torch.nn.Module) -> set[str]:
    import torch

    return {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}


def _refuse_tied(adapted: Any, targets: object) -> None:
    from peft.tuners.lora import LoraLayer

    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if adapted.config.tie_word_embeddings and any(isinstance(end, LoraLayer) for end in ends):
        raise ConfigError(
            f"model.lora.target_modules={targets!r} adapts the output head or the input embedding, which are one "
            "tensor in this model and would drift apart. Leave them out, as all-linear does."
        )


def merged_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights under the plain model's names, an adapter added into them; the live model is not touched.

    Sums are taken in float32 and cast to each weight's own type. Weights without an adapter are shared, not copied.
    """
    if not has_adapter(model):
        return model.state_dict()
    import torch
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()  # type: ignore[operator]
    state = {_plain_name(key): value for key, value in base.state_dict().items() if ".lora_" not in key}
    with torch.no_grad():
        for name, layer in base.named_modules():
            if isinstance(layer, LoraLayer):
                key = f"{_plain_name(name)}.{getattr(layer, 'parameter_name', 'weight')}"
                weight, delta = state[key], layer.get_delta_weight(model.active_adapter)
                state[key] = (weight.float() + delta.float()).to(weight.dtype)
    return state


def _plain_name(name: str) -> str:
    """Return a name without what wrapping has put into it, once for every adapted weight."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)
