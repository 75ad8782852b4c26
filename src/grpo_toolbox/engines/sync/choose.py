"""Which way weights take to the servers of a run."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from grpo_toolbox.engines.sync import Control, InFlight, Manner, Stamp, WeightSync, sglang, vllm
from grpo_toolbox.engines.sync.adapter import AdapterSync
from grpo_toolbox.engines.sync.full import FolderSync, GroupProcedure, TransferSync
from grpo_toolbox.engines.sync.groups import Group, NcclGroup, StoreGroup, own_address
from grpo_toolbox.engines.sync.weights import WeightFolders, choose_folder, is_here
from grpo_toolbox.errors import ConfigError, EngineError
from grpo_toolbox.models.lora import has_adapter

log = logging.getLogger(__name__)

Mode = Literal["auto", "adapter", "folder", "gloo", "nccl"]
Kind = Literal["vllm", "sglang"]
GLOO_BACKEND = "toolbox_gloo"
"""What `on_server/toolbox_vllm.py` registers."""
_BACKENDS: Mapping[str, str] = {"gloo": GLOO_BACKEND, "nccl": "nccl"}
"""What a vLLM server must have been started for."""


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel."""

    mode: Mode = "auto"
    folder: str | None = None
    """Where files are written; None looks for a place."""
    address: str | None = None
    """Of the trainer, as the servers see it; None finds out."""
    dtype: torch.dtype | None = None
    in_flight: InFlight = "drain"
    timeout_s: float = 300.0


class ChosenSync:
    """The way that `settings.mode` names, or the best that the first server offers, found out when it is first needed.

    `auto` sends an adapter alone where there is one and the server loads it; else tensors over the process group that
    the server was started for; else files. Raises ConfigError where a way cannot be, EngineError for no answer.
    """

    def __init__(self, kind: Kind, settings: SyncSettings, policy: nn.Module, run_dir: Path) -> None:
        self._kind = kind
        self._settings = settings
        self._policy = policy
        self._run_dir = run_dir
        self._stamp = Stamp(secrets.token_hex(4))
        self._way: WeightSync | None = None
        if settings.mode != "auto":
            _check(kind, settings.mode, policy)

    @property
    def served_as(self) -> str | None:
        """The model name that completions must ask for (an adapter's); None for the server's own."""
        return None if self._way is None else self._way.served_as

    def push(self, servers: Sequence[Control], policy: nn.Module, version: int) -> None:
        """Bring the weights the chosen way; raises PushError for the servers that did not take them."""
        self._chosen(servers).push(servers, policy, version)

    def version(self, server: Control) -> int | None:
        """Return the version of this run's that the server states."""
        return self._chosen([server]).version(server)

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version of weights that a server states of tokens asked for under version `asked`."""
        return asked if self._way is None else self._way.drew(stated, asked)

    def close(self) -> None:
        """Release process groups and files."""
        if self._way is not None:
            self._way.close()

    def _chosen(self, servers: Sequence[Control]) -> WeightSync:
        if self._way is None:
            self._way = self._choose(servers)
        return self._way

    def _choose(self, servers: Sequence[Control]) -> WeightSync:
        kind, settings, policy = self._kind, self._settings, self._policy
        manner = Manner(self._stamp, settings.in_flight, settings.dtype, settings.timeout_s)
        mode = settings.mode if settings.mode != "auto" else _offered(kind, servers, settings, policy)
        if kind == "vllm" and mode in _BACKENDS:
            _check_backend(servers[0], mode)
        log.info("weights go to rollout servers by %s", mode)
        if mode in ("folder", "adapter"):
            needed = 0 if mode == "adapter" else sum(one.nbytes for one in policy.parameters())
            root = choose_folder(settings.folder, self._run_dir, [one.address for one in servers], needed)
            folders = WeightFolders(root, self._stamp.run)
            if mode == "adapter":
                return AdapterSync(folders, manner)
            return FolderSync(vllm if kind == "vllm" else sglang, folders, manner)
        procedure: GroupProcedure = vllm if kind == "vllm" else sglang
        return TransferSync(procedure, _group_maker(kind, mode, settings, policy, self._stamp.run), manner)


def _offered(kind: Kind, servers: Sequence[Control], settings: SyncSettings, policy: nn.Module) -> Mode:
    shared = settings.folder is not None or all(is_here(one.address) for one in servers)
    on_gpu = next(policy.parameters()).is_cuda
    if kind == "sglang":
        return "folder" if shared else "nccl" if on_gpu else "gloo"
    routes = _routes(servers[0])
    if has_adapter(policy) and shared and "/v1/load_lora_adapter" in routes:
        return "adapter"
    backend = _backend(servers[0]) if "/collective_rpc" in routes else None
    if backend == GLOO_BACKEND:
        return "gloo"
    if backend == "nccl" and on_gpu:
        return "nccl"
    if "/collective_rpc" not in routes:
        raise EngineError(
            f"{servers[0].address} takes no weights: start it with `toolbox serve`, or with VLLM_SERVER_DEV_MODE=1."
        )
    return "folder"


def _routes(server: Control) -> set[str]:
    return set(server.get("/openapi.json")["paths"])


def _backend(server: Control) -> str | None:
    try:
        return vllm.backend(server)
    except EngineError:  # it was started without our extension, and may do everything else
        return None


def _check_backend(server: Control, mode: Mode) -> None:
    """Raise EngineError where a server says that it was started for another way."""
    backend = _backend(server)
    if backend is not None and backend != _BACKENDS[mode]:
        raise EngineError(
            f"rollout.sync.mode={mode}: {server.address} was started for the weight-transfer backend {backend!r}. "
            f'Start it with --weight-transfer-config \'{{"backend": "{_BACKENDS[mode]}"}}\', or set '
            "rollout.sync.mode=auto."
        )


def _check(kind: Kind, mode: Mode, policy: nn.Module) -> None:
    if mode == "adapter" and not has_adapter(policy):
        raise ConfigError("rollout.sync.mode=adapter needs model.lora.r above 0: set auto, which sends all weights.")
    if mode == "adapter" and kind == "sglang":
        raise ConfigError("rollout.sync.mode=adapter needs rollout.engine=vllm; SGLang gets merged weights with auto.")
    if mode == "nccl" and not next(policy.parameters()).is_cuda:
        raise ConfigError("rollout.sync.mode=nccl sends from a GPU, and the policy is on the processor: set gloo.")


def _group_maker(
    kind: Kind, mode: Mode, settings: SyncSettings, policy: nn.Module, run: str
) -> Callable[[str, int], Group]:
    device = next(policy.parameters()).device
    made = iter(range(1 << 62))

    def make(server: str, workers: int) -> Group:
        if kind == "vllm" and mode == "nccl":
            return NcclGroup(workers, device)
        address = own_address(settings.address, server)
        if kind == "vllm":
            return StoreGroup(address, workers, settings.timeout_s)
        name = f"grpo-toolbox-{run}-{next(made)}"
        return StoreGroup(address, workers, settings.timeout_s, name=name, backend=mode)

    return make


def server_environment() -> dict[str, str]:
    """Return what a vLLM server needs in its environment for all ways; PYTHONPATH holds our extension alone."""
    return {
        "PYTHONPATH": str(Path(__file__).parent / "on_server"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


def server_arguments(on_gpu: bool) -> list[str]:
    """Return the arguments with which a vLLM server takes weights over a process group."""
    backend: dict[str, Any] = {"backend": "nccl" if on_gpu else GLOO_BACKEND}
    transfer = str(backend).replace("'", '"')
    return ["--worker-extension-cls", "toolbox_vllm.Extension", "--weight-transfer-config", transfer]
