"""The policy's weights as a server's loader expects them, and as files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from grpo_toolbox.errors import ConfigError, EngineError
from grpo_toolbox.models.forward import plain_model
from grpo_toolbox.models.lora import merged_state_dict

Weights = list[tuple[str, Tensor]]

_MEMORY = Path("/dev/shm")
"""A folder that is memory: nothing waits for a disk."""
_SHARD = 5 << 30
"""Bytes of a file, more or less."""
_LOCAL = ("127.0.0.1", "localhost", "::1")


def served_weights(policy: nn.Module, dtype: torch.dtype | None = None) -> Weights:
    """Return all weights under the names of the policy's checkpoint: an adapter added in, tied tensors once.

    `dtype` casts what is floating point. Tensors that need no change are the policy's own, not copies.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    model: Any = plain_model(policy)
    state = remove_tied_weights_from_state_dict(dict(merged_state_dict(policy)), model)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    state = {name: value for name, value in state.items() if not any(one.search(name) for one in ignored)}
    named = revert_weight_conversion(model, state)
    return [(name, _cast(value.detach(), dtype).contiguous()) for name, value in named.items()]


def described(weights: Weights) -> dict[str, list[Any]]:
    """Return names, types and shapes: what a server has to know before tensors arrive."""
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(value.dtype).removeprefix("torch.") for _, value in weights],
        "shapes": [list(value.shape) for _, value in weights],
    }


def is_here(address: str) -> bool:
    """Tell whether a server's address is this machine's own."""
    return (urlsplit(address).hostname or address) in _LOCAL


def choose_folder(set_by_user: str | None, run_dir: Path, servers: Sequence[str], needed: int) -> Path:
    """Return where weights are written for servers to read; `needed` bytes must fit in memory twice to go there.

    Raises ConfigError where a server on another machine could not read it.
    """
    if set_by_user:
        return Path(set_by_user).absolute()
    elsewhere = [one for one in servers if not is_here(one)]
    if elsewhere:
        raise ConfigError(
            f"rollout.sync.folder is not set, and {elsewhere[0]} is another machine: set it to a folder that trainer "
            "and servers share, or rollout.sync.mode=nccl or gloo to send weights over the network."
        )
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 3 * needed:
        return _MEMORY
    return run_dir.absolute()


class WeightFolders:
    """Folders of one run, one for each weights version; the newest two are kept.

    The one before the newest is kept for a server that is still reading it.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.root = root / f"grpo-toolbox-{run}"
        self._kept: list[Path] = []

    def write_weights(self, weights: Weights, version: int) -> Path:
        """Write safetensors files (of about 5 GB) and return their folder, complete."""
        from safetensors.torch import save_file

        needed = sum(value.nbytes for _, value in weights)
        partial = self._begin(version, needed)
        shards = _shards(weights)
        for number, shard in enumerate(shards, start=1):
            name = "model" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}"
            save_file({key: _whole(value) for key, value in shard}, partial / f"{name}.safetensors", {"format": "pt"})
        return self._finish(partial, version)

    def write_adapter(self, policy: Any, version: int) -> Path:
        """Write the adapter alone, in PEFT's format, and return its folder, complete."""
        partial = self._begin(version, 0)
        policy.save_pretrained(partial, save_embedding_layers=False)
        return self._finish(partial, version)

    def close(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._kept = []

    def _begin(self, version: int, needed: int) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise EngineError(
                f"weights {version} take {needed / 1e9:.1f} GB and {self.root} has {free / 1e9:.1f} GB left: set "
                "rollout.sync.folder to one with room for two versions, or rollout.sync.dtype=bfloat16."
            )
        partial = self.root / f"v{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return partial

    def _finish(self, partial: Path, version: int) -> Path:
        done = self.root / f"v{version}"
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        self._kept = [*(one for one in self._kept if one != done), done]
        while len(self._kept) > 2:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        return done


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _shards(weights: Weights) -> list[Weights]:
    shards: list[Weights] = [[]]
    room = _SHARD
    for name, value in weights:
        if value.nbytes > room and shards[-1]:
            shards.append([])
            room = _SHARD
        shards[-1].append((name, value))
        room -= value.nbytes
    return shards


def _whole(value: Tensor) -> Tensor:
    """Copy a part of a larger tensor, such as one expert of a stack: a file holds whole storages."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
