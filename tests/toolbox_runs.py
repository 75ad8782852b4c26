"""Real runs for the tests: the command line in this process, and what a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.checkpoint import latest_checkpoint, load_checkpoint
from grpo_toolbox.cli.main import main
from grpo_toolbox.trainer import Run

SMALL = (
    "callbacks=none",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "data.path='builtin:additions?max_sum=2'",
)
"""Steps of 16 rollouts of the tiny policy, about 20 ms each, on the six additions of a sum of at most 2."""


def toolbox_train(*overrides: object) -> int:
    """`toolbox train <overrides>`, and its exit code."""
    return main(["train", *map(str, overrides)])


def built_run(*overrides: object) -> Run:
    """What `toolbox train <overrides>` builds, before it is trained."""
    built: list[Run] = []

    def keep(run: Run) -> dict[str, float]:
        built.append(run)
        return {"interrupted": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_toolbox.trainer.train", keep)
        assert toolbox_train(*overrides) == 0
    return built[0]


def all_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "tokens_per_s"))}
        for line in all_metrics(run_dir)
    ]


def steps(run_dir: Path) -> list[int]:
    """The steps of metrics.jsonl, in the order of its lines."""
    return [line["step"] for line in all_metrics(run_dir)]


def checkpoints(run_dir: Path) -> list[int]:
    """The steps that checkpoints are kept of."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir())


def state(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint holds for going on."""
    newest = latest_checkpoint(run_dir / "checkpoints")
    assert newest is not None
    return load_checkpoint(newest, "cpu")


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """The places at which two states differ, bit for bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = {*first, *second}
        return [
            place
            for key in sorted(keys, key=str)
            for place in differences(first.get(key, "absent"), second.get(key, "absent"), f"{where}/{key}")
        ]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for index, pair in pairs for place in differences(*pair, f"{where}/{index}")]
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if torch.equal(first, second) else [where]
    return [] if type(first) is type(second) and first == second else [where]


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order: with more threads their split, and so the last bit, may depend on the load."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)
