"""Loaded by vLLM's workers, in vLLM's environment: weights over gloo, where NCCL is not possible.

    PYTHONPATH=<this folder> vllm serve … --worker-extension-cls toolbox_vllm.Extension
        --weight-transfer-config '{"backend": "toolbox_gloo"}'

It imports nothing of the toolbox. The trainer is rank 0 of a process group, the workers are the ranks behind it; they
receive tensors in the order in which `update_weights` named them, all in one update. All are received before the first
is loaded, so that a trainer that dies on the way leaves the former weights as they were. They are loaded through vLLM's
layer-wise reload: a layer whose parameters were packed for the processor has to be unpacked before it can take others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "toolbox_gloo"


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the trainer's store is, and who belongs to the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 60.0


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """The tensors to come, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine):
    """Receives weights that the trainer broadcasts."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    checksum = 0
    """CRC-32 of the bytes of the last update, in the order of arrival."""
    _group: Any = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group; one that was joined before is left."""
        self.shutdown()
        config = self.parallel_config
        rank = config.data_parallel_index * config.world_size + config.rank + init_info.rank_offset
        limit = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=limit)
        self._group = ProcessGroupGloo(PrefixStore("weights", store), rank, init_info.world_size, timeout=limit)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Receive all, then load; a failure leaves layers that the next update can load.

        Loading is not left to `finish_weight_update`: a worker whose finish fails takes no other update ever after.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._group is None:
            raise RuntimeError("weights were announced before the group was joined (/init_weight_transfer_engine)")
        self.checksum = 0
        received = list(self._arriving(update_info))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights((name, value.to(self.device)) for name, value in received)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _arriving(self, update_info: GlooUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        options = BroadcastOptions()
        options.rootRank = 0
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast([value], options).wait()
            self.checksum = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, self.checksum)
            yield name, value


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)


class Extension:
    """What the trainer may call on every worker through `/collective_rpc`."""

    def toolbox_transfer(self) -> dict[str, Any]:
        """Return the backend that weights are transferred with, and the checksum of the last update."""
        engine: Any = getattr(self, "weight_transfer_engine", None)
        config: Any = self.vllm_config.weight_transfer_config  # type: ignore[attr-defined]
        return {"backend": getattr(config, "backend", None), "checksum": getattr(engine, "checksum", None)}
