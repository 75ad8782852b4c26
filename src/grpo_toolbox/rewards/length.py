"""What length costs: length_penalty, soft_overlong, token_cost, cosine_length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.golds import charge_golds
from grpo_toolbox.rewards.signatures import unwrapped
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens


def length_penalty(target_chars: int = 300) -> Callable[..., list[float]]:
    """0 up to `target_chars` characters, falling linearly to −1 at twice as many: −min(1, max(0, n/target − 1))."""
    _check_count("target_chars", target_chars, 1, "characters")

    def score(completions: Sequence[Any]) -> list[float]:
        lengths = [len(without_stop_tokens(completion_text(completion))) for completion in completions]
        return [min(0.0, max(-1.0, 1.0 - length / target_chars)) for length in lengths]

    score.__name__ = "length_penalty"
    score.golds = charge_golds("4", {"twice the length": "x" * 2 * target_chars})  # type: ignore[attr-defined]
    return score


def soft_overlong(max_tokens: int, cache: int) -> Callable[..., list[float]]:
    """DAPO's soft overlong punishment (Yu et al., 2025, eq. 13): it falls from 0 to −1 over the last `cache` tokens.

    0 for n ≤ `max_tokens` − `cache` tokens, ((`max_tokens` − `cache`) − n) / `cache` up to `max_tokens`, −1 above. With
    `max_tokens` the limit of the rollout, what was cut off gets −1.
    """
    _check_count("max_tokens", max_tokens, 1, "tokens")
    _check_count("cache", cache, 0, "tokens")
    if cache > max_tokens:
        raise ConfigError(f"reward.cache={cache} is more than reward.max_tokens={max_tokens}: even no text would cost.")

    def score(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [_overlong(len(ids), max_tokens, cache) for ids in completion_ids]

    score.__name__ = "soft_overlong"
    score.golds = charge_golds("4", {"over the limit": "x" * (max_tokens + 1)})  # type: ignore[attr-defined]
    return score


def token_cost(budget: int = 512, cost: float = 0.001, limit: float = 1.0) -> Callable[..., list[float]]:
    """Each token past `budget` costs `cost`, all together `limit` at most: −min(limit, cost · max(0, n − budget))."""
    _check_count("budget", budget, 0, "tokens")
    for name, value in (("cost", cost), ("limit", limit)):
        if not _is_number(value) or value <= 0:
            raise ConfigError(f"reward.{name}={value!r} must be a number above 0: it is taken off.")

    def score(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [0.0 - min(limit, cost * max(0, len(ids) - budget)) for ids in completion_ids]

    score.__name__ = "token_cost"
    over = budget + math.ceil(limit / cost)
    score.golds = charge_golds("4", {"over the budget": "x" * over})  # type: ignore[attr-defined]
    return score


def cosine_length(
    max_tokens: int,
    correct: str | Mapping[str, Any] = "exact_match",
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
    success: float = 1.0,
) -> Callable[..., list[float | Exception | None]]:
    """Correctness scaled by length along half a cosine (Yeo et al., 2025), so that right answers had better be short.

    `correct` is the reward (a name, or a mapping with `name` and options) whose score of at least `success` makes a
    completion right. With t = min(1, n/`max_tokens`) for n tokens: long + ½ (short − long) (1 + cos πt), of the two
    values for right or for wrong. A completion of `max_tokens` or more gets `exceeded` instead, unless that is None.
    None where `correct` has no score; where it failed, so has this. What `correct` logs is logged.
    """
    from grpo_toolbox.rewards.build import build_reward
    from grpo_toolbox.rewards.component import asks_elsewhere

    _check_count("max_tokens", max_tokens, 1, "tokens")
    values = {"correct_short": correct_short, "correct_long": correct_long, "wrong_short": wrong_short}
    values |= {"wrong_long": wrong_long, "success": success}
    if exceeded is not None:
        values["exceeded"] = exceeded
    for name, value in values.items():
        if not _is_number(value):
            raise ConfigError(f"reward.{name}={value!r} is not a finite number.")
    named = {"name": correct} if isinstance(correct, str) else correct
    if not isinstance(named, Mapping) or not named.get("name"):
        raise ConfigError(f"reward.correct={correct!r} names no reward: write a name, or {{name: math, ...}}.")
    judge = build_reward(where="reward.correct", **{str(key): value for key, value in named.items()})

    def paid(score: float | Exception | None, length: int) -> float | Exception | None:
        if score is None or isinstance(score, Exception):
            return score
        if exceeded is not None and length >= max_tokens:
            return exceeded
        short, long = (correct_short, correct_long) if score >= success else (wrong_short, wrong_long)
        return cosine(length / max_tokens, short, long)

    def score(
        completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **given: Any
    ) -> list[float | Exception | None]:
        scores = judge.verdicts(completions=completions, completion_ids=completion_ids, **given)
        return [paid(one, len(ids)) for one, ids in zip(scores, completion_ids, strict=True)]

    _declare(score, "cosine_length", judge.columns_needed())
    score.check_rows = judge.check_rows  # type: ignore[attr-defined]
    score.tolerant = all(part.tolerant for part in judge.components)  # type: ignore[attr-defined]
    score.remote = any(asks_elsewhere(part) for part in judge.components)  # type: ignore[attr-defined]
    (first, *others) = (unwrapped(part.function) for part in judge.components)
    if hasattr(first, "golds") and not others:
        score.golds = first.golds  # type: ignore[attr-defined]
    return score


def cosine(progress: float, start: float, end: float) -> float:
    """Half a cosine from `start` at progress 0 to `end` at 1 and beyond."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _overlong(length: int, max_tokens: int, cache: int) -> float:
    over = length - (max_tokens - cache)
    if over <= 0:
        return 0.0
    return -1.0 if length > max_tokens else -over / cache


def _declare(function: Callable[..., Any], name: str, columns: Sequence[str]) -> None:
    """Give a function that takes everything its name and the data columns that it cannot do without."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    needed = [inspect.Parameter(one, keyword) for one in ("completions", "completion_ids", *columns)]
    everything = inspect.Parameter("given", inspect.Parameter.VAR_KEYWORD)
    function.__name__ = name
    function.__signature__ = inspect.Signature([*needed, everything])  # type: ignore[attr-defined]


def _check_count(name: str, value: Any, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"reward.{name}={value!r} must be a whole number of {what}, at least {least}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
