"""The data, the model's place and the reward, checked without torch: most mistakes show in the first second."""

from __future__ import annotations

from typing import Any

from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.data import load_rows
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.paths import resolve_model_path
from grpo_toolbox.rewards import build_reward

Rows = list[dict[str, Any]]


def check_inputs(config: RunConfig) -> tuple[Rows, Rows]:
    """Return the checked (train, eval) rows after the reward, the model path and the data have been looked at."""
    resolve_model_path(config.model.path)
    options = dict(config.reward)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"reward.name={name!r}: set it to a reward's name, or to my_module:my_fn.")
    reward = build_reward(name, **options)
    data = config.data
    rows, eval_rows = load_rows(
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
    reward.check_columns([*rows[0]])
    if len(rows) < config.rollout.prompts_per_step:
        raise ConfigError(
            f"the data has {len(rows)} rows and one batch takes rollout.prompts_per_step="
            f"{config.rollout.prompts_per_step}: lower it, or give more data."
        )
    return rows, eval_rows
