"""A script for TRL's server mode and the vLLM that its text starts, both by the command lines as they stand.

As in `test_seed_scripts.py`, what is on the hub is replaced by what is here. On a processor vLLM has no program of its
own, so its API server, which is the same, is started with the same words; and its `auto` is bfloat16 there, where the
trainer's is float32, so that it is told.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset

from chat_model import save_chat_model
from command_line import toolbox
from grpo_toolbox.engines.server import Limits, Server
from test_seed_scripts import CHAT, changed
from toolbox_runs import metrics
from vllm_server import START_SECONDS, vllm_python
from written_scripts import TEXTS, fragment

pytestmark = pytest.mark.skipif(not TEXTS.is_dir(), reason="the texts are not beside the repository")
PORT = 8000
"""Of vLLM and of GRPOConfig, where neither is told another."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The model of a server that runs as the text starts it."""
    python = vllm_python()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"port {PORT} is taken")
    model = save_chat_model(tmp_path / "model", width=64)
    command, _ = fragment("launch beside vllm").replace("\\\n", " ").strip().splitlines()
    program = f"{python} -m vllm.entrypoints.openai.api_server --model"
    words = command.replace("vllm serve Qwen/Qwen3-4B", f"exec {program} {model} --dtype float32")
    assert words != command
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", words],
            stdout=log,
            stderr=log,
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{PORT}", Limits())
        end = time.monotonic() + START_SECONDS
        while not server.healthy():
            ended = process.poll() is not None or time.monotonic() > end
            assert not ended, (tmp_path / "vllm.log").read_text(errors="replace")[-3000:]
            time.sleep(1)
        yield model
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_script_in_server_mode_trains_beside_the_vllm_of_its_text(served: str, tmp_path: Path) -> None:
    """Weights go to the server after each step; its log-probs are next to the trainer's, and corrected for."""
    Dataset.from_list([{"prompt": CHAT, "solution": "$4$"}]).to_json(tmp_path / "data" / "train.jsonl")
    script = fragment("vllm, as a server") + fragment("quick start")
    script = script.replace("train_dataset=", "args=training_args, train_dataset=")
    (tmp_path / "train_grpo.py").write_text(changed(script, served, str(tmp_path / "data")), encoding="utf-8")
    _, launch = fragment("launch beside vllm").replace("\\\n", " ").strip().splitlines()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, "PATH": path, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(["bash", "-c", launch], cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = metrics(tmp_path / "trainer_output")
    assert len(lines) == 3
    assert all(line["sampler/logp_gap_max"] < 1e-2 for line in lines)
    assert "correction: sequence_mask" in (tmp_path / "trainer_output" / "config.yaml").read_text(encoding="utf-8")


def test_the_other_text_s_server_is_served_by_ours(tmp_path: Path) -> None:
    """`trl vllm-serve` is TRL's program; `toolbox serve` starts vLLM for the same model, with what we ask of it."""
    words = shlex.split(fragment("vllm, its server").splitlines()[1])
    assert words[:3] == ["trl", "vllm-serve", "--model"]
    python = os.environ.get("TOOLBOX_VLLM_PYTHON", sys.executable)
    result = toolbox("serve", f"model.path={words[3]}", "rollout.engine=vllm", "--python", python, "--dry-run")
    if result.code:
        assert "has no vLLM: install it" in result.err
        return
    assert words[3] in result.out
