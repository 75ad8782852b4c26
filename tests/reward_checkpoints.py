"""Small random reward models of one character per token, and what they give to a text alone."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .?+=,\n‹|_>"
CONTROL = ["[user]", "[assistant]", "<|end|>"]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<e>{% endfor %}"
HEADS = {"sequence": LlamaForSequenceClassification, "token": LlamaForTokenClassification}


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<p>", "<e>", "<u>", *CONTROL, *ALPHABET])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<u>"))
    core.pre_tokenizer = Split("", "isolated")
    core.decoder = Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<p>", eos_token="<e>", unk_token="<u>")
    made.add_special_tokens({"additional_special_tokens": CONTROL})
    made.chat_template = template
    return made


def checkpoint(
    folder: Path,
    pad: int | None = 0,
    labels: int = 1,
    template: str | None = TEMPLATE,
    head: str = "sequence",
    seed: int = 0,
) -> str:
    """Save a random model with its tokenizer; 64 positions."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=labels,
        pad_token_id=pad,
    )
    HEADS[head](config).save_pretrained(folder)
    tokenizer_of(template).save_pretrained(folder)
    return str(folder)


def logits_alone(path: str, text: str, head: str = "sequence") -> Tensor:
    """The reference: one unpadded forward; (labels,) or (T, labels)."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = HEADS[head].from_pretrained(path).eval()
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        return model(ids).logits[0]


def templated(prompt: str, completion: str) -> str:
    return f"[user]{prompt}<e>[assistant]{completion}<e>"
