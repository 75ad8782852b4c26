"""Calling reward functions: what they are passed, several in flight at once, and what becomes of failures.

Coroutine functions are called once per group, as soon as it is there, and run on the loop of loop.py while the engine
goes on; plain functions are called once on all rows, at the end, in the caller's thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards.limits import late, within
from grpo_toolbox.rewards.loop import GRACE, Flight
from grpo_toolbox.rewards.outcomes import Outcome, joined
from grpo_toolbox.rewards.signatures import CONTRACT
from grpo_toolbox.rewards.values import read_values

if TYPE_CHECKING:
    from grpo_toolbox.rewards.budget import ErrorBudget
    from grpo_toolbox.rewards.component import Component
    from grpo_toolbox.rewards.weights import TrainerState

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

    def __init__(self, component: Component, rows: Rows, flight: Flight) -> None:
        self.rows = rows
        self.log = Log(rows.size)
        self._limit = component.timeout_s
        self._flight = flight
        self._future: Future[Any] = Future()
        self._loop = None
        available = {
            **{name: list(values) for name, values in rows.inputs.items()},  # copies: no function sees another's edits
            "trainer_state": rows.trainer_state,
            "log_extra": self.log.extra,
            "log_metric": self.log.metric,
        }
        call = functools.partial(component.function, **component.signature.select(available))
        self._began = time.perf_counter()
        self.seconds = 0.0
        if component.waits:
            self._future, self._loop = flight.start(self._run(call))
        else:
            self._call_here(component, call)

    def _call_here(self, component: Component, call: Callable[[], Any]) -> None:
        try:
            answer = within(self._limit, call)
        except Exception as error:  # a user's function may raise anything
            self._future.set_exception(error)
        except (
            SystemExit,
            asyncio.CancelledError,
        ) as error:  # as code under test may try to: no reward ends the run so
            self._future.set_exception(_ended(error))
        else:
            component.nature.waits = inspect.isawaitable(answer)
            if not component.nature.waits:
                self._future.set_result(answer)
        self.seconds = time.perf_counter() - self._began
        if not self._future.done():
            self._future, self._loop = self._flight.start(self._run(lambda: answer))

    def failure(self) -> BaseException | None:
        """Wait for the answer and return what the function raised, None where it did not."""
        if self._limit is not None and self._loop is not None:
            left = self._began + self._limit - time.perf_counter()
            patience = max(left, 0.0) + GRACE if self._loop.usable else 0.0
            if not wait([self._future], patience).done:  # a coroutine that blocks its loop cannot be cut off there
                self._loop.give_up()
                return late(self._limit)
        return self._future.exception()

    def answer(self) -> Any:
        """Return what the function returned."""
        return self._future.result()

    async def _run(self, call: Callable[[], Any]) -> Any:
        """Call the function and wait for its answer, on the loop."""
        began = time.perf_counter()
        task = self._flight.task(_without_exit(call))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._limit)
            if not done:
                raise late(self._limit or 0.0)
            if task.cancelled():
                raise _ended(asyncio.CancelledError())
            return task.result()
        finally:
            task.cancel()
            self.seconds = time.perf_counter() - began


class Batch:
    """The calls of all components on one batch of rows, which arrive in parts and in any order."""

    def __init__(self, components: Sequence[Component], budget: ErrorBudget | None = None) -> None:
        self._components = components
        self._budget = budget
        self._flight = Flight()
        self._early: dict[int, dict[int, Call]] = {
            index: {} for index, component in enumerate(components) if component.waits
        }
        """By component, by first row: calls of functions that return coroutines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still running."""
        self._flight.close()

    @property
    def waits(self) -> bool:
        """Whether a function is to be called as rows come in."""
        return bool(self._early)

    def add(self, rows: Rows) -> None:
        """Start the functions that wait, on rows that have just come in."""
        for index, calls in self._early.items():
            component = self._components[index]
            holes = {name: [None] * rows.size for name in component.signature.columns if name not in rows.inputs}
            given = replace(rows, inputs={**rows.inputs, **holes})
            calls[rows.first] = Call(component, given, self._flight)

    def outcomes(self, rows: Rows) -> list[Outcome]:
        """Call the plain functions on all rows, wait for the others, and read every component's answers.

        RewardError where a component fails and its failures are not, or no longer, to be skipped.
        """
        check_given(self._components, rows)
        calls = {
            index: [call for _, call in sorted(self._early[index].items())]
            if index in self._early
            else [Call(component, rows, self._flight)]
            for index, component in enumerate(self._components)
        }
        outcomes = [
            joined([*self._settled(component, calls[index])]) for index, component in enumerate(self._components)
        ]
        for component, outcome in zip(self._components, outcomes, strict=True):
            _check_failures(component, rows, outcome.failures)
            if self._budget is not None:
                self._budget.record(component, outcome, rows.place)
        return outcomes

    def _settled(self, component: Component, calls: Iterable[Call]) -> Iterator[Outcome]:
        for call in calls:
            outcome = self._settle(component, call)
            if not component.tolerant:
                _check_failures(component, call.rows, outcome.failures)
            yield outcome

    def _settle(self, component: Component, call: Call) -> Outcome:
        """Wait for a call and read its answer; where it raised, find the rows that made it raise."""
        rows, error = call.rows, call.failure()
        if error is None:
            values = read_values(call.answer(), rows.size, component.name, rows.place)
            extras = {**values.extras, **call.log.extras}
            return Outcome(values.scores, values.errors, extras, call.log.metrics, call.seconds, call.seconds)
        if not isinstance(error, Exception):  # KeyboardInterrupt is not the function's failure
            raise error
        if rows.size == 1:
            return Outcome([None], {0: error}, seconds=call.seconds, slowest=call.seconds)
        return self._row_by_row(component, rows, error, call.seconds)

    def _row_by_row(self, component: Component, rows: Rows, error: Exception, seconds: float) -> Outcome:
        """Call a function that raised on several rows again on each row alone."""
        parts, failures = [], {}
        for index, call in enumerate(self._calls_per_row(component, rows)):
            parts.append(self._settle(component, call))
            if parts[-1].failures:
                failures[index] = parts[-1].failures[0]
                if not component.tolerant:
                    raise _failure(component, rows, rows.place(index), failures[index]) from failures[index]
                if self._budget is not None:
                    self._budget.check(component, failures, index + 1, rows.place)
        if not component.tolerant:
            where = f"{rows.size} completions together, and on none of them alone"
            raise _failure(component, rows, where, error) from error
        whole = joined(parts)
        return replace(whole, seconds=whole.seconds + seconds, slowest=max(whole.slowest, seconds))

    def _calls_per_row(self, component: Component, rows: Rows) -> Iterator[Call]:
        """A call per row: coroutines all in flight at once, functions one after the other as they are asked for."""
        calls = (Call(component, rows.row(index), self._flight) for index in range(rows.size))
        return iter(list(calls)) if component.waits else calls


def check_given(components: Sequence[Component], rows: Rows) -> None:
    """Raise RewardError where a function needs something that `rows` have not."""
    for component in components:
        missing = [name for name in component.signature.required if name not in rows.inputs and name in _PER_ROW]
        missing += [name for name in component.signature.columns if name not in rows.inputs]
        if missing:
            raise RewardError(
                f"reward {component.name!r} needs {', '.join(missing)}, which it was not passed; there are:"
                f" {', '.join(sorted(rows.inputs)) or 'none'}."
            )


def _check_failures(component: Component, rows: Rows, failures: Mapping[int, Exception]) -> None:
    """Raise RewardError for failures that must stop the run."""
    everywhere = len(failures) == rows.size and all(
        isinstance(error, PROGRAMMING_ERRORS) for error in failures.values()
    )
    if failures and (everywhere or not component.tolerant):
        index = min(failures)
        raise _failure(component, rows, rows.place(index), failures[index]) from failures[index]


async def _without_exit(call: Callable[[], Any]) -> Any:
    try:
        answer = call()
        return await answer if inspect.isawaitable(answer) else answer
    except SystemExit as error:  # would end the loop's thread
        raise _ended(error) from error


def _ended(error: BaseException) -> RuntimeError:
    return RuntimeError(f"it ended with {type(error).__name__} instead of returning")


def _failure(component: Component, rows: Rows, where: str, error: Exception) -> RewardError:
    advice = (
        "It is the same on every row, so reward.on_error=skip does not apply: correct the function."
        if component.tolerant
        else "Correct the function, or set reward.on_error=skip to leave out and count the rows on which it raises."
    )
    if isinstance(error, TimeoutError) and component.timeout_s is not None:
        advice = (
            f"Raise reward.timeout_s={component.timeout_s:g}, or set reward.on_error=skip to leave out and count them."
        )
    return RewardError(
        f"reward {component.name!r} failed on {where} ({type(error).__name__}: {error});"
        f" columns: {', '.join(rows.columns) or 'none'}. {advice}"
    )
