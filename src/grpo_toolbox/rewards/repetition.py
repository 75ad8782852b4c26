"""repetition_penalty: saying the same again costs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from numbers import Real
from typing import Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.golds import charge_golds
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens

UNITS = ("tokens", "words")
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts that put no blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def repetition_penalty(ngram: int = 3, max_penalty: float = -1.0, unit: str = "tokens") -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams that have come before (Yeo et al., 2025, made one number).

    (1 − distinct/all) · `max_penalty` over the runs of `ngram` tokens, or words (`unit`); 0 where there is none.
    Words are read without case and punctuation; in scripts without blanks each letter is one. Linear time.
    """
    if isinstance(ngram, bool) or not isinstance(ngram, int) or ngram < 1:
        raise ConfigError(f"reward.ngram={ngram!r} must be a whole number, at least 1: how many make a run.")
    number = isinstance(max_penalty, Real) and not isinstance(max_penalty, bool) and math.isfinite(max_penalty)
    if not number or max_penalty > 0:
        raise ConfigError(f"reward.max_penalty={max_penalty!r} must be a number of at most 0, such as -1.0.")
    if unit not in UNITS:
        raise unknown_option("reward.unit", unit, UNITS)

    def score_tokens(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [0.0 + max_penalty * repeated_share(ids, ngram) for ids in completion_ids]

    def score_words(completions: Sequence[Any]) -> list[float]:
        texts = [without_stop_tokens(completion_text(completion)) for completion in completions]
        return [0.0 + max_penalty * repeated_share(words_of(text), ngram) for text in texts]

    score: Callable[..., list[float]] = score_tokens if unit == "tokens" else score_words
    score.__name__ = "repetition_penalty"
    if max_penalty < 0:
        golds = charge_golds("Six times seven is forty-two.", {"a loop": "again " * (ngram + 100)})
        score.golds = golds  # type: ignore[attr-defined]
    return score


def repeated_share(items: Sequence[Hashable], ngram: int) -> float:
    """The share of the runs of `ngram` items that are equal to one before them; 0 where there is no run."""
    runs = [tuple(items[start : start + ngram]) for start in range(len(items) - ngram + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.lower())
