"""Weights on their way to SGLang: what is called in which order, what goes stale, and what a failure leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_contract import Subject, assert_trainers, changed, check_sync, decode, identity, sums
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.probe import Finding, Probe, canary_rows
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync import PushError
from grpo_toolbox.engines.sync import sglang as procedure
from grpo_toolbox.engines.sync.choose import ChosenSync, Mode, SyncSettings
from grpo_toolbox.engines.sync.weights import WeightFolders, served_weights
from grpo_toolbox.engines.targets import SglangTarget
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.types import Sampling
from protocol_server import ProtocolServer
from served_models import END, served_model

UPDATES = {
    "folder": ["/update_weights_from_disk"],
    "gloo": ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"],
}


def ways(tmp_path: Path, mode: Any, policy: Any, timeout_s: float = 30.0, **options: Any) -> ChosenSync:
    settings = SyncSettings(mode, folder=str(tmp_path), timeout_s=timeout_s, **options)
    return ChosenSync("sglang", settings, policy, tmp_path)


@contextmanager
def serving(tmp_path: Path, mode: str, **options: Any) -> Iterator[tuple[ProtocolServer, Subject]]:
    policy = served_model()
    with ProtocolServer() as server:
        engine = ServerEngine(
            SglangDialect(),
            [Server(server.address, Limits(health_every_s=0.2))],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
            sync=ways(tmp_path, mode, policy, **options),
        )
        try:
            yield server, Subject(engine.start(), policy)
        finally:
            engine.close()


@pytest.mark.parametrize("mode", UPDATES)
def test_a_push_pauses_updates_flushes_states_its_version_and_goes_on(mode: str, tmp_path: Path) -> None:
    with serving(tmp_path, mode) as (server, subject):
        check_sync(subject)
        calls = [call for call in server.weights.calls if call != "/init_weights_update_group"]
        assert server.weights.calls.count("/init_weights_update_group") == (mode == "gloo")
    push = [
        *("/pause_generation retract", "/update_weight_version"),
        *UPDATES[mode],
        *("/flush_cache", "/update_weight_version", "/continue_generation"),
    ]
    assert calls == push * 2


def test_files_move_the_path_that_the_server_states_and_it_is_the_same_server_all_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, "folder") as (server, subject):
        changed(subject.policy, 0.5, seed=7)
        subject.engine.sync()
        assert server.weights.path != "policy"
        assert_trainers(subject, subject.engine.generate(sums(4), 2, Sampling(4)))


@pytest.mark.parametrize("mode", UPDATES)
def test_a_push_that_breaks_off_leaves_a_server_that_takes_the_next(mode: Mode, tmp_path: Path) -> None:
    policy = served_model()
    with ProtocolServer() as server:
        control, sync = Server(server.address, Limits()), ways(tmp_path, mode, policy, timeout_s=20.0)
        sync.push([control], policy, 1)
        changed(policy, 0.5, seed=7)
        update = next(path for path in UPDATES[mode] if path.startswith("/update"))
        server.weights.broken = {update}
        server.weights.calls.clear()
        with pytest.raises(PushError, match=f"weights 2 were not taken by {server.address}.*{update} is broken"):
            sync.push([control], policy, 2)
        assert sync.version(control) is None  # it states neither the former version nor the new one
        assert server.weights.calls[-2:] == ["/pause_generation abort", "/continue_generation"]
        server.weights.broken = set()
        sync.push([control], policy, 3)
        assert sync.version(control) == 3
        probe, target = probed(policy, control)
        assert causes(probe, target, moved=False) == [None]
        sync.close()
        control.close()


def probed(policy: Any, control: Server) -> tuple[Probe, SglangTarget]:
    rows = canary_rows([one.ids for one in sums(9)], 2, 40)
    return Probe(rows, Teacher(policy, packed=True)), SglangTarget(control, 10.0)


def causes(probe: Probe, target: SglangTarget, *, moved: bool) -> list[str | None]:
    found: list[Finding] = probe.check([target], moved=moved)
    return [one.cause for one in found]


def test_a_withheld_push_is_seen_and_so_is_a_cache_that_was_not_flushed(tmp_path: Path) -> None:
    policy = served_model()
    with ProtocolServer() as server:
        control = Server(server.address, Limits())
        probe, target = probed(policy, control)
        assert causes(probe, target, moved=False) == [None]
        changed(policy, 0.5, seed=7)
        assert causes(probe, target, moved=True) == ["delivery"]
        procedure.pause(control, "drain", 10.0)
        folder = WeightFolders(tmp_path, "test").write_weights(served_weights(policy), 1)
        procedure.load_folder(control, folder, 10.0)
        procedure.resume(control)
        assert causes(probe, target, moved=False) == ["cache"]
        procedure.pause(control, "drain", 10.0)
        procedure.flush(control, "drain", 10.0)
        procedure.resume(control)
        assert causes(probe, target, moved=False) == [None]
        control.close()


def test_a_request_that_comes_during_a_push_waits_and_is_answered_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, "folder") as (_, subject):
        changed(subject.policy, 0.5, seed=7)
        load = procedure.load_folder
        asked: list[Future[Any]] = []

        with ThreadPoolExecutor(1) as pool:

            def meanwhile(*arguments: Any) -> None:
                if not asked:
                    asked.append(pool.submit(subject.engine.generate, sums(2), 2, Sampling(4)))
                    time.sleep(0.3)
                    assert not asked[0].done()
                load(*arguments)

            monkeypatch.setattr(procedure, "load_folder", meanwhile)
            subject.engine.sync()
            assert_trainers(subject, asked[0].result(timeout=60))


def test_keeping_what_is_under_way_flushes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "folder", in_flight="keep") as (server, subject):
        subject.engine.sync()
        assert server.weights.calls[0] == "/pause_generation in_place"
        assert not [call for call in server.weights.calls if call.startswith("/flush_cache")]
