"""The contract over the engines of this process, and over SGLang's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import Subject, check_sync, decode, dropping, dying_at, identity
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync.choose import ChosenSync, SyncSettings
from protocol_server import ProtocolServer
from served_models import END, served_model


@pytest.fixture(scope="module", params=["local", "hf", "sglang protocol"])
def subject(request, tmp_path_factory) -> Iterator[Subject]:
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
                sync=ChosenSync("sglang", SyncSettings("folder"), policy, tmp_path_factory.mktemp("sync")),
            ).start()
            yield Subject(engine, policy, dying=partial(dropping, server))
            engine.close()
        return
    kind = {"local": LocalEngine, "hf": HfEngine}[request.param]
    dying = partial(dying_at, 3, policy.lm_head, "forward")
    yield Subject(kind(policy, decode=decode, stop_ids=(END,)), policy, dying=dying)


def test_a_sync_changes_what_is_drawn_and_no_stale_prefix_is_used(subject: Subject) -> None:
    check_sync(subject)
