"""Running `toolbox` inside the test process, and composing configs without running them."""

from __future__ import annotations

import io
import itertools
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from grpo_toolbox.cli.compose import choices, experiment_keys, keys, method_keys
from grpo_toolbox.cli.main import main
from grpo_toolbox.config.schema import RunConfig, schema_node
from grpo_toolbox.config.typed import typed_config

SHORT = (
    *("trainer.max_steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=3"),
    "callbacks=none",
)
"""Overrides that make a run of two small steps."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


def toolbox(*words: str) -> Result:
    """Run a command as the console script would, and return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def refused(*words: str) -> str:
    """Run `toolbox train` with these words and return the one line with which it refuses."""
    result = toolbox("train", *words)
    assert result.code == 1, result
    lines = result.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("toolbox train: ")
    return lines[0].removeprefix("toolbox train: ")


def write_module(source: str) -> str:
    """Write a module into the working directory and return its name, which no other test has."""
    name = f"users_module_{next(_numbers)}"
    Path(f"{name}.py").write_text(dedent(source))
    return name


def composed(*overrides: str) -> tuple[RunConfig, dict[str, Any]]:
    """Compose and check a config as `toolbox train` does."""
    ConfigStore.instance().store(name="schema", node=schema_node(), provider="tests")
    with initialize_config_module("grpo_toolbox.conf", version_base="1.3"):
        config = compose("train", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    OmegaConf.set_struct(config, True)
    return typed_config(config, choices(), keys(overrides), experiment_keys(), method_keys())
