"""TRL's six rewards under TRL's names and arguments; what they say differs where TRL's is wrong.

They take plain text as well as conversations, and read the last assistant message where TRL reads the first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from grpo_toolbox.rewards.formats import format_reward
from grpo_toolbox.rewards.length import cosine_length, soft_overlong
from grpo_toolbox.rewards.loop import reward_loop
from grpo_toolbox.rewards.maths import math_reward
from grpo_toolbox.rewards.repetition import repetition_penalty
from grpo_toolbox.rewards.text import completion_text

Scored = list[float | None]


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[Any], log_extra: Any = None, **kwargs: Any
) -> Scored:
    """1.0 where the final answer equals `solution` as mathematics, 0.0 where not; None where the gold is unreadable.

    B completions, B gold answers. Unlike TRL's: the last box counts where there are several, and an answer that is
    announced without LaTeX (`The answer is 42`) counts. Needs `grpo-toolbox[math]`.
    """
    score = math_reward(column="solution")
    return _awaited(score(completions=completions, solution=solution, log_extra=log_extra))


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Any = None,
    **kwargs: Any,
) -> Scored:
    """As `accuracy_reward`, of what follows the last delimiter (`</think>` by default); 0.0 where there is none.

    Of several delimiters the first that occurs in the completion counts.
    """
    texts = [_after(completion_text(one), reasoning_delimiters or ["</think>"]) for one in completions]
    answers = ["" if text is None else text for text in texts]
    scores = accuracy_reward(answers, solution, log_extra)
    return [0.0 if text is None else score for text, score in zip(texts, scores, strict=True)]


def think_format_reward(completions: Sequence[Any], prompts: Sequence[Any] | None = None, **kwargs: Any) -> list[float]:
    """1.0 where a completion is `<think>…</think>` with something in it and something behind it, else 0.0.

    Unlike TRL's, empty thoughts and missing answers earn nothing, and a `<think>` that the prompt ends with counts.
    """
    return format_reward(layout="think")(completions=completions, prompts=prompts)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's soft overlong punishment (Yu et al., 2025, eq. 13): 0 down to −1 over the last `soft_punish_cache` tokens.

    For n tokens and limit L = `max_completion_len`, C = `soft_punish_cache`: 0 up to L − C, ((L − C) − n)/C up to L, −1
    above.
    """
    inner = soft_overlong(max_completion_len, soft_punish_cache)

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return inner(completion_ids=completion_ids)

    return soft_overlong_punishment_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """`max_penalty` times the share of n-grams of tokens that have come before; 0 where there is none."""
    inner = repetition_penalty(ngram_size, max_penalty)

    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return inner(completion_ids=completion_ids)

    return repetition_penalty_reward


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., Scored]:
    """`accuracy_reward` scaled by length along half a cosine (Yeo et al., 2025): right answers had better be short.

    From `max_value_correct` for no tokens to `min_value_correct` for `max_len` of them, and from `min_value_wrong` to
    `max_value_wrong` where the answer is wrong. None where the gold answer cannot be read.
    """
    inner = cosine_length(
        max_len,
        correct={"name": "math", "column": "solution"},
        correct_short=max_value_correct,
        correct_long=min_value_correct,
        wrong_short=min_value_wrong,
        wrong_long=max_value_wrong,
    )

    def cosine_scaled_reward(
        completions: Sequence[Any],
        solution: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> Scored:
        scores = inner(completions=completions, solution=solution, completion_ids=completion_ids)
        return [None if isinstance(one, Exception) else one for one in scores]

    return cosine_scaled_reward


def _accuracy_in_training() -> Callable[..., Any]:
    """Make the reward that a trainer of ours asks: it does not wait for one batch before it is asked the next."""
    score = math_reward(column="solution")
    score.__name__ = "accuracy_reward"
    return score


def _think_format_in_training() -> Callable[..., Any]:
    score = format_reward(layout="think")
    score.__name__ = "think_format_reward"
    return score


accuracy_reward.in_training = _accuracy_in_training  # type: ignore[attr-defined]
think_format_reward.in_training = _think_format_in_training  # type: ignore[attr-defined]


def _awaited(graded: Coroutine[Any, Any, list[float | Exception | None]]) -> Scored:
    """Wait for a reward; a row that ended in an error, such as a comparison that took too long, has no score."""
    return [None if isinstance(one, Exception) else one for one in reward_loop().start(graded).result()]


def _after(text: str, delimiters: Sequence[str]) -> str | None:
    found = next((one for one in delimiters if one in text), None)
    return None if found is None else text.rpartition(found)[2]
