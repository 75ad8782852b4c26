"""Tasks that need no file: `builtin:NAME`, with options as in `builtin:additions?max_sum=4`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from grpo_toolbox.data.extras import import_extra
from grpo_toolbox.data.rows import Row, split_rows
from grpo_toolbox.errors import ConfigError, DataError, unknown_option

PREFIX = "builtin:"
BUILTIN = ("additions", "word_problems")

_ROUNDS = 20  # a task that repeats itself this often has no more to say


def additions(*, max_sum: int = 9, digits: int = 1) -> list[Row]:
    """Return all additions `a+b=` of numbers of at most `digits` digits whose sum is at most `max_sum`, in order.

    The default is the 55 whose sum has one digit.
    """
    for name, value, least in (("max_sum", max_sum, 0), ("digits", digits, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{PREFIX}additions: {name}={value!r} must be a whole number of at least {least}.")
    top = min(10**digits - 1, max_sum)
    pairs = [(a, b) for a in range(top + 1) for b in range(min(top, max_sum - a) + 1)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def word_problems(
    *,
    size: int = 1000,
    seed: int = 0,
    task: str = "leg_counting",
    held_out: bool = False,
    exclude: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Return `size` different questions of a reasoning-gym task (`leg_counting`, `chain_sum`, `gsm_symbolic`, ...).

    `options` go to the task (`{"min_terms": 2}`). `held_out` draws from other random numbers than training does;
    `exclude` leaves out the questions named, so that no held-out question is a training question. Columns: prompt,
    answer, task, and difficulty where the task states one.
    """
    part = "held out" if held_out else "train"
    # The gym seeds question i with seed + i: neighbouring seeds would share all but one question.
    first = random.Random(f"{part} {seed}").randrange(2**30)
    seen = set(exclude)
    rows: list[Row] = []
    for item in _gym_items(task, size, first, dict(options or {})):
        if len(rows) == size:
            break
        if item["question"] in seen:
            continue
        seen.add(item["question"])
        rows.append(_gym_row(task, item))
    if len(rows) < size:
        raise DataError(
            f"reasoning-gym task '{task}' has only {len(rows)} different questions to give, not {size}. "
            "Set smaller data.size and data.eval_size, or widen the task's options."
        )
    return rows


def builtin_rows(
    path: str, *, size: int | None = None, eval_size: int = 0, seed: int = 0, task: str | None = None
) -> tuple[list[Row], list[Row]]:
    """Make the rows of `builtin:NAME?option=value` and `eval_size` held-out rows that share no prompt with them.

    Held-out word problems do not depend on `size`, so runs with more training data are tested on the same questions.
    """
    name, _, query = path.removeprefix(PREFIX).partition("?")
    options = {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if name == "additions":
        if task is not None:
            raise ConfigError(f"data.task={task!r} is not for {PREFIX}additions. Set data.task=null.")
        _check_options(options, {"max_sum", "digits"})
        train, held_out = split_rows(additions(**options), eval_size, seed)
        return train if size is None or size >= len(train) else split_rows(train, size, seed)[1], held_out
    if name == "word_problems":
        make = partial(word_problems, seed=seed, task=task or "leg_counting", options=options)
        held_out = make(size=eval_size, held_out=True)
        train = make(size=1000 if size is None else size, exclude=[row["prompt"] for row in held_out])
        return train, held_out
    raise unknown_option("data.path", path, [PREFIX + known for known in BUILTIN])


def _literal(text: str) -> Any:
    """Read a number, true, false or null as what it is, and anything else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _check_options(options: Iterable[str], allowed: set[str]) -> None:
    for name in options:
        if name not in allowed:
            raise unknown_option("an option of data.path", name, allowed)


def _gym_items(task: str, size: int, first: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    gym = import_extra("reasoning_gym", extra="word-problems", needed_for=f"data.path={PREFIX}word_problems")
    tasks = gym.factory.DATASETS
    if task not in tasks:
        raise unknown_option("data.task", task, tasks)
    _check_options(options, set(tasks[task][1].__dataclass_fields__) - {"seed", "size"})
    for number in range(_ROUNDS if size else 0):
        try:
            yield from gym.create_dataset(task, size=size, seed=first + number * size, **options)
        except (AssertionError, TypeError, ValueError) as error:  # how the gym refuses option values
            raise ConfigError(f"reasoning-gym task '{task}' refuses {options}: {error}.") from error


def _gym_row(task: str, item: dict[str, Any]) -> Row:
    if not isinstance(item["answer"], str):
        raise ConfigError(f"data.task={task!r} has no single right answer to compare with. Choose another task.")
    row = {"prompt": item["question"], "answer": item["answer"], "task": task}
    difficulty = item["metadata"].get("difficulty")
    return row if difficulty is None else {**row, "difficulty": difficulty}
