"""The model of `grpo_tiny` with heads as wide as servers have kernels for, as a folder that they can load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from grpo_toolbox.models.tiny import build_tokenizer, tiny_config


def write_tiny(folder: Path) -> Path:
    """Write it: two heads of 32 on one of keys and values, everything else as `build_tiny` makes it."""
    config = tiny_config()
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.model.embed_tokens.weight.mul_(2.0)
        model.lm_head.weight.mul_(0.35)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(str(folder))
    return folder
