"""`toolbox train [group=option] [key=value] …`: Hydra composes the run, we check it, build it and train it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from grpo_toolbox.cli.help import train_help
from grpo_toolbox.errors import ConfigError, ToolboxError

SIGNAL_EXIT = 128
"""A shell's convention: stopped by signal n exits with 128 + n."""


def run(argv: Sequence[str]) -> int:
    """Compose, check, build and train; returns 0, or 128 + the signal that stopped the run."""
    if "--help" in argv or "-h" in argv:
        print(train_help([word for word in argv if not word.startswith("-")]))
        return 0
    import hydra
    from hydra.core.config_store import ConfigStore

    from grpo_toolbox.cli.overrides import explain
    from grpo_toolbox.config.schema import RunConfig

    ConfigStore.instance().store(name="schema", node=RunConfig, provider="grpo_toolbox")
    codes: list[int] = []
    refused: list[ToolboxError] = []

    def task(config: Any) -> None:
        try:
            codes.append(_train(config))
        except ToolboxError as error:  # carried past Hydra, which would print its own lines around it
            refused.append(error)

    former = sys.argv
    sys.argv = ["toolbox train", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing, so that errors look like ours
    try:
        hydra.main(version_base="1.3", config_path="pkg://grpo_toolbox.conf", config_name="train")(task)()
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        sys.argv = former
    if refused:
        raise refused[0]
    return max(codes, default=0)


def _train(config: Any) -> int:
    """Train one composed config (one job of a `--multirun`)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    from grpo_toolbox.config.check import check_config

    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]} has no default: set {missing[0]}=… on the command line or in the experiment.")
    try:
        typed: Any = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(str(error)) from error
    check_config(typed)
    return _run(typed, OmegaConf.to_container(config, resolve=True))


def _run(config: Any, plain: Any) -> int:
    from grpo_toolbox.config.folder import open_run_dir, write_config
    from grpo_toolbox.config.inputs import check_inputs

    rows = check_inputs(config)
    info = open_run_dir(config, plain)

    from grpo_toolbox.config.build import build_run
    from grpo_toolbox.trainer import train

    built = build_run(config, rows, info)
    write_config(info)
    summary = train(built)
    return SIGNAL_EXIT + int(summary["interrupted"]) if summary["interrupted"] else 0
