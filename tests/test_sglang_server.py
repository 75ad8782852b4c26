"""A real SGLang on a processor, where `TOOLBOX_SGLANG_PYTHON` names one: the contract, and both ways of weights.

It starts with stand-ins for the packages of which only GPU builds exist (`sglang_stubs`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import (
    Subject,
    changed,
    check_sync,
    decode,
    dropping,
    identity,
    replaced,
    sums,
    test_a_seed_repeats_and_another_differs,
    test_completions_of_a_group_differ,
    test_ids_and_log_probs_are_those_of_the_trainers_forward,
)
from fault_proxy import FaultProxy
from grpo_toolbox.engines.commands import Serving, installed, sglang_command
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.probe import Probe, canary_rows
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.sync.choose import ChosenSync, Mode, SyncSettings
from grpo_toolbox.engines.targets import SglangTarget
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.types import Sampling
from served_models import END, POSITIONS, served_model, write_model
from stamped import arriving, assert_stamped
from vllm_server import free_port

pytestmark = pytest.mark.slow
LIMITS = Limits(health_every_s=1.0, request_timeout_s=120.0)
STUBS = Path(__file__).parent / "sglang_stubs"


@contextmanager
def serving(folder: Path, *words: str, **environment: str) -> Iterator[str]:
    """Start SGLang with these words beside `toolbox serve`'s; yields its address."""
    python = os.environ.get("TOOLBOX_SGLANG_PYTHON")
    if not python:
        pytest.skip("no SGLang: set TOOLBOX_SGLANG_PYTHON to the Python of an environment that has sglang")
    port, more = free_port(), ["--max-total-tokens", "20000", *words]
    asked = Serving(str(write_model(folder / "model")), "127.0.0.1", port, max_model_len=POSITIONS, more=more)
    command = sglang_command(installed(python), asked)
    settings = {**os.environ, **command.environment, "PYTHONPATH": str(STUBS), "OMP_NUM_THREADS": "1", **environment}
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


@pytest.fixture(scope="session")
def address(tmp_path_factory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("sglang")) as place:
        yield place


def _up(address: str, process: subprocess.Popen[bytes], log: Path) -> str:
    server, end = Server(address, LIMITS), time.monotonic() + 600
    while not server.healthy():
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        time.sleep(1)
    server.close()
    return address


@contextmanager
def engine_over(
    address: str, folder: Path, mode: Mode = "folder", stop_ids: tuple[int, ...] = (END,), **sync: Any
) -> Iterator[Subject]:
    policy = served_model()
    engine = ServerEngine(
        SglangDialect(),
        [Server(address, LIMITS)],
        policy,
        decode=decode,
        stop_ids=stop_ids,
        identity=identity(policy),
        sync=ChosenSync("sglang", SyncSettings(mode, timeout_s=120.0, **sync), policy, folder),
    )
    try:
        yield Subject(engine.start(), policy, reproduces=False)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["folder", "gloo"])
def subject(request, address, tmp_path_factory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("sync")
    with FaultProxy(address) as proxy, engine_over(proxy.address, folder, request.param) as made:
        yield replaced(made, dying=partial(dropping, proxy))


def test_seeds_are_heeded_in_the_deterministic_mode(tmp_path: Path) -> None:
    """Elsewhere a seed is read and forgotten."""
    words = ["--enable-deterministic-inference"]
    with (
        serving(tmp_path / "server", *words, TOOLBOX_SGLANG_SEEDS="1", TORCH_COMPILE_DISABLE="1") as address,
        engine_over(address, tmp_path) as made,
    ):
        test_a_seed_repeats_and_another_differs(replaced(made, reproduces=True))
        test_completions_of_a_group_differ(made)
        test_ids_and_log_probs_are_those_of_the_trainers_forward(made)


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_each_token_bears_the_weights_that_drew_it(how: Any, address: str, tmp_path: Path) -> None:
    """Here nothing is computed ahead of a pause, since the server overlaps nothing (`--disable-overlap-schedule`)."""
    models: list[Any] = []
    with engine_over(address, tmp_path, stop_ids=(), in_flight=how) as made:
        made.engine.in_flight(arriving(made, models, every=4, pushes=2), recompute=how == "recompute")
        rollouts = made.engine.generate(sums(5), 3, Sampling(200))
    assert_stamped(models, rollouts, kept=how == "keep")


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
