"""length_penalty: long completions cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens


def length_penalty(target_chars: int = 300) -> Callable[..., list[float]]:
    """0 up to `target_chars` characters, falling linearly to −1 at twice as many: −min(1, max(0, n/target − 1))."""
    if isinstance(target_chars, bool) or not isinstance(target_chars, int) or target_chars < 1:
        raise ConfigError(f"reward.target_chars={target_chars!r} must be a whole number of characters, at least 1.")

    def score(completions: Sequence[Any]) -> list[float]:
        lengths = [len(without_stop_tokens(completion_text(completion))) for completion in completions]
        return [min(0.0, max(-1.0, 1.0 - length / target_chars)) for length in lengths]

    score.__name__ = "length_penalty"
    return score
