"""exact_match: the completion's answer equals the gold answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_toolbox.errors import ConfigError, DataError, unknown_option
from grpo_toolbox.rewards.answers import (
    after_marker,
    as_number,
    find_answer,
    gold_answer,
    last_boxed,
    last_match,
    last_number,
    same_answer,
    whole_text,
)
from grpo_toolbox.rewards.signatures import declare
from grpo_toolbox.rewards.text import compile_pattern, completion_text, without_stop_tokens

EXTRACTIONS = {"last_number": last_number, "boxed": last_boxed, "hash": after_marker, "whole": whole_text}


def exact_match(
    extract: str = "last_number", pattern: str | None = None, column: str = "answer", ignore_case: bool = True
) -> Callable[..., list[float | None]]:
    """1.0 where the answer found in the completion equals the gold answer, 0.0 where not, None without gold answer.

    `extract` says where the answer stands: last_number, boxed (last `\\boxed{}`), hash (after the last `####`), regex
    (last match of `pattern`, its first group if it has one) or whole. The gold answer is what follows `####` in data
    column `column`, else the whole column. The function logs the share of completions in which nothing was found as
    metric `invalid_format_rate`, and what was found as extra column `extracted`.
    """
    read = _extraction(extract, pattern)

    def score(
        completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        golds = [_gold(gold, extract) for gold in columns[column]]
        answers = [find_answer(without_stop_tokens(completion_text(text)), read) for text in completions]
        if log_extra is not None:
            log_extra("extracted", answers)
        if log_metric is not None and answers:
            log_metric("invalid_format_rate", answers.count(None) / len(answers))
        return [
            None if gold is None else float(answer is not None and same_answer(answer, gold, ignore_case))
            for answer, gold in zip(answers, golds, strict=True)
        ]

    declare(score, "exact_match", ["completions", column])
    score.check_rows = partial(_check_golds, column, extract)  # type: ignore[attr-defined]
    return score


def _extraction(extract: str, pattern: str | None) -> Callable[[str], str | None]:
    if extract != "regex":
        if extract not in EXTRACTIONS:
            raise unknown_option("reward.extract", extract, [*EXTRACTIONS, "regex"])
        if pattern is not None:
            raise ConfigError(
                f"reward.pattern={pattern!r} has no effect with extract={extract}: set reward.extract=regex."
            )
        return EXTRACTIONS[extract]
    if pattern is None:
        raise ConfigError("reward.extract=regex needs reward.pattern, such as reward.pattern='Answer: (\\S+)'.")
    return last_match(compile_pattern(pattern))


def _check_golds(column: str, extract: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for a gold answer of another type, and where no row has one that can be met."""
    met = False
    for row in rows:
        try:
            met = _gold(row[column], extract) is not None or met
        except TypeError as error:
            raise DataError(f"prompt {row['prompt']!r:.60}: {error}. Write column '{column}' as text.") from error
    if not met:
        wanted = "that is a number" if extract == "last_number" else "that is not empty"
        raise DataError(
            f"no row has a gold answer {wanted} in column '{column}' (the first is {rows[0][column]!r:.40}), so "
            f"reward.extract={extract} would score nothing. Set data.columns.answer, or another reward.extract."
        )


def _gold(gold: Any, extract: str) -> str | None:
    """The gold answer; None where it can never be met, so that it is left out and counted instead of scored 0."""
    answer = gold_answer(gold)
    return None if answer is not None and extract == "last_number" and as_number(answer) is None else answer
