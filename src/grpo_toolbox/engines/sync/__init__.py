"""Ways of bringing the policy's weights to rollout servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn


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
        Raises EngineError naming server and stage.
        """
        ...

    def version(self, server: Control) -> int | None:
        """Return the version that this server states; None where it has weights that no push brought."""
        ...

    def close(self) -> None:
        """Release process groups and files."""
        ...
