"""A chat model small enough for tests: bytes for tokens, a chat template, random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and those of the template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(BPE({token: place for place, token in enumerate([*special, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = TEMPLATE
    return made


def save_chat_model(folder: Path, positions: int = 2048, width: int = 16) -> str:
    """Save the model with its tokenizer; returns the folder. It has the names of layers of Qwen's models."""
    tokenizer = chat_tokenizer()
    model = _qwen(tokenizer, positions, width)
    with torch.no_grad():  # one place of the stream is alike behind every token: an end comes after some twenty
        model.model.embed_tokens.weight[:, 0] = 0.05
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 1.2
    return _saved(model, tokenizer, folder)


def save_quick_learner(folder: Path, faster: float = 1e4) -> str:
    """Save a model that a learning rate of 1e-6 moves, and whose vocabulary has whole answers in it.

    Its last norm is `faster` times as large and its head as much smaller: the same logits, each of which a step of Adam
    moves by as much more. What it says is mostly of a few words, behind any word alike.
    """
    tokenizer = chat_tokenizer()
    words = [f"\\boxed{{{number}}}" for number in range(2, 6)]
    tokenizer.add_tokens(words)
    model = _qwen(tokenizer, 2048, 32)
    said = tokenizer.convert_tokens_to_ids([*words, "<|im_end|>"])
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.5  # what all contexts have in common
        model.lm_head.weight[:, 0] = -2.0
        model.lm_head.weight[said, 0] = 0.0
        model.model.norm.weight.mul_(faster)
        model.lm_head.weight.div_(faster)
    return _saved(model, tokenizer, folder)


def _qwen(tokenizer: PreTrainedTokenizerFast, positions: int, width: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def _saved(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
