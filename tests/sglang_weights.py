"""SGLang's side of a weight update, taken at its word: what it refuses, what it forgets, and what goes stale."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

FIELDS: dict[str, dict[str, type]] = {
    "/pause_generation": {"mode": str},
    "/continue_generation": {},
    "/update_weight_version": {"new_version": str, "abort_all_requests": bool},
    "/update_weights_from_disk": {"model_path": str, "flush_cache": bool},
    "/init_weights_update_group": {
        "master_address": str,
        "master_port": int,
        "rank_offset": int,
        "world_size": int,
        "group_name": str,
        "backend": str,
    },
    "/begin_weight_update": {},
    "/update_weights_from_distributed": {
        "names": list,
        "dtypes": list,
        "shapes": list,
        "group_name": str,
        "flush_cache": bool,
    },
    "/end_weight_update": {},
}
"""What each endpoint of SGLang 0.5.23 knows of what we send; all of it has to be there, and nothing else."""
_LIMIT = timedelta(seconds=20)


class Refusal(Exception):
    """HTTP 400 with these words."""


class SglangWeights:
    """Weights that change by SGLang's endpoints, and the prefixes that were computed with former ones."""

    def __init__(self, model: Any, version: str) -> None:
        self.models = [model]
        """As it was at first, and after each update."""
        self.version = version
        self.path = "policy"
        """Where the model is said to come from: an update from disk moves it."""
        self.calls: list[str] = []
        """Paths, with the mode of a pause, in their order."""
        self.broken: set[str] = set()
        """Paths that answer with an error."""
        self.drawing = threading.Lock()
        """Held while completions are drawn, and through a pause."""
        self._paused: str | None = None
        self._session = False
        self._groups: dict[str, Any] = {}
        self._cached: dict[tuple[int, ...], int] = {}
        """By prompt, the update whose weights its keys and values are of."""

    def drawn_by(self, ids: tuple[int, ...], *, cached: bool) -> int:
        """Return the update whose model draws behind a prompt: with a cache that nobody flushed, a former one."""
        newest = len(self.models) - 1
        return self._cached.setdefault(ids, newest) if cached else newest

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Return status and answer of an endpoint."""
        name = path.partition("?")[0]
        self.calls.append(f"{name} {body['mode']}" if body and "mode" in body else path)
        try:
            if name in self.broken:
                raise Refusal(f"{name} is broken")
            if name == "/flush_cache":
                return 200, self._flush(path)
            _check(name, body)
            getattr(self, name.replace("/", "_"))(**(body or {}))
        except Refusal as error:
            return 400, {"success": False, "message": str(error)}
        return 200, {"success": True, "message": "Success"}

    def _flush(self, path: str) -> str:
        if path != "/flush_cache":  # with a timeout it waits for those in the queue, too
            raise Refusal(f"no {path}")
        if self._paused not in ("retract", "abort"):
            raise Refusal("not performed: there are running requests")
        self._cached.clear()
        return "Cache flushed.\n"

    def _pause_generation(self, mode: str) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise Refusal(f"no mode {mode}")
        if self._paused is None:
            self.drawing.acquire()
        self._paused = mode

    def _continue_generation(self) -> None:
        if self._paused is not None:
            self.drawing.release()
        self._paused = None

    def _update_weight_version(self, new_version: str, abort_all_requests: bool) -> None:
        self.version = new_version

    def _update_weights_from_disk(self, model_path: str, flush_cache: bool) -> None:
        weights = {
            key: value for file in Path(model_path).glob("*.safetensors") for key, value in load_file(file).items()
        }
        self._load(weights)
        self.path = model_path

    def _init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        if backend != "gloo" or group_name in self._groups:
            raise Refusal(f"no group {group_name} over {backend}")
        store = TCPStore(master_address, master_port, is_master=False, timeout=_LIMIT)
        for prefix in (group_name, f"{group_name}/", "cpu/"):  # as torch names what a group of this name shares
            store = PrefixStore(prefix, store)
        self._groups[group_name] = ProcessGroupGloo(store, rank_offset, world_size, timeout=_LIMIT)

    def _begin_weight_update(self) -> None:
        if self._session:
            raise Refusal("a weight-update session is already open; call end_weight_update() first")
        self._session = True

    def _update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[list[int]],
        group_name: str,
        flush_cache: bool,
    ) -> None:
        if not self._session:
            raise Refusal("must run between begin_weight_update() and end_weight_update()")
        options = BroadcastOptions()
        options.rootRank = 0
        weights = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                self._groups[group_name].broadcast([weights[name]], options).wait()
            except RuntimeError as error:  # the sender is gone
                raise Refusal(f"Failed to receive weights: {error}") from error
        self._load(weights)

    def _end_weight_update(self) -> None:
        if not self._session:
            raise Refusal("no weight-update session is open; call begin_weight_update() first")
        self._session = False

    def _load(self, weights: dict[str, Any]) -> None:
        if self._paused is None:
            raise Refusal("requests may be under way: pause first")
        model = copy.deepcopy(self.models[-1])
        model.load_state_dict(weights)
        self.models.append(model)


def _check(name: str, body: dict[str, Any] | None) -> None:
    known = FIELDS.get(name)
    if known is None or set(body or {}) != set(known):
        raise Refusal(f"{name} takes {known}, not {body}")
    wrong = [key for key, value in (body or {}).items() if type(value) is not known[key]]
    if wrong:
        raise Refusal(f"{name}: {wrong} of another type")
