"""The adapter of a policy alone, to vLLM servers with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from grpo_toolbox.engines.sync import Control, Manner, push_each
from grpo_toolbox.engines.sync.weights import WeightFolders


class AdapterSync:
    """Adapter files in a folder that the servers read; their base model stays as it is.

    Each version is loaded under a name of its own, which the server also keeps keys and values apart by: nothing has
    to be paused or reset, and what is under way ends with the weights it began with. Loading under one name again and
    again (`load_inplace`) would have vLLM read the files anew for every batch.
    """

    def __init__(self, folders: WeightFolders, manner: Manner) -> None:
        self._folders = folders
        self._manner = manner
        self.served_as: str | None = None

    def push(self, servers: Sequence[Control], policy: nn.Module, version: int) -> None:
        """Write the adapter once; every server loads it and drops those before its predecessor."""
        folder = self._folders.write_adapter(policy, version)
        push_each(servers, version, lambda server: self._load(server, version, str(folder)))
        self.served_as = self._manner.stamp.of(version)

    def version(self, server: Control) -> int | None:
        """Return the newest version among the adapters that the server lists."""
        return max(self._loaded(server), default=None)

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version whose name was asked for: a server states the version of its base."""
        return asked

    def close(self) -> None:
        """Remove the files."""
        self._folders.close()

    def _load(self, server: Control, version: int, folder: str) -> None:
        loaded = self._loaded(server)
        drop = [one for one in sorted(loaded)[:-1] if one != version] + [one for one in loaded if one == version]
        for one in drop:
            self._ask(server, "unload", {"lora_name": self._manner.stamp.of(one)})
        self._ask(server, "load", {"lora_name": self._manner.stamp.of(version), "lora_path": folder})

    def _ask(self, server: Control, what: str, body: dict[str, str]) -> None:
        server.post(f"/v1/{what}_lora_adapter", body, timeout_s=self._manner.timeout_s)

    def _loaded(self, server: Control) -> list[int]:
        listed = [self._manner.stamp.version(str(one["id"])) for one in server.get("/v1/models")["data"]]
        return [version for version in listed if version is not None]
