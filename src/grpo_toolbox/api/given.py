"""What a program hands to a trainer, as the parts of a run: data sets as rows, functions as a reward, models."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_toolbox.data import check_rows
from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.rewards import REWARDS, Component, Reward, build_reward, combine
from grpo_toolbox.rewards.build import FAILURES, with_failures

log = logging.getLogger(__name__)

NOT_FOR_REWARDS = ("completion", "completions", "completion_ids")
"""Columns that TRL keeps from rewards, which are passed the policy's own under these names."""
PICTURES = ("image", "images")


def rows_of(dataset: Any, name: str, most: int | None = None) -> list[dict[str, Any]]:
    """Return the checked rows of a datasets.Dataset or any iterable of mappings; at most `most` of one without end."""
    if isinstance(dataset, str):
        raise ConfigError(f"{name}={dataset!r} must be a data set: load it with datasets.load_dataset({dataset!r}).")
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset))
        raise ConfigError(
            f"{name} has several parts ({splits}): pass one, such as {name}=data[{next(iter(dataset))!r}]."
        )
    if not isinstance(dataset, Iterable):
        raise ConfigError(f"{name}={dataset!r:.60} must be a datasets.Dataset or a list of dicts with a prompt.")
    rows = [dict(row) for row in itertools.islice(dataset, most)]
    columns = {column for row in rows for column in row}
    if rows and "prompt" not in columns:
        raise DataError(
            f"{name} needs a column 'prompt', and has {', '.join(sorted(columns))}: rename the one that holds the "
            "questions, dataset.rename_column('question', 'prompt')."
        )
    if columns & {*PICTURES}:
        raise ConfigError(
            f"{name} has pictures (column {', '.join(sorted(columns & {*PICTURES}))}), which come later: remove the "
            "column to train on the text alone."
        )
    hidden = [column for column in NOT_FOR_REWARDS if column in columns]
    if hidden:
        log.warning("%s: column %s is not used; rewards are passed the policy's completions.", name, ", ".join(hidden))
    kept = [{column: value for column, value in row.items() if column not in hidden} for row in rows]
    return check_rows(kept, answer_column=None, source=name)


def eval_parts(dataset: Any, best_metric: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the data sets to evaluate on by the prefix of their metrics; several come in a dict by name, as in TRL.

    First comes the one that `best_metric` is of, which is returned without its prefix; None is the first one's reward.
    """
    metric = (best_metric or "reward").removeprefix("eval_")
    if not isinstance(dataset, Mapping):
        return {} if dataset is None else {"eval": dataset}, metric
    names = sorted(dataset, key=lambda name: not metric.startswith(f"{name}_"))
    bare = metric.removeprefix(f"{names[0]}_") if names else metric
    return {f"eval_{name}": dataset[name] for name in names}, bare


def size_of(dataset: Any) -> int | None:
    """Return how many rows a data set has; None where it does not say."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def reward_of(
    functions: Any, weights: Sequence[Any] | None, tokenizers: Any, overrides: Mapping[str, Any] | None = None
) -> Reward:
    """Make one reward of functions, names, reward models (a path or a loaded classifier with its tokenizer).

    A name is that of one of our rewards, `my_module:my_fn`, or else the folder or hub name of a reward model. Of
    `overrides` it takes what every reward does with failures, such as `reward.on_error`.
    """
    given_functions = listed(functions)
    if not given_functions or given_functions == [None]:
        raise ConfigError("reward_funcs is missing: pass a function, a name such as 'exact_match', or a list of them.")
    count = len(given_functions)
    given = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * count
    if len(given) != count:
        raise ConfigError(
            f"{count} reward_funcs and {len(given)} reward_processing_classes: pass one for each, None for plain "
            "functions."
        )
    parts = [_reward(one, tokenizer) for one, tokenizer in zip(given_functions, given, strict=True)]
    if weights is not None and len(weights) != len(parts):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(parts)} reward_funcs: give one for each."
        )
    made = combine(parts, weights, name="given")
    settings = {key: (overrides or {}).get(f"reward.{key}") for key in FAILURES}
    return with_failures(made, {key: value for key, value in settings.items() if value is not None})


def listed(functions: Any) -> list[Any]:
    """Return the functions that were given, of which one may stand alone."""
    return list(functions) if isinstance(functions, list | tuple) else [functions]


def _reward(one: Any, tokenizer: Any) -> Any:
    if isinstance(one, str):
        if one in REWARDS or ":" in one:
            return build_reward(one)
        return _reward_model(one, tokenizer)
    if hasattr(one, "parameters") and hasattr(one, "config"):
        return _classifier(one, tokenizer)
    made = getattr(one, "in_training", None)
    return one if made is None else made()


def _reward_model(path: str, tokenizer: Any) -> Reward:
    reward = build_reward("reward_model", path=path)
    (part,) = reward.components
    if tokenizer is not None:
        for model in part.function.models:  # type: ignore[attr-defined]
            model.tokenizer = tokenizer
    return _named(reward, Path(path).name)


def _classifier(model: Any, tokenizer: Any) -> Reward:
    from grpo_toolbox.rewards.classifier import Classifier
    from grpo_toolbox.rewards.model import CompletionScores

    name = str(getattr(model.config, "_name_or_path", "") or "reward_model")
    loaded = Classifier.of(model, tokenizer, name)
    return _named(combine([CompletionScores([loaded], "mean")]), Path(name).name)


def _named(reward: Reward, name: str) -> Reward:
    part: Component = reward.components[0]
    return Reward(name, (replace(part, name=name),))


def described_reward(reward: Reward) -> dict[str, Any]:
    """Return what config.yaml says of a reward that was given as functions."""
    parts = [{"name": part.name, "weight": part.weight} for part in reward.components]
    return {"name": "given", "components": parts}


def model_named(model: Any) -> str:
    """Return the name that a model stands under in config.yaml, messages and model cards: of a string, its folder."""
    if isinstance(model, str):
        return checkpoint_model(model)
    if not hasattr(model, "config"):
        raise ConfigError(
            f"model={model!r:.60} must be a hub name, a folder, or a loaded model of transformers or PEFT."
        )
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or "given")


def checkpoint_model(path: str) -> str:
    """Return the model folder where `path` is a run folder or one of its checkpoints; otherwise the path itself."""
    from grpo_toolbox.checkpoint import latest_checkpoint

    folder = Path(path).expanduser()
    if (folder / "state.pt").is_file() and (folder / "model").is_dir():
        return str(folder / "model")
    if not (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
        newest = latest_checkpoint(folder / "checkpoints")
        if newest is None:
            raise DataError(f"model={path} is a run folder without a whole checkpoint: train it first.")
        return str(newest / "model")
    return path
