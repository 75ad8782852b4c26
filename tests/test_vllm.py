"""A real vLLM: the contract of engines, weights that arrive, and the faults of a server."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_contract import *  # noqa: F403
from engine_contract import (
    Subject,
    assert_trainers,
    changed,
    check_sync,
    decode,
    drawn,
    dropping,
    identity,
    replaced,
    sums,
)
from fault_proxy import FaultProxy
from grpo_toolbox.cli.main import main
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.identity import Identity
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sync import vllm as procedure
from grpo_toolbox.engines.sync.choose import ChosenSync, SyncSettings
from grpo_toolbox.engines.vllm import StampedVllmDialect, VllmDialect
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import Sampling
from served_models import END, served_model, write_model
from vllm_server import VllmServer, end_with_the_tests, free_port, vllm, vllm_python  # noqa: F401

LIMITS = Limits(health_every_s=1.0, request_timeout_s=120.0)


@contextmanager
def engine_over(
    server: VllmServer,
    folder: Path,
    dialect: Any = None,
    limits: Limits = LIMITS,
    address: str | None = None,
    told: Identity | None = None,
    stop_ids: tuple[int, ...] = (END,),
    **sync: Any,
) -> Iterator[Subject]:
    policy, dialect = served_model(), dialect or VllmDialect()
    takes_weights = dialect.name == "vllm"
    made = ServerEngine(
        dialect,
        [Server(address or server.address, limits)],
        policy,
        decode=decode,
        stop_ids=stop_ids,
        identity=told or identity(policy),
        sync=ChosenSync("vllm", SyncSettings(**sync), policy, folder) if takes_weights else None,
    )
    try:
        yield Subject(made.start(), policy, limits_length=takes_weights)
    finally:
        made.close()


@pytest.fixture(scope="module", params=[VllmDialect, StampedVllmDialect, HttpDialect], ids=["vllm", "stamped", "http"])
def subject(request, vllm, tmp_path_factory) -> Iterator[Subject]:  # noqa: F811
    folder = tmp_path_factory.mktemp("sync")
    with FaultProxy(vllm.address) as proxy, engine_over(vllm, folder, request.param(), address=proxy.address) as made:
        yield replaced(made, dying=partial(dropping, proxy))


def test_a_sync_changes_what_is_drawn_and_no_stale_prefix_is_used(subject: Subject) -> None:
    if not subject.limits_length:
        pytest.skip("plain HTTP takes no weights")
    check_sync(subject)


def test_completions_asked_for_together_are_those_asked_for_apart(vllm, tmp_path):  # noqa: F811
    with engine_over(vllm, tmp_path) as together, FaultProxy(vllm.address) as proxy:
        rollouts = together.engine.generate(sums(6), 4, Sampling(10, seed=2))
        limits = replace(LIMITS, max_in_flight=1)
        with engine_over(vllm, tmp_path, limits=limits, address=proxy.address) as apart:
            before = proxy.completions
            assert drawn(apart.engine.generate(sums(6), 4, Sampling(10, seed=2))) == drawn(rollouts)
            assert proxy.completions - before == 24


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_at_the_start(vllm, tmp_path):  # noqa: F811
    vllm.load(write_model(tmp_path / "other", seed=1))
    try:
        with pytest.raises(EngineError, match="runs another model than the trainer"), engine_over(vllm, tmp_path):
            pass
    finally:
        vllm.load(vllm.model)


@pytest.mark.parametrize("dialect", [VllmDialect, StampedVllmDialect])
def test_log_probs_of_broken_weights_are_not_trained_on(dialect, vllm, tmp_path):  # noqa: F811
    broken = served_model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    write_model(tmp_path / "broken")
    broken.save_pretrained(tmp_path / "broken")
    with engine_over(vllm, tmp_path, dialect(), limits=Limits(health_every_s=1.0, retries=1)) as made:
        vllm.load(tmp_path / "broken")
        try:
            with pytest.raises(EngineError, match="log-prob that is not finite"):
                made.engine.generate(sums(2), 1, Sampling(4))
        finally:
            vllm.load(vllm.model)


def test_another_tokenizer_is_refused_at_the_start(vllm, tmp_path):  # noqa: F811
    told = replace(identity(served_model()), tokenized={"12 + 34": [1, 2, 3]})
    with pytest.raises(EngineError, match="another tokenizer than the trainer"), engine_over(vllm, tmp_path, told=told):
        pass


def test_a_server_that_is_not_there_is_waited_for_and_then_said_to_be_missing(vllm, tmp_path):  # noqa: F811
    limits, nowhere = replace(LIMITS, start_timeout_s=2.0), f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(EngineError, match=r"no rollout server at .* within rollout.server.start_timeout_s=2 .*refused"),
        engine_over(vllm, tmp_path, limits=limits, address=nowhere),
    ):
        pass


@pytest.mark.parametrize("faults", [["500"] * 3, ["drop"] * 2, ["hang"]])
def test_answers_that_do_not_come_are_asked_for_again(faults, vllm, tmp_path):  # noqa: F811
    limits = replace(LIMITS, request_timeout_s=4.0, health_every_s=0.5)
    with FaultProxy(vllm.address) as proxy, engine_over(vllm, tmp_path, limits=limits, address=proxy.address) as made:
        undisturbed = made.engine.generate(sums(12), 2, Sampling(8))
        proxy.faults += faults
        heard: list[int] = []
        rollouts = made.engine.generate(sums(12), 2, Sampling(8), lambda row, one: heard.append(row))
        assert not proxy.faults
        assert sorted(heard) == list(range(24))
        assert drawn(rollouts) == drawn(undisturbed)


def test_a_server_that_hangs_is_asked_again_when_it_goes_on(vllm, tmp_path):  # noqa: F811
    if vllm.pid is None:
        pytest.skip("a server that was not started here is not to be disturbed")
    with engine_over(
        vllm, tmp_path, limits=Limits(health_every_s=0.5, request_timeout_s=4.0, control_timeout_s=2.0)
    ) as made:
        vllm.signal(signal.SIGSTOP)
        threading.Timer(6.0, lambda: vllm.signal(signal.SIGCONT)).start()
        rollouts = made.engine.generate(sums(12), 2, Sampling(8))
        assert_trainers(made, rollouts)


def test_a_run_trains_through_the_server(vllm, tmp_path, capsys, monkeypatch):  # noqa: F811
    (tmp_path / "served_reward.py").write_text(
        "def bs(completions, **_):\n    return [text.count('b') for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{one}+{one}=", "answer": str(2 * one)}) + "\n" for one in range(8)))
    words = [f"model.path={vllm.model}", "data=file", f"data.path={data}", f"run_dir={tmp_path}/run", "callbacks=none"]
    words += ["rollout.engine=vllm", f"rollout.server.urls={vllm.address}", "rollout.prompts_per_step=4"]
    words += ["rollout.group_size=4", "rollout.max_new_tokens=8", "trainer.max_steps=3", "trainer.eval_every=0"]
    assert main(["train", *words, "reward=custom", "reward.name=served_reward:bs", "trainer.lr=0.01"]) == 0, (
        capsys.readouterr().err
    )
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert max(step["sampler/logp_gap_max"] for step in steps) < 1e-3
    assert min(step["grad_norm"] for step in steps) > 0


@pytest.mark.slow
def test_a_server_that_is_killed_is_waited_for_and_gets_the_weights_again(tmp_path, monkeypatch):
    """Once while it starts the trainer is there already; then it is killed while it draws, and while it is synced."""
    vllm_python()
    server = VllmServer(write_model(tmp_path / "model"), free_port(), log=tmp_path / "vllm.log")
    kills: list[str] = []

    def kill(when: str) -> None:
        if when not in kills:
            kills.append(when)
            server.kill()
            server.start()
            end_with_the_tests(server)

    def finished(row: int, one: Any) -> None:
        heard.append(row)
        if len(heard) == 10:
            kill("drawing")

    server.start()
    end_with_the_tests(server)
    try:
        with engine_over(server, tmp_path) as made:
            changed(made.policy, 0.5, seed=7)
            assert made.engine.sync() == 1
            heard: list[int] = []
            rollouts = made.engine.generate(sums(60), 4, Sampling(100), finished)
            assert sorted(heard) == list(range(240))
            assert_trainers(made, rollouts)
            assert {one.weights_version for one in rollouts} == {1}

            transfer = procedure.transfer
            monkeypatch.setattr(procedure, "transfer", lambda *given: (kill("syncing"), transfer(*given)))
            changed(made.policy, 0.5, seed=8)
            assert made.engine.sync() == 2
            rollouts = made.engine.generate(sums(20), 4, Sampling(20))
            assert_trainers(made, rollouts)
            assert {one.weights_version for one in rollouts} == {2}
        assert kills == ["drawing", "syncing"]
    finally:
        server.kill()
