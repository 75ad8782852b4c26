"""Text to token ids and back, the same bytes as the model will be served with."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from grpo_toolbox.data.rows import Row
from grpo_toolbox.errors import ConfigError, DataError, unknown_option
from grpo_toolbox.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    system_prompt: str | None = None,
    chat: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    max_prompt_tokens: int | None = None,
    max_positions: int | None = None,
    max_new_tokens: int = 0,
    on_long: Literal["error", "drop"] = "error",
) -> list[Prompt]:
    """Tokenise checked rows into prompts whose id is the row's index.

    Message lists go through the chat template; text stays plain unless `chat`, which makes it one user message. `tools`
    are the JSON schemas the template shows the model. Lengths are of what is sent: a prompt longer than
    `max_prompt_tokens`, or that leaves fewer than `max_new_tokens` of the model's `max_positions`, is an error, or is
    dropped and counted, but never cut. Raises DataError when nothing is left.
    """
    template_kwargs = dict(chat_template_kwargs or {})
    prompts = [conversation(row["prompt"], chat, system_prompt) for row in rows]
    _check_templates(prompts, tokenizer, template_kwargs, tools, system_prompt)
    texts = []
    for index, prompt in enumerate(prompts):
        try:
            texts.append(prompt if isinstance(prompt, str) else render_chat(prompt, tokenizer, template_kwargs, tools))
        except DataError as error:
            raise DataError(f"row {index + 1}: {error}") from error
    encoded = encode_texts(texts, tokenizer)
    for index, ids in enumerate(encoded):
        _check_known(index, texts[index], ids, tokenizer)
        if not ids:
            raise DataError(
                f"row {index + 1}: the prompt {texts[index]!r:.60} has no token in this tokenizer's vocabulary."
            )
    fits = _fitting(encoded, max_prompt_tokens, max_positions, max_new_tokens, on_long)
    return [
        Prompt(index, prompt, ids, {name: value for name, value in row.items() if name != "prompt"})
        for index, (row, prompt, ids) in enumerate(zip(rows, prompts, encoded, strict=True))
        if fits[index]
    ]


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """Render messages with the tokenizer's own template, ready for the assistant to speak.

    A last message of the assistant is left open and gone on with instead of opening another turn.
    """
    from jinja2 import TemplateError

    goes_on = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **(chat_template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:  # the template is the model author's program
        raise DataError(f"the chat template of the model refuses the messages: {error}") from error


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Tokenise texts, with exactly one BOS token each where the tokenizer adds one, and nothing behind them.

    A BOS that stands in the text already (chat templates print theirs) is not doubled. An EOS that the tokenizer would
    append is left out: a completion cannot follow it.
    """
    if not texts:
        return []
    plain = [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]
    bos = tokenizer.bos_token_id
    whole = tokenizer(texts[0], verbose=False)["input_ids"]
    adds_bos = bos is not None and tuple(whole[: 1 + len(plain[0])]) == (bos, *plain[0])
    return [(bos, *ids) if adds_bos and ids and ids[0] != bos else ids for ids in plain]


def decode_completion(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, finish_reason: str) -> str:
    """Decode a completion without its stop token (the last id when `finish_reason` is "stop") and padding.

    Every other special token stays visible: rewards may look for `<answer>` or `<think>`.
    """
    sampled = ids[:-1] if finish_reason == "stop" else ids
    padding = tokenizer.pad_token_id
    kept = [token for token in sampled if token != padding]
    return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def conversation(prompt: str | list[Message], chat: bool, system_prompt: str | None) -> str | list[Message]:
    """Return a prompt as rewards see it: text stays text unless `chat`; messages begin with the system prompt."""
    if isinstance(prompt, str) and not chat:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _check_templates(
    prompts: Sequence[str | list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None,
    system_prompt: str | None,
) -> None:
    """Refuse settings that have no place to go, and warn of those that the template does not read."""
    plain = sum(isinstance(prompt, str) for prompt in prompts)
    if plain and system_prompt is not None:
        raise ConfigError("data.system_prompt is set, but plain-text prompts have no place for it. Set data.chat=true.")
    if plain < len(prompts) and not tokenizer.chat_template:
        raise ConfigError(
            "the prompts are chat messages (data.chat=true, or message lists in the data), but the tokenizer has no "
            "chat template. Use an instruct model, or plain-text prompts with data.chat=false."
        )
    template = tokenizer.get_chat_template(tools=tools) if plain < len(prompts) else ""
    for name in [*template_kwargs, *(["tools"] if tools else [])]:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            log.warning("data.chat_template_kwargs.%s changes nothing: the chat template does not read it.", name)


def _check_known(index: int, text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a prompt that the tokenizer cannot write: the policy would be asked something else than the data says."""
    if tokenizer.unk_token_id in ids and str(tokenizer.unk_token) not in text:
        raise DataError(
            f"row {index + 1}: the prompt {text!r:.60} has characters that this model's tokenizer does not know. "
            "Choose another model (model=file model.path=…), or clean the data."
        )


def _fitting(
    encoded: Sequence[tuple[int, ...]],
    max_prompt_tokens: int | None,
    max_positions: int | None,
    max_new_tokens: int,
    on_long: str,
) -> list[bool]:
    """Tell for each prompt whether it fits; raises, or logs the count of those that do not."""
    if on_long not in ("error", "drop"):
        raise unknown_option("data.on_long", on_long, ("error", "drop"))
    limits = {} if max_prompt_tokens is None else {f"data.max_prompt_tokens={max_prompt_tokens}": max_prompt_tokens}
    if max_positions is not None:
        room = max_positions - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"rollout.max_new_tokens={max_new_tokens} leaves no room for a prompt: the model has {max_positions} "
                f"positions. Set less than {max_positions}."
            )
        limits[f"{max_positions} positions of the model - rollout.max_new_tokens={max_new_tokens}"] = room
    reason, limit = min(limits.items(), key=lambda item: item[1], default=("", None))
    if limit is None:
        return [True] * len(encoded)
    fits = [len(ids) <= limit for ids in encoded]
    long = [index for index, fit in enumerate(fits) if not fit]
    if long and on_long == "error":
        raise DataError(
            f"{len(long)} of {len(encoded)} prompts are too long; the first is row {long[0] + 1} with "
            f"{len(encoded[long[0]])} tokens, allowed are {limit} ({reason}). Raise the limit or set data.on_long=drop."
        )
    if long:
        log.warning("dropped %d of %d prompts longer than %d tokens (%s).", len(long), len(encoded), limit, reason)
    if not any(fits):
        raise DataError(f"the data set is empty after filtering: no prompt fits into {limit} tokens ({reason}).")
    return fits
