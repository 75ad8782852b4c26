"""What scripts print and write of metrics around a trainer, as transformers' Trainer does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class TrainOutput(NamedTuple):
    """What `train` returns, as transformers' does."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Return the metrics of a split (train, eval) as aligned lines."""
    width = max((len(name) for name in metrics), default=0)
    lines = [f"  {name:<{width}} = {_shown(metrics[name])}" for name in sorted(metrics)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and with `combined` add them to `all_results.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        every = folder / "all_results.json"
        before = json.loads(every.read_text(encoding="utf-8")) if every.is_file() else {}
        _write(every, before | dict(metrics))


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=4, sort_keys=True), encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
