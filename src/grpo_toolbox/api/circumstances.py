"""What a trainer of the library finds around it: arguments of later versions, several processes, progress bars."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_toolbox.errors import ConfigError

LATER = {
    "tools": "tools come later: train on completions of one turn",
    "environment_factory": "environments come later: train on completions of one turn",
    "rollout_func": "rollout.engine samples here, and tools and environments come later",
}


def refuse_later(**given: Any) -> None:
    """Raise ConfigError for an argument of TRL's that cannot be had yet."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} cannot be had yet: {LATER[name]}.")


def refuse_processes() -> None:
    """Raise ConfigError in one of several processes that a launcher has started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: one process trains, launches of several come later. Start it with "
            "accelerate launch --num_processes 1."
        )


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for each checkpoint in the block."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
