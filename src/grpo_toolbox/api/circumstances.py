"""What a trainer of the library finds around it: arguments of later versions, several processes, progress bars."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_toolbox.api.configs import Arguments
from grpo_toolbox.config.fields import direct_fields
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


_OBJECTIVE = "overrides={'objective.name': 'my_module:my_surrogate'}, docs/algorithms.md"
_LOADER = "prompts are tokenised once, and there is no data loader"
INSTEAD = {
    "tokenizer": "processing_class",
    "predict": "evaluate",
    "callback_handler": "add_callback and pop_callback",
    "get_train_dataloader": f"train_dataset: {_LOADER}",
    "get_eval_dataloader": f"eval_dataset: {_LOADER}",
    "hyperparameter_search": "toolbox train --multirun",
    "vllm_generation": "nothing: the engine has the weights of each step",
    **dict.fromkeys(("compute_loss", "_compute_loss", "training_step", "prediction_step"), _OBJECTIVE),
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"), "optimizers"),
    **dict.fromkeys(("_calculate_rewards",), "reward_funcs"),
    **dict.fromkeys(("_prepare_inputs", "_get_train_sampler", "_get_eval_sampler"), f"train_dataset: {_LOADER}"),
    **dict.fromkeys(
        ("_generate", "_generate_single_turn", "_generate_and_score_completions"),
        "overrides={'advantage.name': 'my_module:my_estimator'} for advantages; sampling is rollout.engine's",
    ),
}
"""Attributes and methods of TRL's trainers that ours have not -> what to use."""


def refuse_overridden(trainer: type) -> None:
    """Raise ConfigError for a subclass with a method of TRL's that nothing would call."""
    for name in INSTEAD:
        if name in vars(trainer):
            raise ConfigError(f"{trainer.__name__}.{name}() would never be called here. Use {INSTEAD[name]}.")


def not_there(trainer: type, name: str) -> AttributeError:
    """Build the error for an attribute that a trainer does not have."""
    meant = f" Use {INSTEAD[name]}." if name in INSTEAD else ""
    return AttributeError(f"{trainer.__name__} has no {name!r}.{meant}", name=name)


@contextmanager
def in_fields(args: Arguments) -> Iterator[None]:
    """Say beside the keys of ours in a ConfigError of the block which of TRL's fields they are."""
    try:
        yield
    except ConfigError as error:
        known = direct_fields(args.algorithm).items()
        named = [f"{key} is {one.name}" for key, one in known if re.search(rf"{re.escape(key)}\b", str(error))]
        if not named:
            raise
        raise ConfigError(f"{error} (In {type(args).__name__} {', '.join(named)}.)") from error


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
