"""How weights of vLLM servers are changed; `VLLM_SERVER_DEV_MODE=1` opens the endpoints (`toolbox serve` sets it)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from grpo_toolbox.engines.sync import Control, InFlight
from grpo_toolbox.engines.sync.groups import Group, together
from grpo_toolbox.engines.sync.weights import Weights, described
from grpo_toolbox.errors import EngineError

_PAUSE = {"drain": "wait", "recompute": "keep", "keep": "keep&clear_cache=false", "abort": "abort"}
"""By itself a pause clears caches, and has what is under way computed again."""
_RESETS = 20
"""Times that a prefix cache is asked to be reset before it counts as stuck; a second in all."""


def stated(server: Control) -> str:
    """Return the weights version that the server states; a fresh one states "default"."""
    return str(server.get("/weight_info")["weight_version"])


def state(server: Control, version: str) -> None:
    """Have the server state a version."""
    server.post("/update_weight_version", {"new_version": version})


def pause(server: Control, in_flight: InFlight | Literal["abort"], timeout_s: float) -> None:
    """Stop generating; requests that come now wait."""
    server.post(f"/pause?mode={_PAUSE[in_flight]}", timeout_s=timeout_s)


def resume(server: Control) -> None:
    """Generate again."""
    server.post("/resume")


def flush(server: Control, in_flight: InFlight, timeout_s: float) -> None:
    """Reset the prefix cache, and again where blocks were still held.

    With `keep`, what is under way holds on to its blocks and vLLM resets nothing: requests have to carry a cache salt.
    """
    running = "?reset_running_requests=true" if in_flight == "recompute" else ""
    for attempt in range(1 if in_flight == "keep" else _RESETS):
        if server.post(f"/reset_prefix_cache{running}", timeout_s=timeout_s)["success"]:
            return
        time.sleep(0.01 * min(attempt, 5))
    if in_flight != "keep":
        raise EngineError(f"{server.address} does not reset its prefix cache: something still holds blocks of it.")


def load_folder(server: Control, folder: Path, timeout_s: float) -> None:
    """Read safetensors files; no code of ours is needed."""
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    server.post("/collective_rpc", call, timeout_s=timeout_s)


def count_workers(server: Control) -> int:
    """Return how many ranks of a process group the server needs."""
    return int(server.get("/get_world_size?include_dp=true")["world_size"])


def join(server: Control, invitation: dict[str, Any], timeout_s: float) -> None:
    """Have the workers join the trainer's process group."""
    server.post("/init_weight_transfer_engine", {"init_info": invitation}, timeout_s=timeout_s)


def transfer(server: Control, group: Group, weights: Weights, timeout_s: float) -> None:
    """Start, update, finish; and compare checksums where both sides take them."""
    server.post("/start_weight_update", timeout_s=timeout_s)
    told = {"update_info": described(weights)}
    together(lambda: group.send(weights), lambda: server.post("/update_weights", told, timeout_s=timeout_s), timeout_s)
    server.post("/finish_weight_update", {}, timeout_s=timeout_s)
    if group.checksum is not None:
        _compare_checksums(server, group.checksum, timeout_s)


def _compare_checksums(server: Control, sent: int, timeout_s: float) -> None:
    answers = server.post("/collective_rpc", {"method": "toolbox_transfer"}, timeout_s=timeout_s)["results"]
    received = {one["checksum"] for one in answers}
    if received != {sent}:
        raise EngineError(f"{server.address} received other bytes than were sent (CRC-32 {received}, {sent}).")


def backend(server: Control) -> str | None:
    """Return the transfer backend that the server was started with, where it has loaded our extension."""
    answers = server.post("/collective_rpc", {"method": "toolbox_transfer"})["results"]
    return answers[0]["backend"] if answers else None
