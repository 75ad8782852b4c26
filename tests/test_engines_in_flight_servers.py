"""New weights for rollout servers in the middle of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_contract import decode, identity, sums
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.types import Sampling
from protocol_server import ProtocolServer
from served_models import END, served_model


class Pushes:
    """A weight sync that remembers what it was told to push, and leaves the weights as they are."""

    served_as = None

    def __init__(self) -> None:
        self.versions: list[int] = []

    def push(self, servers: Sequence[Any], policy: Any, version: int) -> None:
        self.versions.append(version)

    def version(self, server: Any) -> int | None:
        return self.versions[-1] if self.versions else 0

    def close(self) -> None: ...


def test_weights_are_sent_while_completions_are_drawn_and_the_rest_is_of_the_new_version() -> None:
    """Both completions are cut off by the server; before the rest of them is asked for, weights of version 3 come."""
    policy, pushes = served_model(), Pushes()
    with ProtocolServer(model=policy) as server:
        engine = ServerEngine(
            SglangDialect(),
            [Server(server.address, Limits(health_every_s=5.0))],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
            sync=pushes,
        )
        engine.start()
        server.faults[:] = ["abort"]
        before = len(server.asked)

        def newer() -> int | None:
            return 3 if not pushes.versions and len(server.asked) == before + 2 else None

        engine.in_flight(newer, recompute=True)
        rollouts = engine.generate(sums(1), 2, Sampling(12, min_new_tokens=12))
        engine.close()
    assert pushes.versions == [3]
    for one in rollouts:
        assert [version for version, _ in one.versions] == [0, 3]
        assert sum(count for _, count in one.versions) == len(one.ids)
