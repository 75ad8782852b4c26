"""One small checkpoint that every engine can serve: plain decoder, byte-level tokenizer, logits several nats apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

END = 0
"""The only stop token; 1 to 256 are the bytes."""
POSITIONS = 512


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and the end: every text has exactly one reading."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(["<end>", *alphabet])}, merges=[])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>", pad_token="<end>")


def served_model(seed: int = 0) -> Any:
    """Two layers of Qwen 2 with random weights; another seed is another model of the same shape."""
    config = Qwen2Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight[END] *= 2  # behind some prompts the end is likely
    return model


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint as transformers does."""
    served_model(seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(str(folder))
    return folder
