"""duplicate_penalty: completions of a group that say the same cost."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens


def duplicate_penalty(max_penalty: float = -1.0, ignore_case: bool = True) -> Callable[..., list[float]]:
    """`max_penalty` times the share of the others in its group that a completion equals; 0 where it is alone.

    Completions are equal by their words: blanks are one blank, Unicode forms are united (NFKC), case does not count
    with `ignore_case`. A group is the rows of a call whose prompts are equal. All copies are charged alike, so that
    the order does not matter.
    """
    number = isinstance(max_penalty, Real) and not isinstance(max_penalty, bool) and math.isfinite(max_penalty)
    if not number or max_penalty > 0:
        raise ConfigError(f"reward.max_penalty={max_penalty!r} must be a number of at most 0, such as -1.0.")

    def score(prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None) -> list[float]:
        groups = [prompt if isinstance(prompt, str) else repr(prompt) for prompt in prompts]
        texts = [_plain(without_stop_tokens(completion_text(completion)), ignore_case) for completion in completions]
        pairs = list(zip(groups, texts, strict=True))
        sizes, copies = Counter(groups), Counter(pairs)
        shares = [(copies[pair] - 1) / max(1, sizes[pair[0]] - 1) for pair in pairs]
        if log_metric is not None and shares:
            log_metric("duplicate_rate", sum(share > 0 for share in shares) / len(shares))
        return [0.0 + max_penalty * share for share in shares]

    score.__name__ = "duplicate_penalty"
    score.of_groups = True  # type: ignore[attr-defined]
    return score


def _plain(text: str, ignore_case: bool) -> str:
    words = " ".join(unicodedata.normalize("NFKC", text).split())
    return words.casefold() if ignore_case else words
