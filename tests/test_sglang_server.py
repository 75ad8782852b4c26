"""A real SGLang on a processor, where `TOOLBOX_SGLANG_PYTHON` names one: the contract, and both ways of weights.

It starts with stand-ins for the packages of which only GPU builds exist (`sglang_stubs`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import Subject, changed, check_sync, decode, dropping, identity, sums
from fault_proxy import FaultProxy
from grpo_toolbox.engines.commands import Serving, installed, sglang_command
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.probe import Probe, canary_rows
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync.choose import ChosenSync, Mode, SyncSettings
from grpo_toolbox.engines.targets import SglangTarget
from grpo_toolbox.engines.teacher import Teacher
from served_models import END, POSITIONS, served_model, write_model
from vllm_server import free_port

pytestmark = pytest.mark.slow
LIMITS = Limits(health_every_s=1.0, request_timeout_s=120.0)
STUBS = Path(__file__).parent / "sglang_stubs"


@pytest.fixture(scope="session")
def address(tmp_path_factory) -> Iterator[str]:
    python = os.environ.get("TOOLBOX_SGLANG_PYTHON")
    if not python:
        pytest.skip("no SGLang: set TOOLBOX_SGLANG_PYTHON to the Python of an environment that has sglang")
    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    more = ["--max-total-tokens", "20000"]
    serving = Serving(str(write_model(folder / "model")), "127.0.0.1", port, max_model_len=POSITIONS, more=more)
    command = sglang_command(installed(python), serving)
    settings = {**os.environ, **command.environment, "PYTHONPATH": str(STUBS), "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command.words, stdout=output, stderr=output, env=settings | {"HF_HUB_OFFLINE": "1"}, start_new_session=True
        )
    try:
        yield _up(f"http://127.0.0.1:{port}", process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _up(address: str, process: subprocess.Popen[bytes], log: Path) -> str:
    server, end = Server(address, LIMITS), time.monotonic() + 600
    while not server.healthy():
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(1)
    server.close()
    return address


@pytest.fixture(scope="module", params=["folder", "gloo"])
def subject(request, address, tmp_path_factory) -> Iterator[Subject]:
    policy, settings = served_model(), SyncSettings(request.param, timeout_s=120.0)
    with FaultProxy(address) as proxy:
        engine = ServerEngine(
            SglangDialect(),
            [Server(proxy.address, LIMITS)],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
            sync=ChosenSync("sglang", settings, policy, tmp_path_factory.mktemp("sync")),
        )
        # it heeds seeds where it was started with --enable-deterministic-inference, which no processor has
        yield Subject(engine.start(), policy, reproduces=False, dying=partial(dropping, proxy))
        engine.close()


def test_a_sync_changes_what_is_drawn_and_no_stale_prefix_is_used(subject: Subject) -> None:
    check_sync(subject)


@pytest.mark.parametrize("mode", ["folder", "gloo"])
def test_weights_arrive_and_a_withheld_sync_is_seen(mode: Mode, address: str, tmp_path: Path) -> None:
    policy, server = served_model(), Server(address, LIMITS)
    sync = ChosenSync("sglang", SyncSettings(mode, folder=str(tmp_path), timeout_s=120.0), policy, tmp_path)
    sync.push([server], policy, 1)
    rows = canary_rows([one.ids for one in sums(9)], 2, 100)
    probe, target = Probe(rows, Teacher(policy, packed=True)), SglangTarget(server, 120.0)
    assert [one.cause for one in probe.check([target], moved=False)] == [None]
    changed(policy, 0.3, seed=5)
    assert [one.cause for one in probe.check([target], moved=True)] == ["delivery"]
    sync.push([server], policy, 2)
    assert sync.version(server) == 2
    assert [one.cause for one in probe.check([target], moved=False)] == [None]
    sync.push([server], served_model(), 3)
    sync.close()
    server.close()
