"""All weights, through files or over process groups, to any kind of server that a module of this folder knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from grpo_toolbox.engines.sync import FAILURES, Control, Manner, Procedure, push_each, updating
from grpo_toolbox.engines.sync.groups import Group, together
from grpo_toolbox.engines.sync.weights import WeightFolders, Weights, served_weights


class FileProcedure(Procedure, Protocol):
    """A server that reads weights from a folder."""

    def load_folder(self, server: Control, folder: Path, timeout_s: float) -> None:
        """Read safetensors files."""
        ...


class GroupProcedure(Procedure, Protocol):
    """A server whose workers join a process group."""

    def count_workers(self, server: Control) -> int:
        """Return how many ranks it needs."""
        ...

    def join(self, server: Control, invitation: dict[str, Any], timeout_s: float) -> None:
        """Have the workers join the trainer's group."""
        ...

    def transfer(self, server: Control, group: Group, weights: Weights, timeout_s: float) -> None:
        """Send the weights and have the server take them."""
        ...


class FolderSync:
    """Safetensors files in a folder that the servers read; they need no code of ours."""

    served_as: str | None = None

    def __init__(self, procedure: FileProcedure, folders: WeightFolders, manner: Manner) -> None:
        self._procedure = procedure
        self._folders = folders
        self._manner = manner

    def push(self, servers: Sequence[Control], policy: nn.Module, version: int) -> None:
        """Write the weights once; every server reads them."""
        manner = self._manner
        folder = self._folders.write_weights(served_weights(policy, manner.dtype), version)

        def deliver(server: Control) -> None:
            with updating(self._procedure, server, manner, version):
                self._procedure.load_folder(server, folder, manner.timeout_s)

        push_each(servers, version, deliver)

    def version(self, server: Control) -> int | None:
        """Return the version of this run's that the server states."""
        return self._manner.stamp.version(self._procedure.stated(server))

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version of weights that the server states."""
        return self._manner.stamp.drew(stated, asked)

    def close(self) -> None:
        """Remove the files."""
        self._folders.close()


class TransferSync:
    """Tensors broadcast over a process group of gloo or NCCL, each server's its own."""

    served_as: str | None = None

    def __init__(self, procedure: GroupProcedure, make_group: Callable[[str, int], Group], manner: Manner) -> None:
        self._procedure = procedure
        self._make_group = make_group
        self._manner = manner
        self._groups: dict[str, Group] = {}

    def push(self, servers: Sequence[Control], policy: nn.Module, version: int) -> None:
        """Send the policy's tensors to every server at a time."""
        weights = served_weights(policy, self._manner.dtype)
        push_each(servers, version, lambda server: self._deliver(server, weights, version))

    def version(self, server: Control) -> int | None:
        """Return the version of this run's that the server states."""
        return self._manner.stamp.version(self._procedure.stated(server))

    def drew(self, stated: str, asked: int) -> int | None:
        """Return the version of weights that the server states."""
        return self._manner.stamp.drew(stated, asked)

    def close(self) -> None:
        """Leave all groups."""
        for address in list(self._groups):
            self._leave(address)

    def _deliver(self, server: Control, weights: Weights, version: int) -> None:
        if self.version(server) is None:  # a new process does not know the group that its predecessor was in
            self._leave(server.address)
        group = self._groups.get(server.address) or self._joined(server)
        try:
            with updating(self._procedure, server, self._manner, version):
                self._procedure.transfer(server, group, weights, self._manner.timeout_s)
        except FAILURES:
            self._leave(server.address)
            raise

    def _joined(self, server: Control) -> Group:
        group = self._make_group(server.address, self._procedure.count_workers(server))
        limit = self._manner.timeout_s
        together(group.join, lambda: self._procedure.join(server, group.invitation(), limit), limit)
        self._groups[server.address] = group
        return group

    def _leave(self, address: str) -> None:
        group = self._groups.pop(address, None)
        if group is not None:
            group.close()
