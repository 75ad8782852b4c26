"""What a row must be before anything is trained on it."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError, DataError, suggest
from grpo_toolbox.types import Message

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One example: `{"prompt": "3+4=", "answer": "7", ...}`."""

RESERVED_COLUMNS = frozenset(
    {
        "prompts",
        "completion",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)
"""Keyword arguments that every reward receives from the toolbox, so no column may bear their names."""

_USUAL_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "messages", "text")


def check_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    source: str = "data",
) -> list[Row]:
    """Rename the two columns to `prompt` and `answer`, and refuse rows that cannot be trained on.

    Every returned row has every column of the data, None where the row had none. Equal prompts stay separate rows. The
    default answer column may be absent altogether (rewards that need it say so); None for it turns its check off.
    Errors name the row, counted from 1 without blank lines, as `source, row n`.
    """
    table = [dict(row) for row in rows]
    if not table:
        raise DataError(f"{source} is empty. It needs at least one row with column '{prompt_column}'.")
    columns = list(dict.fromkeys(name for row in table for name in row))
    _check_prompt_column(columns, prompt_column, source)
    has_answers = _has_answers(columns, answer_column, source)
    taken = {prompt_column, "prompt"} | ({answer_column, "answer"} if has_answers else set())
    kept = [name for name in columns if name not in taken]
    _check_reserved(kept, source)
    for name in set(columns) & taken - {prompt_column, answer_column}:
        log.warning("%s: column '%s' gives way to data.columns.%s and reaches no reward.", source, name, name)
    checked = []
    for number, row in enumerate(table, start=1):
        where = f"{source}, row {number}"
        answer = {"answer": _checked_answer(row, answer_column, where)} if has_answers else {}
        others = {name: row.get(name) for name in kept}
        checked.append({"prompt": _checked_prompt(row.get(prompt_column), where), **answer, **others})
    return checked


def split_rows(rows: Sequence[Row], eval_size: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Hold out `eval_size` rows drawn by `seed`; both parts keep the order of the data. Returns (train, eval)."""
    if not 0 <= eval_size < len(rows):
        raise ConfigError(
            f"data.eval_size={eval_size} cannot be held out of {len(rows)} rows: 0 to {len(rows) - 1} can. "
            "Set a smaller data.eval_size, or name other data with data.eval_path."
        )
    held_out = set(random.Random(f"held out {seed}").sample(range(len(rows)), eval_size))
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [rows[index] for index in sorted(held_out)]


def _check_prompt_column(columns: Sequence[str], prompt_column: str, source: str) -> None:
    if prompt_column in columns:
        return
    usual = [name for name in _USUAL_PROMPT_COLUMNS if name in columns]
    near = suggest(prompt_column, columns)
    advice = f" Set data.columns.prompt={usual[0]}" if usual and not near else f"{near} Set data.columns.prompt."
    raise DataError(f"{source} needs column '{prompt_column}', found: {', '.join(columns)}.{advice}")


def _has_answers(columns: Sequence[str], answer_column: str | None, source: str) -> bool:
    if answer_column is None or answer_column in columns:
        return answer_column is not None
    if answer_column == "answer":
        return False
    raise DataError(
        f"{source} has no column '{answer_column}' (data.columns.answer), found: {', '.join(columns)}."
        f"{suggest(answer_column, columns)} Set data.columns.answer=null if no reward compares answers."
    )


def _checked_answer(row: Row, column: str | None, where: str) -> Any:
    answer = row.get(str(column))
    missing = answer is None or (isinstance(answer, float) and math.isnan(answer))  # as data frames write it
    if missing or (isinstance(answer, str) and not answer.strip()):
        raise DataError(
            f"{where}: no '{column}'. Add it or remove the row; set data.columns.answer=null if no reward compares "
            "answers."
        )
    return answer


def _check_reserved(columns: Sequence[str], source: str) -> None:
    clashes = [name for name in columns if name in RESERVED_COLUMNS]
    if clashes:
        raise DataError(
            f"{source} has a column with a reserved name: {', '.join(clashes)}. Rewards receive something else under "
            f"the names {', '.join(sorted(RESERVED_COLUMNS))}. Rename the column in the data."
        )


def _checked_prompt(prompt: object, where: str) -> str | list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty or blank. Fill it in or remove the row.")
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise DataError(
            f"{where}: a prompt is text or a list of messages {{'role': ..., 'content': ...}}, found {prompt!r:.80}."
        )
    messages = [_checked_message(message, where) for message in prompt]
    if not any(_says_something(message) for message in messages if message["role"] != "system"):
        raise DataError(f"{where}: the prompt is empty or blank: no message but the system's has content. Fill it in.")
    return messages


def _checked_message(message: Message, where: str) -> Message:
    """Return the message without its None entries, which Arrow adds where messages have different keys."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role.strip():
        raise DataError(
            f"{where}: a message has no role: {message!r:.80}. Set 'role' to user, assistant, system or tool."
        )
    if content is None and not message.get("tool_calls"):
        raise DataError(
            f"{where}: a message of role '{role}' has no content (null), which a chat template would print "
            "as 'None'. Fill it in or remove the row."
        )
    if not isinstance(content, str | list | None):
        raise DataError(
            f"{where}: the content of a message is text or a list of parts {{'type': 'text', 'text': ...}}, found "
            f"{content!r:.80}, which a chat template would print as it stands. Write it as text."
        )
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _says_something(message: Message) -> bool:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [_text_of(part) for part in content or ()]
    return any(text.strip() for text in texts) or bool(message.get("tool_calls"))


def _text_of(part: object) -> str:
    """Return the text of a message's part; what is no text part (an image) says something, too."""
    return str(part.get("text")) if isinstance(part, dict) and part.get("type") == "text" else repr(part)
