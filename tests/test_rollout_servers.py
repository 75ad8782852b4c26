"""Rollout servers that fail: nothing is lost, nothing is counted twice, and who cannot be trusted is not used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine_contract import Subject, assert_trainers, changed, decode, drawn, identity, sums
from grpo_toolbox.engines.dialect import Ask
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.sampling import row_seeds
from grpo_toolbox.engines.server import Limits, Server, addresses
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync import Control, Stamp
from grpo_toolbox.engines.vllm import VllmDialect
from grpo_toolbox.errors import ConfigError, EngineError
from grpo_toolbox.types import Rollout, Sampling
from protocol_server import ProtocolServer, wait_until
from served_models import END, served_model

POLICY = served_model()
QUICK = {"health_every_s": 0.1, "start_timeout_s": 20.0, "outage_timeout_s": 20.0}


@contextmanager
def engine_over(
    *urls: str, dialect: Any = None, sync: Any = None, policy: Any = POLICY, positions: int = 100, **limits: Any
) -> Iterator[Any]:
    servers = [Server(url, Limits(**(QUICK | limits))) for url in urls]
    made = ServerEngine(
        dialect or SglangDialect(),
        servers,
        policy,
        decode=decode,
        stop_ids=(END,),
        identity=identity(policy, positions),
        sync=sync,
    )
    try:
        yield made.start()
    finally:
        made.close()


def refused(message: str, *urls: str, **options: Any) -> None:
    """The engine does not start, and says why."""
    with pytest.raises(EngineError, match=message), engine_over(*urls, **options):
        pass


def generate(engine: ServerEngine, count: int = 12, tokens: int = 6, then: Callable[[], None] | None = None) -> Any:
    """Generate, check that each row was heard of once, and return the rollouts; `then` runs after the first."""
    heard: list[int] = []

    def finished(row: int, one: Rollout) -> None:
        heard.append(row)
        if then is not None and len(heard) == 1:
            then()

    rollouts = engine.generate(sums(count), 2, Sampling(tokens), finished)
    assert sorted(heard) == list(range(2 * count))
    assert_trainers(Subject(engine, POLICY), rollouts)
    return rollouts


# ---- errors of servers that are up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "garbage", "drop", "hang"])
def test_a_fault_now_and_then_costs_no_completion(fault):
    with ProtocolServer() as server, engine_over(server.address, request_timeout_s=3.0) as engine:
        undisturbed = drawn(generate(engine))
        server.asked.clear()
        server.faults += [fault, fault]
        assert drawn(generate(engine)) == undisturbed
        assert not server.faults


def test_errors_without_end_stop_the_run_and_name_prompt_and_cause():
    with ProtocolServer() as server, engine_over(server.address, retries=2) as engine:
        server.always = "500"
        with pytest.raises(EngineError, match=r"prompt \d+ failed 3 times.*retries=2.*HTTP 500.*illegal memory access"):
            generate(engine, count=2)
        server.always = None
        generate(engine, count=2)


@pytest.mark.parametrize("fault", ["nan", "null"])
def test_a_log_prob_that_is_no_number_is_never_handed_out(fault):
    with ProtocolServer() as server, engine_over(server.address) as engine:
        server.faults += [fault]
        with pytest.raises(EngineError, match="log-prob that is not finite"):
            generate(engine)


def test_a_request_that_is_refused_is_not_repeated():
    with ProtocolServer() as server, engine_over(server.address) as engine:
        server.asked.clear()
        with pytest.raises(EngineError, match=r"prompt 0: .*HTTP 400: .*min_p='x' is not of type"):
            engine.generate(sums(1), 1, Sampling(8, min_p="x"))  # type: ignore[arg-type]
        assert server.asked == []


def test_an_error_that_nobody_expected_ends_the_generation_too():
    with ProtocolServer() as server, engine_over(server.address) as engine, pytest.raises(TypeError):
        engine.generate(sums(1), 1, Sampling("8"))  # type: ignore[arg-type]


def test_what_a_server_broke_off_is_gone_on_with():
    """A pause that aborts what is under way: the first half is kept, and the second drawn behind it."""
    with ProtocolServer() as server, engine_over(server.address) as engine:
        server.faults += ["abort"] * 3
        rollouts = generate(engine, tokens=9)
        assert {len(one.ids) for one in rollouts if one.finish_reason == "length"} == {9}
        continued = [one for one in server.asked if one.sampling.max_new_tokens < 8]
        assert continued
        assert all(len(one.ids) > 4 for one in continued)


# ---- the completions of a group --------------------------------------------------------------------------------------


def test_the_completions_of_a_group_are_asked_for_together_and_are_those_of_requests_apart():
    with ProtocolServer() as server, engine_over(server.address) as engine:
        server.requests = 0
        together = generate(engine, count=12)
        assert server.requests == 12
        with engine_over(server.address, max_in_flight=1) as one_by_one:
            server.requests = 0
            assert drawn(generate(one_by_one, count=12)) == drawn(together)
            assert server.requests == 24


def test_vllm_numbers_the_completions_of_a_request_by_its_seed():
    """Completions 2 and 3 of a group of 4: seed + 2, and one more."""
    seeds = row_seeds(7, [3], 4)
    assert seeds == [seeds[0] + place for place in range(4)]
    asks = [Ask("policy", (5, 6), 9, 0, Sampling(9), seed, (END,)) for seed in seeds]
    dialect = VllmDialect()
    assert all(dialect.joins(later, former) for former, later in pairwise(asks))
    _, body = dialect.request(asks[2:])
    assert (body["n"], body["seed"], body["prompt"]) == (2, seeds[2], [5, 6])
    greedy = [replace(ask, sampling=Sampling(9, temperature=0)) for ask in asks]
    rest = replace(asks[1], ids=(5, 6, 7), max_new_tokens=8)
    assert not dialect.joins(greedy[1], greedy[0])
    assert not dialect.joins(asks[2], asks[0])
    assert not dialect.joins(rest, asks[0])


# ---- several servers -------------------------------------------------------------------------------------------------


def test_servers_share_the_load_within_their_limit_and_groups_stay_together():
    with (
        ProtocolServer() as one,
        ProtocolServer() as other,
        engine_over(one.address, other.address, max_in_flight=8) as engine,
    ):
        one.asked.clear()
        other.asked.clear()
        generate(engine, count=20)
        assert min(len(one.asked), len(other.asked)) >= 8
        assert max(one.most_at_once, other.most_at_once) <= 8
        prompts = [{tuple(asked.ids) for asked in server.asked} for server in (one, other)]
        assert len(prompts[0] & prompts[1]) <= 5


def test_a_server_that_only_fails_leaves_its_share_to_the_other():
    with ProtocolServer() as good, ProtocolServer() as bad, engine_over(good.address, bad.address) as engine:
        bad.asked.clear()
        bad.always = "500"
        generate(engine)
        assert bad.asked == []


def test_a_server_that_dies_leaves_its_share_to_the_other_and_is_taken_back():
    with ProtocolServer() as stays:
        dies = ProtocolServer()
        dies.__enter__()
        with engine_over(stays.address, dies.address, max_in_flight=4) as engine:
            generate(engine, count=30, then=lambda: dies.__exit__())
            assert [server.up for server in engine.servers] == [True, False]
            with ProtocolServer(port=dies.port) as back:
                generate(engine, count=30)
                assert back.asked


# ---- a server that goes and comes back -------------------------------------------------------------------------------


def test_a_server_that_dies_in_the_middle_is_waited_for():
    first = ProtocolServer()
    first.__enter__()
    with engine_over(first.address, max_in_flight=4) as engine:
        second = ProtocolServer(port=first.port)
        rollouts = generate(
            engine, count=20, then=lambda: (first.__exit__(), threading.Timer(0.5, second.__enter__).start())
        )
        assert len(rollouts) == 40
        assert second.asked
        second.__exit__()


def test_an_outage_that_does_not_end_stops_the_run_with_what_is_missing():
    server = ProtocolServer()
    server.__enter__()
    message = r"outage_timeout_s=0.5 seconds, with \d+ completions to go: .*refused"
    limits = {"outage_timeout_s": 0.5, "max_in_flight": 2}
    with engine_over(server.address, **limits) as engine, pytest.raises(EngineError, match=message):
        generate(engine, count=20, then=lambda: server.__exit__())


def test_a_server_that_says_it_is_not_well_is_given_up_with_what_it_has():
    with (
        ProtocolServer() as sick,
        ProtocolServer() as well,
        engine_over(sick.address, well.address, health_every_s=0.05) as engine,
    ):
        sick.always = "hang"
        threading.Timer(0.3, lambda: setattr(sick, "healthy", False)).start()
        generate(engine)


def test_a_server_that_comes_back_as_another_is_refused():
    first = ProtocolServer()
    first.__enter__()
    with engine_over(first.address) as engine:
        first.__exit__()
        message = "came back with another model: another-model"
        with ProtocolServer(port=first.port, name="another-model"), pytest.raises(EngineError, match=message):
            generate(engine)


def test_a_proxy_that_answers_for_a_server_that_restarts_is_waited_out():
    with ProtocolServer() as server, engine_over(server.address) as engine:
        server.strange = 3
        generate(engine, count=2)
        assert server.strange == 0


# ---- the start -------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_yet_is_waited_for():
    with ProtocolServer() as gone:
        port = gone.port
    late = ProtocolServer(port=port)
    threading.Timer(0.5, late.__enter__).start()
    with engine_over(f"127.0.0.1:{port}/v1/") as engine:
        generate(engine, count=2)
    late.__exit__()


def test_a_server_that_is_not_there_is_an_error_with_a_way_out():
    with (
        pytest.raises(
            EngineError, match=r"no rollout server at http://127.0.0.1:9 within .*=0.3 seconds.*toolbox serve"
        ),
        engine_over("127.0.0.1:9", start_timeout_s=0.3),
    ):
        pass


def test_another_model_of_the_same_shape_is_refused():
    with ProtocolServer(model=served_model(seed=1)) as server:
        refused(r"runs another model than the trainer: .*differ by [\d.]+ nats", server.address)


def test_another_tokenizer_is_refused():
    with ProtocolServer(tokenize=lambda text: [len(word) for word in text.split()]) as server:
        refused(r"has another tokenizer than the trainer: '12 ", server.address)


def test_too_little_room_is_refused():
    with ProtocolServer(protocol="openai") as server:
        refused(r"takes 512 tokens, and .*has 600", server.address, dialect=HttpDialect(), positions=600)


def test_another_kind_of_server_is_refused():
    with ProtocolServer(protocol="openai") as server:
        refused(r"does not answer as rollout.engine=sglang does", server.address)


def test_a_server_without_log_probs_or_ids_may_only_judge():
    with ProtocolServer() as server:
        server.always = "no logps"
        refused(r"does not report log-probs .* evaluation and judging", server.address)
    with ProtocolServer(protocol="openai") as server:
        refused(r"does not report token ids .* evaluation and judging", server.address, dialect=HttpDialect())


@pytest.mark.parametrize("kind", ["raw", "tempered", "processed"])
def test_what_log_probs_are_of_is_measured(kind):
    with ProtocolServer(kind=kind) as server, engine_over(server.address) as engine:
        assert engine.traits.logps == kind
        (one,) = engine.generate(sums(1), 1, Sampling(3))
        assert one.convention.kind == kind


def test_servers_that_report_differently_are_refused():
    with ProtocolServer(kind="raw") as one, ProtocolServer(kind="processed") as other:
        refused(r"log-probs of different distributions", one.address, other.address)


def test_addresses_are_read_as_people_write_them():
    assert addresses("localhost:8000/v1/") == ["http://localhost:8000"]
    assert addresses(["http://a:1", "a:1", "https://b/x"]) == ["http://a:1", "https://b/x"]
    for wrong in ([], "", "ftp://a", "http://"):
        with pytest.raises(ConfigError, match=r"rollout.server.urls"):
            addresses(wrong)


# ---- weights ---------------------------------------------------------------------------------------------------------


class Copy:
    """A sync into protocol servers of this process."""

    served_as = None

    def __init__(self, *servers: ProtocolServer) -> None:
        self.by_address = {server.address: server for server in servers}
        self.pushed: list[tuple[list[str], int]] = []
        self.broken: set[str] = set()

    def push(self, servers: Sequence[Control], policy: Any, version: int) -> None:
        self.pushed.append(([server.address for server in servers], version))
        failed = [server.address for server in servers if server.address in self.broken]
        for server in servers:
            if server.address not in self.broken:
                taken = self.by_address[server.address]
                taken.model.load_state_dict(policy.state_dict())
                taken.weights.version = Stamp("run").of(version)
        if failed:
            raise EngineError(f"weights {version} were not taken by {failed}")

    def version(self, server: Control) -> int | None:
        stated = server.get("/model_info")["weight_version"]
        return self.drew(stated, 1)

    def drew(self, stated: str, asked: int) -> int | None:
        return Stamp("run").drew(stated, asked)

    def close(self) -> None: ...


def test_a_server_that_restarts_with_old_weights_gets_the_present_ones():
    policy = served_model()
    first = ProtocolServer()
    first.__enter__()
    sync = Copy(first)
    with engine_over(first.address, sync=sync, policy=policy, max_in_flight=4) as engine:
        assert sync.pushed == []  # both began with the same checkpoint
        changed(policy, 0.5, seed=3)
        assert engine.sync() == 1
        first.__exit__()
        with ProtocolServer(port=first.port) as second:
            sync.by_address[second.address] = second
            rollouts = engine.generate(sums(4), 2, Sampling(6))
            assert_trainers(Subject(engine, policy), rollouts)
            assert {one.weights_version for one in rollouts} == {1}
        assert sync.pushed == [([first.address], 1)] * 2


def test_a_server_that_did_not_take_the_weights_is_not_asked_until_it_has_them():
    policy = served_model()
    with ProtocolServer() as one, ProtocolServer() as other:
        sync = Copy(one, other)
        with engine_over(one.address, other.address, sync=sync, policy=policy) as engine:
            changed(policy, 0.5, seed=3)
            sync.broken.add(other.address)
            assert engine.sync() == 1
            other.asked.clear()
            assert_trainers(Subject(engine, policy), engine.generate(sums(6), 2, Sampling(6)))
            assert other.asked == []
            sync.broken.clear()
            wait_until(lambda: (engine.generate(sums(6), 2, Sampling(6)), bool(other.asked))[1])
            assert_trainers(Subject(engine, policy), engine.generate(sums(6), 2, Sampling(6)))


def test_servers_that_another_run_has_left_get_this_runs_weights_first():
    with ProtocolServer(model=served_model(seed=1), version="other-run") as server:
        sync = Copy(server)
        with engine_over(server.address, sync=sync) as engine:
            assert sync.pushed == [([server.address], 0)]
            generate(engine)


def test_a_sync_while_no_server_is_up_is_made_up_for():
    policy = served_model()
    first = ProtocolServer()
    first.__enter__()
    sync = Copy(first)
    with engine_over(first.address, sync=sync, policy=policy) as engine:
        first.__exit__()
        sync.broken.add(first.address)
        changed(policy, 0.5, seed=3)
        assert engine.sync() == 1
        with ProtocolServer(port=first.port) as second:
            sync.broken.clear()
            sync.by_address[second.address] = second
            assert_trainers(Subject(engine, policy), engine.generate(sums(4), 2, Sampling(6)))
