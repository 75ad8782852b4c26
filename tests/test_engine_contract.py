"""The contract over the engines of this process, and over SGLang's protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import Subject, check_sync, decode, identity
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from protocol_server import ProtocolServer
from served_models import END, served_model


@pytest.fixture(scope="module", params=["local", "hf", "sglang protocol"])
def subject(request) -> Iterator[Subject]:
    policy = served_model()
    if request.param == "sglang protocol":
        with ProtocolServer() as server:
            limits = Limits(health_every_s=0.2)
            engine = ServerEngine(
                SglangDialect(),
                [Server(server.address, limits)],
                policy,
                decode=decode,
                stop_ids=(END,),
                identity=identity(policy),
            ).start()
            yield Subject(engine, policy)
            engine.close()
        return
    kind = {"local": LocalEngine, "hf": HfEngine}[request.param]
    yield Subject(kind(policy, decode=decode, stop_ids=(END,)), policy)


def test_a_sync_changes_what_is_drawn(subject: Subject) -> None:
    if not subject.engine.traits.shares_weights:
        pytest.skip("the protocol server takes no weights")
    check_sync(subject)
