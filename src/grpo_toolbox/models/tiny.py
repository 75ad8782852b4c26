"""A language model small enough to learn addition by RL in seconds, made from nothing: no download, no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads this module without loading torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+-*= abc"
"""Every character that has a token. They are few because a random policy must hit right answers by luck."""
MAX_POSITIONS = 128


def build_tiny(seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Build the tiny policy (float32, CPU, eval mode) and its tokenizer.

    The weights follow from `seed` alone, and the global random state is left as it was.
    """
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the accelerators, too, and this fork does not put those back.
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config())
    with torch.no_grad():
        # What attention gathers from the prompt must outweigh the last character's own embedding, which is always the
        # same: otherwise the policy learns the commonest answer first, stops exploring and never leaves it.
        model.model.embed_tokens.weight.mul_(2.0)
        # Nearly uniform at first, so that every answer is tried; smaller still, and the body gets little gradient.
        model.lm_head.weight.mul_(0.35)
    return model.eval(), build_tokenizer()


def tiny_config() -> LlamaConfig:
    """Return the shape of the tiny policy: two layers of width 64, two query heads to each key-value head."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=3 + len(ALPHABET),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.125,  # 1 / sqrt(hidden_size): every linear map keeps the scale of its input
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character tokenizer: pad 0, eos 1, unknown 2, then one token per character of `ALPHABET`; no BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *ALPHABET))}
    characters = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
