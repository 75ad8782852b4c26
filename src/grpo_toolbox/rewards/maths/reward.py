"""math: the completion's final answer is the gold answer, as mathematics."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_toolbox.errors import ConfigError, DataError, unknown_option
from grpo_toolbox.rewards.golds import FORMS, answer_golds
from grpo_toolbox.rewards.maths.final_answer import FALLBACKS, final_answer, gold_formula
from grpo_toolbox.rewards.maths.grading import ask, gold_nodes, grade, read_without_algebra
from grpo_toolbox.rewards.signatures import declare
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens
from grpo_toolbox.rewards.workers import JobFailed, TooMuch, WorkerFailed

log = logging.getLogger(__name__)

CANARY = ((r"\sqrt{8}", r"2\sqrt{2}", "right"), (r"\sqrt{8}", r"3\sqrt{2}", "wrong"), ("(x+1)^2", "x^2+2x+1", "right"))
"""(gold answer, answer, verdict): what must come out before a run begins."""
_MOST_TRIED = 64
"""Gold answers whose formulas are parsed before a run begins."""


def math_reward(
    fallback: str = "announced", column: str = "answer", timeout: float = 5.0
) -> Callable[..., Coroutine[Any, Any, list[float | Exception | None]]]:
    """1.0 where the final answer equals the gold answer of data column `column`, 0.0 where not, None where it is open.

    The answer is the last box's content. `fallback` says what counts without a box: `none`, an `announced` answer
    (`<answer>`, `####`, "the answer is", or alone), or `last_number`, that or the last number in the text. What digits
    and spelling decide is decided at once, the rest by math-verify's parser in worker processes, which are killed after
    `timeout` seconds: that row has timed out, and is neither right nor wrong. None: the gold answer cannot be read
    (counted in `math/unread_golds_total`). Metric `invalid_format_rate` is the share without answer, extra column
    `extracted` holds the answers. ConfigError where math-verify is not installed.
    """
    if fallback not in FALLBACKS:
        raise unknown_option("reward.fallback", fallback, FALLBACKS)
    if not timeout > 0:
        raise ConfigError(f"reward.timeout={timeout} must be above 0: the seconds that one comparison may take.")
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("reward=math needs math-verify, which is not installed: pip install 'grpo-toolbox[math]'.")

    async def score(
        completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **columns: Any
    ) -> list[float | Exception | None]:
        golds = [gold_formula(gold) for gold in columns[column]]
        answers = [final_answer(without_stop_tokens(completion_text(text)), fallback) for text in completions]
        graded = await grade(list(zip(golds, answers, strict=True)), timeout)
        if log_extra is not None:
            log_extra("extracted", answers)
        if log_metric is not None and answers:
            log_metric("invalid_format_rate", answers.count(None) / len(answers))
            log_metric("math/unread_golds_total", graded.count(None))
        return [float(one) if isinstance(one, bool) else one for one in graded]

    declare(score, "math", ["completions", column])
    score.check_rows = partial(_check_rows, column, timeout)  # type: ignore[attr-defined]
    score.golds = answer_golds(lambda row: gold_formula(row[column]), FORMS["boxed"])  # type: ignore[attr-defined]
    score.tolerant = True  # type: ignore[attr-defined] # no answer that a model writes may stop the run
    score.offline = True  # type: ignore[attr-defined]
    return score


def _check_rows(column: str, timeout: float, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError where no gold answer can be read or one is of another type, ConfigError for a bad grader."""
    golds = [_gold(row, column) for row in rows]
    _check_grader(timeout)
    known = dict.fromkeys(gold for gold in golds if gold is not None and gold_nodes(gold))
    formulas = [gold for gold in known if not read_without_algebra(gold)]
    unread = _unread(formulas[:: max(1, len(formulas) // _MOST_TRIED)], timeout)
    left_out = [row for row, gold in zip(rows, golds, strict=True) if gold not in known or gold in unread]
    if len(left_out) == len(rows):
        raise DataError(
            f"no row has a gold answer in column '{column}' that can be read as mathematics or as a short text (the"
            f" first is {rows[0][column]!r:.60}), so reward=math would score nothing. Set data.columns.answer."
        )
    if left_out:
        first = left_out[0]
        log.warning(
            "reward 'math': the gold answers of %d of %d rows cannot be read; they are left out (the first: %.60r).",
            *(len(left_out), len(rows), first[column]),
        )


def _gold(row: Mapping[str, Any], column: str) -> str | None:
    try:
        return gold_formula(row[column])
    except TypeError as error:
        raise DataError(f"prompt {row['prompt']!r:.60}: {error}. Write column '{column}' as text.") from error


def _unread(golds: Sequence[str], timeout: float) -> set[str]:
    """The gold answers among some that the parser cannot read."""
    asked = [(gold, ask([gold], timeout)) for gold in golds]
    return {gold for gold, answer in asked if answer.exception() is not None or answer.result() != "right"}


def _check_grader(timeout: float) -> None:
    asked = [(case, ask([*case[:2]], timeout)) for case in CANARY]
    for (gold, answer, expected), said in asked:
        try:
            verdict = said.result()
        except (TooMuch, JobFailed, WorkerFailed) as error:
            verdict = f"{type(error).__name__}: {error}"
        if verdict != expected:
            raise ConfigError(
                f"reward=math does not work here: {answer} for {gold} came out as '{verdict}' and not {expected}."
                f" Reinstall grpo-toolbox[math], or raise reward.timeout={timeout:g}."
            )
