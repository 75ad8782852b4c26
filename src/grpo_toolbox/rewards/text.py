"""The text of a completion, whichever form it comes in, and patterns to look for in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError

_STOP_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|</s>|<eos>|<pad>|<end_of_turn>|<｜end▁of▁sentence｜>)\Z")
_LONGEST_STOP_TOKEN = 48
_CONTROL_TOKEN = re.compile(
    r"<(?=[|｜])|<(?=/?s>|/?(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>|</?SYS>>)|\[(?=/?INST\])"
)
_LOOK_ALIKE = {"<": "‹", "[": "⟦"}


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of one completion: itself, or the content of its last assistant message ('' where it has none)."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") for message in completion if message.get("role") == "assistant"]
    return content_text(said[-1]) if said else ""


def content_text(content: Any) -> str:
    """A message's content as text; of a list of parts, the text parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def without_stop_tokens(text: str) -> str:
    """`text` without the stop and padding tokens at its end; unchanged where there are none."""
    end = text.rstrip()
    while match := _STOP_TOKEN.search(end[-_LONGEST_STOP_TOKEN:]):
        end = end[: len(end) - (match.end() - match.start())]
        text, end = end, end.rstrip()
    return text


def without_control_tokens(text: str) -> str:
    """`text` in which no control token of a chat format (`<|im_end|>`, `[/INST]`, `</s>`) is left for what reads it.

    Its first character becomes one that looks like it, so that every other character keeps its place.
    """
    return _CONTROL_TOKEN.sub(lambda found: _LOOK_ALIKE[found[0]], text)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern whose dot matches newlines, too; ConfigError where it is no regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern={pattern!r} is not a regular expression: {error}.") from error
