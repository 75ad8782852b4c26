"""A token classifier behind a real vLLM's pooling endpoint says what the same model says in this process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from grpo_toolbox.rewards import build_reward
from reward_checkpoints import TEMPLATE, tokenizer_of
from vllm_server import vllm_python

TEXTS = ["1+1=2\n\n2+2=4", "so 5\n\nand 6"]
START_SECONDS = 300


def write_model(folder: Path) -> str:
    """Save a random token classifier with one label: bidirectional, of a kind that vLLM serves as it is."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=0,
    )
    BertForTokenClassification(config).save_pretrained(folder)
    tokenizer_of(TEMPLATE).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The model's folder, and the address of a vLLM that serves it."""
    folder = tmp_path_factory.mktemp("classifier")
    path = write_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--served-model-name", "prm"]
    options = ["--runner", "pooling", "--dtype", "float32", "--max-model-len", "64", "--port", str(port)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("wb") as log:
        words = [*module, *options, "--host", "127.0.0.1", "--enforce-eager"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=settings)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, folder / "log")
        yield path, address
    finally:
        process.terminate()
        process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{address}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.parametrize("level", ["step", "token"])
def test_a_token_classifier_behind_vllm_pays_as_in_this_process(served: tuple[str, str], level: str) -> None:
    path, address = served

    def paid(**options: Any) -> tuple[list[Any], list[Any], list[Any]]:
        reward = build_reward("reward_model", level=level, policy_tokenizer=path, **options)
        ids = [[*tokenizer_of(None)(text, add_special_tokens=False)["input_ids"], 1] for text in TEXTS]
        extras: dict[str, list[Any]] = {}
        given = {"prompts": ["q", "what?"], "completions": TEXTS, "completion_ids": ids}
        scores = reward(**given, log_extra=extras.__setitem__)
        return scores, extras["token_rewards"], extras["step_scores"]

    remote = paid(path="prm", base_url=address, endpoint="pooling", tokenizer=path, retries=0)
    local = paid(path=path, device="cpu")
    assert remote[0] == pytest.approx(local[0], abs=1e-4)
    for one, other in zip((*remote[1], *remote[2]), (*local[1], *local[2]), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert len({round(value, 3) for row in local[2] for value in row}) > 2  # a model that tells steps apart
