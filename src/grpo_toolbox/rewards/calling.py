"""Calling reward functions: what they are passed, several in flight at once, and what becomes of failures.

Every function is called in the caller's thread; coroutines that come back run together on an event loop in a thread
of its own, so this works inside a running loop, too, and their waiting overlaps with the functions that compute.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards.signatures import CONTRACT, is_async
from grpo_toolbox.rewards.values import Values, read_values

if TYPE_CHECKING:
    from grpo_toolbox.rewards.contract import Component, TrainerState

PROGRAMMING_ERRORS = (LookupError, TypeError, NameError, AttributeError, ImportError, NotImplementedError, ConfigError)
"""Raised on every row, these are a fault of the function and no outage: they stop the run in any case."""

_PER_ROW = ("prompts", "completions", "completion_ids", "environments")


@dataclass(frozen=True)
class Rows:
    """What reward functions are called with: lists of one entry per completion."""

    inputs: Mapping[str, Sequence[Any]]
    """prompts, completions, completion_ids and the data columns, as far as there are any."""
    size: int
    trainer_state: TrainerState | None = None
    ids: tuple[tuple[int, int], ...] = ()
    """(prompt id, index of the completion in its group) per row, where known."""
    first: int = 0
    """Index of the first row in the call that these rows were taken from."""

    def row(self, index: int) -> Rows:
        """Row `index` alone."""
        inputs = {name: [values[index]] for name, values in self.inputs.items()}
        return Rows(inputs, 1, self.trainer_state, self.ids[index : index + 1], self.first + index)

    def place(self, index: int) -> str:
        """How messages name row `index`."""
        if not self.ids:
            return f"completion {self.first + index}"
        prompt, completion = self.ids[index]
        return f"prompt {prompt}, completion {completion}"

    @property
    def columns(self) -> list[str]:
        """The names of the data columns."""
        return sorted(name for name in self.inputs if name not in CONTRACT)


@dataclass(frozen=True)
class Outcome:
    """What one component said about all rows."""

    scores: Sequence[float | None]
    extras: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, Sequence[float]]
    """Every value logged under a name."""
    errors: int
    """Rows on which the function failed and which were left out for it."""
    seconds: float


class Log:
    """Collects what a function says beside its rewards."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a column of one value per completion."""
        values = list(values)
        if len(values) != self.size:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.size} completions")
        self.extras[column] = values

    def metric(self, name: str, value: float) -> None:
        """Keep a scalar; several under one name are averaged."""
        self.metrics.setdefault(name, []).append(float(value))


class Call:
    """One function at work on some rows: its answer as a future, what it logged, how long it took."""

    def __init__(self, component: Component, rows: Rows, loop: asyncio.AbstractEventLoop) -> None:
        self.rows = rows
        self.log = Log(rows.size)
        self.future: Future[Any] = Future()
        available = {
            **{name: list(values) for name, values in rows.inputs.items()},  # copies: no function sees another's edits
            "trainer_state": rows.trainer_state,
            "log_extra": self.log.extra,
            "log_metric": self.log.metric,
        }
        arguments = component.signature.select(available)
        began = time.perf_counter()
        try:
            answer = component.function(**arguments)
        except Exception as error:  # a user's function may raise anything
            self.future.set_exception(error)
        except SystemExit as error:  # as code under test may try to: no reward ends the run like this
            self.future.set_exception(_ended(error))
        else:
            if inspect.isawaitable(answer):
                self.future = asyncio.run_coroutine_threadsafe(self._await(answer, began), loop)
            else:
                self.future.set_result(answer)
        self.seconds = time.perf_counter() - began

    async def _await(self, answer: Awaitable[Any], began: float) -> Any:
        try:
            return await answer
        except (SystemExit, asyncio.CancelledError) as error:
            raise _ended(error) from error
        finally:
            self.seconds = time.perf_counter() - began


