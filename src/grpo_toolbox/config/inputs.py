"""The data, the model's place, the reward and the callbacks, checked without torch: most mistakes show in a second."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_toolbox.callbacks import Callback, build_callbacks
from grpo_toolbox.config.schema import DataConfig, RolloutConfig, RunConfig
from grpo_toolbox.data import load_rows
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.paths import resolve_model_path
from grpo_toolbox.rewards import Reward, build_reward, check_options, named_reward

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """Objects of a program's that stand in place of what the config names; None: what the config names."""

    model: Any = None
    """A causal language model, plain or with an adapter of PEFT's."""
    tokenizer: Any = None
    adapter: Any = None
    """PEFT's config of a fresh adapter."""
    optimizer: Any = None
    lr_at: Callable[[int], float] | None = None
    """The learning rate of a step."""


@dataclass(frozen=True)
class Inputs:
    """What a run is given from outside."""

    rows: Rows
    eval_rows: Rows
    callbacks: Sequence[Callback]
    reward: Reward | None
    """None for a reward that loads a model: it is built when everything else has been found good."""
    given: Given = field(default_factory=Given)


def check_inputs(config: RunConfig) -> Inputs:
    """Return the checked inputs after the reward, the callbacks, the model path and the data have been looked at."""
    resolve_model_path(config.model.path)
    callbacks = build_callbacks(config.callbacks)
    rows, eval_rows = read_data(config.data)
    check_size(config.rollout, len(rows))
    reward = None if _loads_a_model(config.reward) else fitting_reward(config, [*rows, *eval_rows])
    return Inputs(rows, eval_rows, callbacks, reward)


def check_size(rollout: RolloutConfig, rows: int) -> None:
    """Raise ConfigError where the data has fewer rows than a batch takes prompts."""
    wanted = prompts_per_generation(rollout)
    if rows < wanted:
        times = " × rollout.steps_per_generation" if wanted > rollout.prompts_per_step else ""
        raise ConfigError(
            f"the data has {rows} rows and one batch takes rollout.prompts_per_step{times}={wanted}: lower it, or give "
            "more data."
        )


def read_data(data: DataConfig) -> tuple[Rows, Rows]:
    """Read the rows to train on and those to evaluate on."""
    return load_rows(
        path=data.path,
        subset=data.subset,
        split=data.split,
        eval_path=data.eval_path,
        eval_split=data.eval_split,
        eval_size=data.eval_size,
        size=data.size,
        seed=data.seed,
        task=data.task,
        prompt_column=data.columns.prompt,
        answer_column=data.columns.answer,
    )


def prompts_per_generation(rollout: RolloutConfig) -> int:
    """Return how many different prompts one generation takes."""
    return rollout.prompts_per_step * rollout.steps_per_generation


def fitting_reward(config: RunConfig, rows: Rows) -> Reward:
    """Build the reward and make sure that the data has the columns it asks for, and values it can compare with."""
    reward = build_reward(**config.reward)
    reward.check_columns([*rows[0]])
    reward.check_rows(rows)
    return reward


def _loads_a_model(options: Mapping[str, Any]) -> bool:
    """Whether building the reward may take long; a class of the user's may do anything when it is made."""
    heldout = named_reward(options.get("heldout"), "reward.heldout")
    if heldout is not None and _loads_a_model(heldout):
        return True
    name = options["name"]
    if name == "weighted_sum":
        return any(map(_loads_a_model, options["components"]))
    own = {key: value for key, value in options.items() if key != "weight"}  # which is the sum's
    return name == "reward_model" or (":" in name and inspect.isclass(check_options(**own)))
