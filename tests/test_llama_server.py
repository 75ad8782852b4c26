"""llama.cpp's own server, through xllamacpp: the contract over rollout.engine=http."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import Subject, decode, dropping, identity
from fault_proxy import FaultProxy
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Server
from served_gguf import write_gguf
from served_models import END, POSITIONS, served_model

SERVER = Path(__file__).parents[1] / "benchmarks" / "llama_server.py"
SLOTS = 16


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    python = os.environ.get("TOOLBOX_LLAMA_PYTHON")
    if not python:
        pytest.skip("no llama.cpp: set TOOLBOX_LLAMA_PYTHON to the Python of an environment that has xllamacpp")
    folder = tmp_path_factory.mktemp("llama")
    file, log = write_gguf(served_model(), folder / "model.gguf"), folder / "log"
    words = [python, str(SERVER), str(file), str(SLOTS), str(POSITIONS), "1"]
    with log.open("w") as output:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        yield _address(process, log)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ADDRESS "):
                return str(json.loads(line.removeprefix("ADDRESS ")))
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-2000:])


@pytest.fixture(scope="module")
def subject(address) -> Iterator[Subject]:
    policy = served_model()
    with FaultProxy(address) as proxy:
        engine = ServerEngine(
            HttpDialect(),
            [Server(proxy.address, Limits(health_every_s=1.0, max_in_flight=SLOTS))],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
        )
        dying = partial(dropping, proxy)
        # its cache holds keys and values in half precision
        yield Subject(engine.start(), policy, tolerance=3e-2, limits_length=False, reproduces=False, dying=dying)
        engine.close()


def test_its_log_probs_are_those_of_temperature_one(subject: Subject) -> None:
    assert subject.engine.traits.logps == "raw"
