"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.callbacks.loggers import need_extra, numbers
from grpo_toolbox.errors import unknown_option
from grpo_toolbox.types import RunInfo, Step

MODES = ("online", "offline", "disabled", "shared")


class Wandb(Callback):
    """Log every metric to Weights & Biases; `mode: offline` writes to `<run_dir>/wandb` for a later `wandb sync`.

    The run is named like the run folder unless `name` is set; a mode of None leaves the choice to WANDB_MODE. A
    resumed run goes on under its id.
    """

    def __init__(
        self,
        project: str = "grpo-toolbox",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: str | None = None,
    ) -> None:
        need_extra("wandb")
        if mode is not None and mode not in MODES:
            raise unknown_option("callbacks.wandb.mode", mode, MODES)
        self._name = name
        self._init: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "notes": notes,
            "mode": mode,
        }
        self._init["tags"] = list(tags)

    def on_start(self, run: RunInfo) -> None:
        import wandb

        id_file = run.run_dir / "wandb" / "run_id"
        resumed = run.first_step > 1 and id_file.exists()
        self._run = wandb.init(
            **self._init,
            name=self._name or run.name,
            dir=str(run.run_dir),
            config=dict(run.config),
            id=id_file.read_text(encoding="utf-8") if resumed else None,
            resume="allow" if resumed else None,
            settings=wandb.Settings(console="off"),  # its capture of stdout would record every frame of the display
        )
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(self._run.id, encoding="utf-8")

    def on_step(self, step: Step) -> None:
        self._run.log(numbers(step.metrics), step=step.number)

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._run.finish()
