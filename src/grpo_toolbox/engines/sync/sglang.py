"""How weights of SGLang servers are changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import Control, InFlight
from grpo_toolbox.engines.sync.groups import Group, together
from grpo_toolbox.engines.sync.weights import Weights, described

_PAUSE = {"drain": "retract", "recompute": "retract", "keep": "in_place", "abort": "abort"}
"""SGLang has no mode that waits; with nothing under way, as between two generations, taking back is waiting."""
_FLUSHES = 50
"""Times that the cache is asked to be emptied before it counts as stuck; five seconds in all."""


def stated(server: Control) -> str:
    """Return the weights version that the server states; a fresh one states "default"."""
    return str(server.get("/model_info")["weight_version"])


def state(server: Control, version: str) -> None:
    """Have the server state a version."""
    server.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})


def pause(server: Control, in_flight: InFlight | Literal["abort"], timeout_s: float) -> None:
    """Stop generating; requests that come now wait."""
    server.post("/pause_generation", {"mode": _PAUSE[in_flight]}, timeout_s=timeout_s)


def resume(server: Control) -> None:
    """Generate again."""
    server.post("/continue_generation", {})


def flush(server: Control, in_flight: InFlight, timeout_s: float) -> None:
    """Empty the radix cache; the server refuses while requests that are kept hold on to theirs.

    Its own way of waiting (`timeout=`) would wait for those, too, that were taken back and stand in the queue.
    """
    for attempt in range(0 if in_flight == "keep" else _FLUSHES):
        try:
            server.post("/flush_cache", timeout_s=timeout_s)
        except Refused:
            if attempt == _FLUSHES - 1:
                raise
            time.sleep(0.1)
        else:
            return


def load_folder(server: Control, folder: Path, timeout_s: float) -> None:
    """Read safetensors files."""
    server.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": False}, timeout_s=timeout_s)


def count_workers(server: Control) -> int:
    """Return how many ranks of a process group the server needs."""
    info = server.get("/server_info")
    return int(info.get("tp_size") or 1) * int(info.get("dp_size") or 1)


def join(server: Control, invitation: dict[str, Any], timeout_s: float) -> None:
    """Have the workers join the trainer's process group."""
    server.post("/init_weights_update_group", invitation, timeout_s=timeout_s)


def transfer(server: Control, group: Group, weights: Weights, timeout_s: float) -> None:
    """Begin, update, end; also where the update fails, for a session that stays open lets no other begin."""
    told = described(weights)
    body = {"names": told["names"], "dtypes": told["dtype_names"], "shapes": told["shapes"], "flush_cache": False}
    body |= {"group_name": group.invitation()["group_name"]}
    server.post("/begin_weight_update", {}, timeout_s=timeout_s)
    try:
        together(
            lambda: group.send(weights),
            lambda: server.post("/update_weights_from_distributed", body, timeout_s=timeout_s),
            timeout_s,
        )
    finally:
        server.post("/end_weight_update", {}, timeout_s=timeout_s)
