"""The served checkpoint as a GGUF file, for llama.cpp: the same float32 weights under its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from served_models import END, POSITIONS, byte_tokenizer

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(model: Any, file: Path) -> Path:
    """Write `model`, a `served_model()`, with its byte tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer)
    for name, value in model.state_dict().items():
        writer.add_tensor(_name(name), value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens])
    kinds = [gguf.TokenType.CONTROL if place == END else gguf.TokenType.NORMAL for _, place in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(["ÿ þ"])  # one there must be; its product is no token, so that it merges nothing
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)


def _name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[rest]}"
