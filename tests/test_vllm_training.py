"""`grpo_tiny` through a real vLLM server that dies twice on the way."""

from __future__ import annotations

import threading
from pathlib import Path
from statistics import fmean

import pytest

from grpo_toolbox.cli.main import main
from tiny_folder import write_tiny
from toolbox_runs import metrics
from vllm_server import VllmServer, end_with_the_tests, free_port, vllm_python

STEPS = 500
KILLED_AFTER = (150, 300)


def kill_and_restart(server: VllmServer, run_dir: Path, ended: threading.Event) -> None:
    """Kill the server and start it again as it was, with the first weights, whenever the run has come so far."""
    for step in KILLED_AFTER:
        file = run_dir / "metrics.jsonl"
        while not file.exists() or file.read_text().count("\n") < step:
            if ended.wait(0.5):
                return
        server.kill()
        server.start()
        end_with_the_tests(server)


@pytest.mark.slow
def test_grpo_tiny_reaches_its_line_through_a_server_that_is_killed_twice(tmp_path):
    vllm_python()
    server = VllmServer(write_tiny(tmp_path / "model"), free_port(), log=tmp_path / "vllm.log", positions=128)
    server.start()
    end_with_the_tests(server)
    server.wait()
    run_dir, ended = tmp_path / "run", threading.Event()
    killer = threading.Thread(target=kill_and_restart, args=(server, run_dir, ended))
    killer.start()
    words = ["experiment=grpo_tiny", f"model.path={server.model}", f"trainer.max_steps={STEPS}", "callbacks=none"]
    words += ["rollout.engine=vllm", f"rollout.server.urls={server.address}", f"run_dir={run_dir}"]
    try:
        assert main(["train", *words]) == 0
    finally:
        ended.set()
        killer.join()
        server.kill()
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert fmean(line["reward_mean"] for line in lines[-20:]) >= 0.9
    assert max(line["sampler/logp_gap_max"] for line in lines) < 1e-2