def call_components(components: Sequence[Component], rows: Rows) -> list[Outcome]:
    """Call every component on `rows`, coroutines all at once; RewardError where one fails and is not to be skipped."""
    for component in components:
        missing = [name for name in component.signature.required if name not in rows.inputs and name in _PER_ROW]
        missing += [name for name in component.signature.columns if name not in rows.inputs]
        if missing:
            raise RewardError(
                f"reward {component.name!r} needs {', '.join(missing)}, which it was not passed; there are:"
                f" {', '.join(sorted(rows.inputs)) or 'none'}."
            )
    with _event_loop() as loop:
        # coroutine functions first, so that they wait while the others compute
        order = sorted(range(len(components)), key=lambda index: not is_async(components[index].function))
        calls = {index: Call(components[index], rows, loop) for index in order}
        return [_settle(component, rows, calls[index], loop) for index, component in enumerate(components)]


def _settle(component: Component, rows: Rows, call: Call, loop: asyncio.AbstractEventLoop) -> Outcome:
    """Wait for a call and read its answer; where it raised, find or leave out the rows that made it raise."""
    error = call.future.exception()
    if error is None:
        values = read_values(call.future.result(), rows.size, component.name, rows.place)
        _check_failures(component, rows, values.errors)
        extras = {**values.extras, **call.log.extras}
        return Outcome(values.scores, extras, call.log.metrics, len(values.errors), call.seconds)
    if not isinstance(error, Exception):  # KeyboardInterrupt is not the function's failure
        raise error
    if rows.size == 1:
        _check_failures(component, rows, {0: error})
        return Outcome([None], {}, {}, 1, call.seconds)
    return _row_by_row(component, rows, error, loop, call.seconds)


def _row_by_row(
    component: Component, rows: Rows, error: Exception, loop: asyncio.AbstractEventLoop, seconds: float
) -> Outcome:
    """Call a function that raised on all rows again on each row alone."""
    merged = Log(rows.size)
    values = Values([None] * rows.size, merged.extras, {})
    for index, call in enumerate(_calls_per_row(component, rows, loop)):
        failure = call.future.exception()
        if isinstance(failure, Exception):
            values.errors[index] = failure
            if component.on_error == "stop":
                break
            continue
        one = read_values(call.future.result(), 1, component.name, call.rows.place)
        values.scores[index] = one.scores[0]
        if one.errors:
            values.errors[index] = one.errors[0]
        for name, column in {**one.extras, **call.log.extras}.items():
            merged.extras.setdefault(name, [None] * rows.size)[index] = column[0]
        for name, logged in call.log.metrics.items():
            merged.metrics.setdefault(name, []).extend(logged)
        seconds += call.seconds
    if component.on_error == "stop" and not values.errors:
        raise _failure(
            component, rows, f"{rows.size} completions together, and on none of them alone", error
        ) from error
    _check_failures(component, rows, values.errors)
    return Outcome(values.scores, merged.extras, merged.metrics, len(values.errors), seconds)


def _calls_per_row(component: Component, rows: Rows, loop: asyncio.AbstractEventLoop) -> Iterator[Call]:
    """A call per row: coroutines all in flight at once, functions one after the other as they are asked for."""
    calls = (Call(component, rows.row(index), loop) for index in range(rows.size))
    return iter(list(calls)) if is_async(component.function) else calls


def _check_failures(component: Component, rows: Rows, errors: Mapping[int, Exception]) -> None:
    """Raise RewardError for failures that must stop the run."""
    everywhere = len(errors) == rows.size and all(isinstance(error, PROGRAMMING_ERRORS) for error in errors.values())
    if errors and (component.on_error == "stop" or everywhere):
        index = min(errors)
        raise _failure(component, rows, rows.place(index), errors[index]) from errors[index]


def _ended(error: BaseException) -> RuntimeError:
    return RuntimeError(f"it ended with {type(error).__name__} instead of returning")


def _failure(component: Component, rows: Rows, where: str, error: Exception) -> RewardError:
    advice = (
        "It is the same on every row, so reward.on_error=skip does not apply: correct the function."
        if component.on_error == "skip"
        else "Correct the function, or set reward.on_error=skip to leave out and count the rows on which it raises."
    )
    return RewardError(
        f"reward {component.name!r} failed on {where} ({type(error).__name__}: {error});"
        f" columns: {', '.join(rows.columns) or 'none'}. {advice}"
    )


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own until the block is left; what is still in flight is cancelled."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rewards", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
