"""Process groups over which the trainer, their rank 0, sends weights to a server's workers.

Each server has a group of its own, so that one that dies takes no other with it.
"""

from __future__ import annotations

import base64
import socket
import threading
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_toolbox.engines.sync.weights import Weights, is_here
from grpo_toolbox.errors import ConfigError


class Group(Protocol):
    """A process group that is about to be joined by a server's workers."""

    checksum: int | None
    """CRC-32 of the bytes last sent; None where the other side keeps none."""

    def invitation(self) -> dict[str, Any]:
        """Return what the server has to be told to join."""
        ...

    def join(self) -> None:
        """Wait until all have joined, as rank 0."""
        ...

    def send(self, weights: Weights) -> None:
        """Broadcast the tensors one after the other."""
        ...

    def close(self) -> None:
        """Leave; whoever waits for the others stops waiting at its time limit."""
        ...


class StoreGroup:
    """A group that is formed through a TCP store of the trainer's: tensors go over gloo, or over torch's NCCL.

    Without a name it is the plain gloo group that `on_server/toolbox_vllm.py` joins, and keeps a checksum; with one,
    the named group of torch's own that SGLang's workers form.
    """

    def __init__(
        self, address: str, workers: int, timeout_s: float, *, name: str | None = None, backend: str = "gloo"
    ) -> None:
        from torch.distributed import TCPStore

        self.checksum: int | None = None
        self._name, self._backend = name, backend
        self._address, self._world = address, workers + 1
        self._limit = timedelta(seconds=timeout_s)
        self._store = TCPStore(address, 0, is_master=True, timeout=self._limit, wait_for_workers=False)
        self._group: Any = None
        self._sending = threading.Lock()

    def invitation(self) -> dict[str, Any]:
        """Return where the store is, and who the group's ranks are."""
        told = {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": self._world,
        }
        if self._name is None:
            return told | {"timeout_s": self._limit.total_seconds()}
        return told | {"group_name": self._name, "backend": self._backend}

    def join(self) -> None:
        """Wait for the workers."""
        from torch.distributed import PrefixStore, ProcessGroupGloo

        if self._name is None:
            self._group = ProcessGroupGloo(PrefixStore("weights", self._store), 0, self._world, timeout=self._limit)
        else:
            self._group = self._named(self._name)

    def send(self, weights: Weights) -> None:
        """Broadcast from rank 0."""
        checksum = 0
        with self._sending:
            for _, value in weights:
                here: Tensor = value.cpu() if self._backend == "gloo" else value
                self._group.broadcast([here], _from_rank_0()).wait()
                if self._name is None:
                    checksum = zlib.crc32(here.reshape(-1).view(torch.uint8).numpy().data, checksum)
        self.checksum = checksum if self._name is None else None

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and self._name is not None:
            threading.Thread(target=self._forget, args=(self._group,), daemon=True).start()
        self._group = None

    def _forget(self, group: Any) -> None:
        """Have torch forget a named group, once a broadcast that nobody answered has come to its time limit."""
        from torch.distributed import distributed_c10d

        with self._sending:  # torch would wait for it, too, and hold up all other threads
            distributed_c10d.destroy_process_group(group)

    def _named(self, name: str) -> Any:
        """Form the group as SGLang does: both sides must go through the same function of torch."""
        from torch.distributed import Backend, PrefixStore, distributed_c10d

        store, backend = PrefixStore(name, self._store), Backend(self._backend)
        make: Any = distributed_c10d._new_process_group_helper
        group, _ = make(self._world, 0, [], backend, store, group_name=name, timeout=self._limit)
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self._world)}
        return group


class NcclGroup:
    """Tensors from GPU to GPU; the other side is vLLM's own `nccl` backend.

    The trainer makes the group's NCCL id and sends it with the invitation; a sum over one element follows, which is
    vLLM's handshake. Trainer and server need NCCL versions that understand each other.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        from torch.cuda import nccl

        self.checksum: int | None = None
        self._device = device
        self._world = workers + 1
        self._id: bytes = nccl.unique_id()
        self._comm: Any = None

    def invitation(self) -> dict[str, Any]:
        """Return the id of the group, and who its ranks are."""
        return {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._world,
            "packed": False,
        }

    def join(self) -> None:
        """Wait for the workers, and take part in the handshake."""
        from torch.cuda import nccl

        with torch.cuda.device(self._device):
            self._comm = nccl.init_rank(self._world, self._id, 0)
            nccl.all_reduce([torch.zeros(1, device=self._device)], comms=[self._comm])
            torch.cuda.synchronize(self._device)

    def send(self, weights: Weights) -> None:
        """Broadcast from rank 0."""
        from torch.cuda import nccl

        with torch.cuda.device(self._device):
            for _, value in weights:
                nccl.broadcast([value.to(self._device)], root=0, comms=[self._comm])
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Drop the communicator."""
        self._comm = None


def together(here: Callable[[], None], there: Callable[[], Any], timeout_s: float) -> Any:
    """Run what trainer and server do at the same time and return the server's answer.

    If the server refuses, `here` is left behind, where it ends by its group's time limit: it waits for somebody who
    will not come. Raises whatever either raised, the server's first, for it says more.
    """
    caught: list[BaseException] = []

    def run() -> None:
        try:
            here()
        except Exception as error:  # carried over to the thread that asked
            caught.append(error)

    side = threading.Thread(target=run, daemon=True)
    side.start()
    answer = there()
    side.join(timeout_s)
    if caught:
        raise caught[0]
    if side.is_alive():
        raise TimeoutError(f"the server answered, and the process group was not done after {timeout_s:g} s")
    return answer


def own_address(set_by_user: str | None, server: str) -> str:
    """Return the address under which a server reaches this process: the one that the way to it leads out from."""
    if set_by_user:
        return set_by_user
    if is_here(server):
        return "127.0.0.1"
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or server, parts.port or 80))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"rollout.sync.address is not set, and no way to {server} was found ({error}): set it to the address "
                "under which the servers reach the trainer."
            ) from error
        return str(probe.getsockname()[0])


def _from_rank_0() -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return options
