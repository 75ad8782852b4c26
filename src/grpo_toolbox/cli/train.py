"""`toolbox train [group=option] [key=value] …`: Hydra composes the run, we check it, build it and train it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_toolbox.allocator import reuse_freed_memory
from grpo_toolbox.cli.help import train_help
from grpo_toolbox.errors import ToolboxError

if TYPE_CHECKING:  # help does not wait for OmegaConf
    from grpo_toolbox.config.schema import RunConfig

SIGNAL_EXIT = 128
"""A shell's convention: stopped by signal n exits with 128 + n."""


def run(argv: Sequence[str]) -> int:
    """Compose, check, build and train; returns 0, 128 + the signal that stopped the run, or 1 for a failed sweep."""
    if "--help" in argv or "-h" in argv:
        print(train_help([word for word in argv if not word.startswith("-") and "=" not in word]))
        return 0
    return run_composed("train", argv, _train)


def run_composed(command: str, argv: Sequence[str], work: Callable[[tuple[RunConfig, dict[str, Any]]], int]) -> int:
    """Compose and check what `argv` describes, and do `work` on it; a code other than 0 ends a sweep."""
    from grpo_toolbox.cli.compose import (
        choices,
        experiment_keys,
        job_overrides,
        keys,
        method_keys,
        read_arguments,
        run_jobs,
    )
    from grpo_toolbox.config.typed import typed_config

    args = read_arguments(argv, command)
    reuse_freed_memory()
    if os.getcwd() not in sys.path:  # an installed command does not look for the user's modules there by itself
        sys.path.append(os.getcwd())
    failures: list[Exception] = []
    flags = [] if args.config_dir is None else ["--config-dir", args.config_dir]
    flags += [] if args.config_name is None else ["--config-name", args.config_name]

    def task(composed: Any) -> None:
        overrides = job_overrides() if args.multirun else args.overrides
        sys.argv = ["toolbox", command, *flags, *overrides]  # what the display says to repeat
        if args.multirun:
            print(f"\n{' '.join(overrides)}", flush=True)
        try:
            code = work(typed_config(composed, choices(), keys(overrides), experiment_keys(), method_keys()))
        except Exception as error:  # carried past Hydra, which would print lines of its own around it
            failures.append(error)
            if args.multirun and isinstance(error, ToolboxError):
                print(f"toolbox {command}: {' '.join(overrides)}: {error}", file=sys.stderr)
            return
        if code:
            raise _Stopped(code)  # no Exception, so that a signal ends a whole sweep

    try:
        run_jobs(args, task)
    except _Stopped as stopped:
        return stopped.code
    for error in failures:
        if not args.multirun or not isinstance(error, ToolboxError):
            raise error
    return 1 if failures else 0


class _Stopped(KeyboardInterrupt):
    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def _train(checked: tuple[RunConfig, dict[str, Any]]) -> int:
    """Train one checked config (with its plain form), or its stages; returns 0, or 128 + the signal that stopped it."""
    config, plain = checked
    if config.trainer.stages is not None:
        from grpo_toolbox.cli.stages import train_stages

        return train_stages(config, plain, _train_one)
    return _train_one(checked)


def _train_one(checked: tuple[RunConfig, dict[str, Any]]) -> int:
    from grpo_toolbox.config.folder import claim_run_dir, write_config
    from grpo_toolbox.config.inputs import check_inputs
    from grpo_toolbox.interrupts import GracefulStop

    config, plain = checked
    if config.trainer.name == "trl":
        from grpo_toolbox.backends.trl_config import check_trl

        check_trl(config)
    inputs = check_inputs(config)
    with GracefulStop(), claim_run_dir(config, plain) as info:
        from transformers.utils import logging as transformers_logging

        build, train = _backend(config)
        if not sys.stderr.isatty():  # a bar draws itself anew with control characters, which a file would keep
            transformers_logging.disable_progress_bar()
        built = build(config, inputs, info)
        transformers_logging.disable_progress_bar()  # the display shows progress; saving a checkpoint needs no bar
        if info.first_step > 1:
            write_config(info)
        summary = train(built)
    return SIGNAL_EXIT + int(summary["interrupted"]) if summary["interrupted"] else 0


def _backend(config: RunConfig) -> tuple[Callable[..., Any], Callable[[Any], dict[str, float]]]:
    """Return what builds the run, and what trains it."""
    if config.trainer.name == "trl":
        from grpo_toolbox.backends.trl import build_trl_run, train_on_trl

        return build_trl_run, partial(train_on_trl, config)
    from grpo_toolbox.config.build import build_run
    from grpo_toolbox.trainer import train

    return build_run, train
