"""exact_match: the completion's answer equals the gold answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

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
from grpo_toolbox.rewards.golds import FORMS, answer_golds, from_pattern
from grpo_toolbox.rewards.signatures import declare
from grpo_toolbox.rewards.text import compile_pattern, completion_text, without_stop_tokens

T = TypeVar("T")
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
    return comparison(
        "exact_match",
        column,
        gold_of=partial(_gold, extract=extract),
        answer_in=partial(find_answer, extract=_extraction(extract, pattern)),
        same=partial(same_answer, ignore_case=ignore_case),
        wanted="a number" if extract == "last_number" else "not empty",
        setting=f"reward.extract={extract}",
        write=_writer(extract, pattern),
    )


def comparison(
    name: str,
    column: str,
    gold_of: Callable[[Any], T | None],
    answer_in: Callable[[str], T | None],
    same: Callable[[T, T], bool],
    wanted: str,
    setting: str,
    write: Callable[[str], str | None],
) -> Callable[..., list[float | None]]:
    """A reward that compares the answer in a completion with the one in a data column.

    `gold_of` reads the column: None where there is no answer that could be met; TypeError for a value of a wrong type.
    `answer_in` finds the answer in the completion's text. Messages call a gold answer `wanted`, and what was set
    `setting`. `write` puts an answer into a completion as it should stand there.
    """

    def score(
        completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        golds = [gold_of(gold) for gold in columns[column]]
        texts = [completion_text(completion) for completion in completions]
        found = {text: answer_in(without_stop_tokens(text)) for text in set(texts)}  # a group repeats itself
        answers = [found[text] for text in texts]
        if log_extra is not None:
            log_extra("extracted", [None if answer is None else str(answer) for answer in answers])
        if log_metric is not None and answers:
            log_metric("invalid_format_rate", answers.count(None) / len(answers))
        verdicts = {
            pair: None if pair[1] is None else float(pair[0] is not None and same(pair[0], pair[1]))
            for pair in set(zip(answers, golds, strict=True))
        }
        return [verdicts[pair] for pair in zip(answers, golds, strict=True)]

    declare(score, name, ["completions", column])
    score.check_rows = partial(_check_golds, column, gold_of, wanted, setting)  # type: ignore[attr-defined]
    score.golds = answer_golds(  # type: ignore[attr-defined]
        lambda row: None if gold_of(row[column]) is None else gold_answer(row[column]), write
    )
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


def _writer(extract: str, pattern: str | None) -> Callable[[str], str | None]:
    """Put an answer where `extract` looks for it; of a pattern only where a text that it matches can be guessed."""
    if pattern is None:
        return FORMS[{"last_number": "sentence", "whole": "bare"}.get(extract, extract)]
    find = last_match(compile_pattern(pattern))

    def write(answer: str) -> str | None:
        tried = (from_pattern(pattern, answer), *(form(answer) for form in FORMS.values()))
        return next((text for text in tried if (find(text) or "").strip() == answer), None)

    return write


def _check_golds(
    column: str, gold_of: Callable[[Any], Any], wanted: str, setting: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise DataError for a gold answer of another type, and where no row has one that can be met."""
    met = False
    for row in rows:
        try:
            met = gold_of(row[column]) is not None or met
        except TypeError as error:
            raise DataError(f"prompt {row['prompt']!r:.60}: {error}. Write column '{column}' as text.") from error
    if not met:
        raise DataError(
            f"no row has a gold answer that is {wanted} in column '{column}' (the first is {rows[0][column]!r:.40}), so"
            f" {setting} would score nothing. Set data.columns.answer, or another {setting.partition('=')[0]}."
        )


def _gold(gold: Any, extract: str) -> str | None:
    """The gold answer; None where it can never be met, so that it is left out and counted instead of scored 0."""
    answer = gold_answer(gold)
    return None if answer is not None and extract == "last_number" and as_number(answer) is None else answer
