"""What a trainer of the library finds around it: arguments of later versions, several processes, progress bars."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_toolbox.errors import ConfigError, suggest

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


FORMER = {
    "tokenizer": "processing_class",
    "processor": "processing_class",
    "config": "args",
    "reward_model": "reward_funcs",
    "reward_function": "reward_funcs",
    "reward_func": "reward_funcs",
    "reward_processing_class": "reward_processing_classes",
    "ref_model": "beta in args: the reference is the model as training begins",
    "ref_policy": "beta in args: the reference is the model as training begins",
    "policy": "model",
    "dataset": "train_dataset",
    "data_collator": "nothing: prompts are encoded by the trainer",
    "compute_metrics": "reward_funcs, which score evaluations, too, and log_metric in them",
    "max_prompt_length": "max_prompt_length in args",
    "peft_model": "model, which may have an adapter",
}
"""Arguments of other versions and trainers -> what to use."""


def refuse_unknown(trainer: type, given: Iterable[str]) -> None:
    """Raise ConfigError for a keyword argument that a trainer does not take, with the one that is meant."""
    known = [*inspect.signature(trainer.__init__).parameters][1:]  # type: ignore[misc]  # of the class at hand
    for name in given:
        if name in known:
            continue
        meant = f" Use {FORMER[name]}." if name in FORMER else suggest(name, known)
        meant = meant or f" Settings go into args={trainer.__name__.replace('Trainer', 'Config')}(…)."
        raise ConfigError(f"{trainer.__name__}({name}=…) is not an argument.{meant} There are: {', '.join(known)}.")


class OneProcess:
    """What scripts ask of `trainer.accelerator`, where one process trains."""

    is_main_process = is_local_main_process = is_last_process = True
    num_processes, process_index, local_process_index = 1, 0, 0

    def __init__(self, device: Any) -> None:
        self.device = device

    def wait_for_everyone(self) -> None:
        """There is nobody to wait for."""

    def print(self, *words: Any) -> None:
        """Print, as in the only process."""
        print(*words)

    def unwrap_model(self, model: Any) -> Any:
        """Return the model, which is not wrapped."""
        return model


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
