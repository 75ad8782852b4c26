"""Ways of bringing the policy's weights to rollout servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn

from grpo_toolbox.errors import EngineError


class Control(Protocol):
    """One rollout server as a weight sync sees it; calls block, within the server's time limits.

    A call raises EngineError where the server does not answer, or refuses; `status` says with what.
    """

    @property
    def address(self) -> str:
        """Where it is, for messages."""
        ...

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON that answers GET `path`, None for an empty answer; an outage is tried again for a while."""
        ...

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return the JSON that answers POST `path`, None for an empty answer; sent once, for an update counts."""
        ...


class WeightSync(Protocol):
    """One way of sending weights, and of asking a server whose it has."""

    @property
    def served_as(self) -> str | None:
        """The model name that completions must ask for (an adapter's); None for the server's own."""
        ...

    def push(self, servers: Sequence[Control], policy: nn.Module, version: int) -> None:
        """Bring the policy's present weights to these servers, which then answer with them and state `version`.

        Nothing computed with former weights (a prefix cache) is used afterwards. It is called with all servers of a
        run after an update, and with a single one that has come back without the weights; requests may be in flight.
        Raises PushError, an EngineError, for the servers that did not take them.
        """
        ...

    def version(self, server: Control) -> int | None:
        """Return the version that this server states; None where it has weights that no push of this run brought."""
        ...

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version of weights that a server states of tokens asked for under version `asked`.

        None for weights that no push of this run brought, or not wholly.
        """
        ...

    def close(self) -> None:
        """Release process groups and files."""
        ...


UNTOUCHED = "default"
"""What servers of both kinds state of the weights that they were started with."""
InFlight = Literal["drain", "recompute", "keep"]
"""What a push does with completions that are under way: wait for their end; go on with the new weights and a cache that
is computed again; or go on with the new weights and the cache of the former ones."""


@dataclass(frozen=True)
class Stamp:
    """How a server's weights version says that they are this run's: `<run>-v<number>`."""

    run: str

    def of(self, version: int) -> str:
        """Return what a server states while it has weights `version`."""
        return f"{self.run}-v{version}"

    @property
    def unfinished(self) -> str:
        """What a server states while an update is under way, and ever after if it broke off."""
        return f"{self.run}-unfinished"

    def version(self, stated: str) -> int | None:
        """Return the version that a stamp says; None for another run's, or none."""
        number = stated.removeprefix(f"{self.run}-v")
        return int(number) if number != stated and number.isdigit() else None

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version of what a server states; what it was started with is the run's version 0, while asked."""
        return 0 if stated == UNTOUCHED and asked == 0 else self.version(stated)


@dataclass(frozen=True)
class Manner:
    """How a run goes about its pushes."""

    stamp: Stamp
    in_flight: InFlight = "drain"
    dtype: torch.dtype | None = None
    """Of what is sent; None is that of the policy's weights."""
    timeout_s: float = 300.0
    """Seconds that one stage of a push may take."""


class Procedure(Protocol):
    """How one kind of server changes its weights; a module of this folder is one."""

    def stated(self, server: Control) -> str:
        """Return the weights version that the server states."""
        ...

    def state(self, server: Control, version: str) -> None:
        """Have the server state a version."""
        ...

    def pause(self, server: Control, in_flight: InFlight | Literal["abort"], timeout_s: float) -> None:
        """Stop generating; requests that come now wait."""
        ...

    def resume(self, server: Control) -> None:
        """Generate again."""
        ...

    def flush(self, server: Control, in_flight: InFlight, timeout_s: float) -> None:
        """Make the server forget keys and values of former weights; raises EngineError if it does not."""
        ...


FAILURES = (EngineError, RuntimeError, OSError)
"""What a push may fail with; RuntimeError is what torch's process groups raise."""


class PushError(EngineError):
    """Weights that did not reach some servers; the others have them."""

    def __init__(self, version: int, failed: dict[str, str]) -> None:
        told = "; ".join(f"{address}: {reason}" for address, reason in failed.items())
        super().__init__(f"weights {version} were not taken by {told}")
        self.failed = failed
        """What went wrong, by the server's address."""


def push_each(servers: Sequence[Control], version: int, deliver: Callable[[Control], None]) -> None:
    """Deliver to all servers at a time; raises PushError after the last for those that failed."""

    def attempt(server: Control) -> str | None:
        try:
            deliver(server)
        except FAILURES as error:
            return str(error).strip().partition("\n")[0]
        return None

    with ThreadPoolExecutor(max_workers=max(len(servers), 1)) as pool:
        reasons = list(pool.map(attempt, servers))
    failed = {server.address: reason for server, reason in zip(servers, reasons, strict=True) if reason is not None}
    if failed:
        raise PushError(version, failed)


@contextmanager
def updating(procedure: Procedure, server: Control, manner: Manner, version: int) -> Iterator[None]:
    """Take new weights inside the block; afterwards the server states `version` and generates again.

    If the block fails, what is under way is aborted and the version stated is none, whatever became of the weights.
    """
    procedure.pause(server, manner.in_flight, manner.timeout_s)
    done = False
    try:
        procedure.state(server, manner.stamp.unfinished)
        yield
        procedure.flush(server, manner.in_flight, manner.timeout_s)
        procedure.state(server, manner.stamp.of(version))
        done = True
    finally:  # also when the trainer is told to stop, or its server would wait for ever
        if not done:
            _leave_usable(procedure, server, manner)
    procedure.resume(server)


def _leave_usable(procedure: Procedure, server: Control, manner: Manner) -> None:
    for step in (partial(procedure.pause, server, "abort", manner.timeout_s), partial(procedure.resume, server)):
        try:
            step()
        except EngineError:  # it may be the reason why the update failed: that error says more
            continue
