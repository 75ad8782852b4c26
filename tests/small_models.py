"""Models small enough for tests, made from nothing, and the plain forward pass that everything is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_toolbox.types import Prompt

VOCABULARY = 67
STOP = 1

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": STOP,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_NO_IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": STOP}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one head each": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window 16": ("mistral", {"sliding_window": 16}),
    "mistral, window 256": ("mistral", {"sliding_window": 256}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3, longrope past 64": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2, window 256": ("gemma2", {"head_dim": 8, "sliding_window": 256}),
    "gemma3, window 16": ("gemma3_text", {"head_dim": 8, "sliding_window": 16}),
    "gemma3, window 256": ("gemma3_text", {"head_dim": 8, "sliding_window": 256}),
    "gpt2": ("gpt2", _GPT2 | _NO_IDS),
    "granite": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.05}),
    "cohere": ("cohere", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", _MOE),
    "deepseek_v3": (
        "deepseek_v3",
        _MLA | _MOE | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "diffllama": ("diffllama", {}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 256, "rope_parameters": None}),
    "doge": ("doge", {}),
    "dory": ("dory", {}),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4} | _NO_IDS),
    "mamba": (
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4} | _NO_IDS,
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
"""What distinguishes each from the plain decoder."""


def build(name: str, **changes: Any) -> Any:
    """Build an architecture with weights large enough that logits spread over several nats."""
    kind, options = ARCHITECTURES[name]
    base = {} if "hidden_size" in options or "n_embd" in options else _DECODER
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(base | options | changes)))
        model = model.eval().float()
        for parameter in model.parameters():
            if parameter.ndim > 1 and 0 < parameter.std() < 0.3:
                parameter.data.mul_(0.3 / parameter.std())
    return model


@cache
def shared(name: str) -> Any:
    """Build once; for tests that leave the model as it is."""
    return build(name)


def chain(following: Mapping[int, int], vocabulary: int = 16, positions: int = 64) -> Any:
    """Build a Llama that says `following[token]` after `token`, with certainty in float32.

    Its layers add nothing: the stream is the one-hot embedding, and the head maps it to 20·√V ≥ 80 on the next token.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=vocabulary,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in following.items():
            model.lm_head.weight[successor, token] = 20.0
    return model


def text_ids(length: int, start: int = 2) -> tuple[int, ...]:
    """`length` token ids that jump about the vocabulary and avoid padding and stop token."""
    return tuple(2 + (start + 5 * place * (place + 1) // 2) % (VOCABULARY - 2) for place in range(length))


def make_prompts(*lengths: int) -> list[Prompt]:
    """Prompts of these lengths, numbered from 0."""
    return [Prompt(index, f"prompt {index}", text_ids(length, 7 * index)) for index, length in enumerate(lengths)]


@torch.no_grad()
def forced_log_probs(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """All log-probs (T, V) at the places of `ids`: Hugging Face's own forward, one row, nothing padded, no cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].float()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(dim=-1)


def forced_logps(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs (T,) of `ids` behind `prompt`."""
    return forced_log_probs(model, prompt, ids, temperature).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
