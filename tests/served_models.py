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
    _draws_ascii(model)
    return model


@torch.no_grad()
def _draws_ascii(model: Any) -> None:
    """Have the model draw ASCII alone, and rather often the end.

    llama.cpp does not tell the log-probs of tokens that end inside a character. One place of the stream is the same
    behind every token, and the head takes what stands there off the other tokens' logits.
    """
    others = set(range(257)) - {END, *(byte_tokenizer()(chr(byte))["input_ids"][0] for byte in range(128))}
    model.model.embed_tokens.weight[:, 0] = 3.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[END] *= 1.2
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[sorted(others), 0] = -40.0


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint as transformers does."""
    served_model(seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(str(folder))
    return folder
