"""`toolbox traces <run> --rescore reward=…`: what another reward would have said of the rollouts of a run."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.callbacks.actions import prompt_text
from grpo_toolbox.callbacks.trace_summary import Mean, read_actions
from grpo_toolbox.config.options import check_named
from grpo_toolbox.config.source import option_names
from grpo_toolbox.errors import ConfigError, DataError, unknown_option
from grpo_toolbox.rewards import Reward, TrainerState, build_reward
from grpo_toolbox.rewards.calling import Batch
from grpo_toolbox.rewards.scoring import rows_from_rollouts
from grpo_toolbox.types import Prompt, Rollout

if TYPE_CHECKING:  # the tables alone need rich
    from rich.table import Table

Group = list[dict[str, Any]]
"""The action records of one group."""

OF_THE_RUN = "of_the_run"
_SPREAD = 1e-9
"""Rewards that differ by less than this share of their size are equal."""


@dataclass
class Change:
    """What was counted while the rollouts of a run were scored anew."""

    rollouts: int = 0
    groups: int = 0
    changed: int = 0
    flipped: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    """Groups by `stayed`, `revived`, `died`, `stayed without spread`."""
    before: Mean = field(default_factory=Mean)
    after: Mean = field(default_factory=Mean)
    parts: dict[str, Mean] = field(default_factory=dict)
    unscored: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def run_config(actions: Path) -> dict[str, Any] | None:
    """Return the config.yaml of the run that wrote an actions.jsonl; None where there is none."""
    from yaml import YAMLError, safe_load

    path = actions.parent.parent / "config.yaml"
    try:
        return safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {str(error).splitlines()[0]}.") from error


def named_reward(overrides: Sequence[str], run_config: Mapping[str, Any] | None) -> Reward:
    """Build the reward that `reward=<name>` and `reward.<key>=<value>` describe, as `toolbox train` reads them.

    Without `reward=<name>` the keys change the reward of the run. Raises ConfigError.
    """
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from grpo_toolbox.cli.compose import readable
    from grpo_toolbox.cli.overrides import explain

    if os.getcwd() not in sys.path:  # an installed command does not look for the user's modules there by itself
        sys.path.append(os.getcwd())
    for one in overrides:
        if not re.match(r"\+{0,2}reward(\.[\w.]+)?=", one):
            raise ConfigError(f"--rescore takes reward=<name> and reward.<key>=<value>, and was given {one!r}.")
    named = [one.partition("=")[2] for one in overrides if re.match(r"\+{0,2}reward=", one)]
    own = (run_config or {}).get("reward")
    if not named and own is None:
        raise ConfigError("--rescore needs reward=<name>: there is no config.yaml beside the traces to start from.")
    if named and named[-1] not in option_names("reward"):
        raise unknown_option("reward", named[-1], option_names("reward"))
    ConfigStore.instance().store(group="reward", name=OF_THE_RUN, node=dict(own or {}), provider="grpo_toolbox")
    words = [f"+reward={named[-1] if named else OF_THE_RUN}"]
    words += [readable(one) for one in overrides if not re.match(r"\+{0,2}reward=", one)]
    try:
        with initialize_config_module("grpo_toolbox.conf", version_base="1.3"):
            composed: Any = compose(overrides=words)
        missing = sorted(OmegaConf.missing_keys(composed))
        options: Any = OmegaConf.to_container(composed.reward, resolve=True)
    except Exception as error:  # Hydra's, OmegaConf's, YAML's
        raise explain(error) from error
    if missing:
        raise ConfigError(f"{missing[0]} has no default: add {missing[0]}=… to --rescore.")
    check_named("reward", options)
    return build_reward(**{key: value for key, value in options.items() if not key.startswith("heldout")})


def rescore(path: Path, reward: Reward, shown: int = 5) -> dict[str, Any]:
    """Score every whole group of an actions.jsonl with `reward` and return what would have changed, as JSON values.

    A rollout's advantage stands here for its reward minus the mean of its group, of which group_relative, dr_grpo,
    rloo and batch_normalized have the sign. Flipped: it was above its group's mean and is below, or the reverse. A
    group is revived where its rewards were equal and are not any more, and has died where it is the other way round.
    `shown` examples of flipped rollouts, else of changed ones, are kept. Raises DataError, RewardError.
    """
    change = Change()
    for step, groups in _steps(path):
        records = [record for group in groups for record in group]
        totals, parts = _scores(reward, records, step)
        for name, values in parts.items():
            mean = change.parts.setdefault(name, Mean())
            for value in values:
                _add(mean, value)
        start = 0
        for group in groups:
            _count(change, group, totals[start : start + len(group)], shown)
            start += len(group)
    if not change.rollouts:
        raise DataError(f"{path} holds no whole record yet: wait for the first step to finish.")
    return _report(path, reward, change)


def _steps(path: Path) -> Iterator[tuple[int, list[Group]]]:
    """Yield (step, groups) as long as records of a step follow each other; lines that are no JSON are left out."""
    step = -1
    groups: dict[int, Group] = {}
    for number, record in read_actions(path):
        if record is None:
            continue
        try:
            place = record["step"], record["group"]
            record["completion"], record["prompt"], record["reward"], record["token_ids"], record["columns"]
        except (KeyError, TypeError) as error:  # another program's file
            raise DataError(
                f"{path}, line {number} is not an action record ({error}): give an actions.jsonl."
            ) from error
        if place[0] != step and groups:
            yield step, [*groups.values()]
            groups = {}
        step = place[0]
        groups.setdefault(place[1], []).append(record)
    if groups:
        yield step, [*groups.values()]


def _scores(
    reward: Reward, records: Sequence[Mapping[str, Any]], step: int
) -> tuple[list[float | None], dict[str, Sequence[float | None]]]:
    """Return the total of each rollout and what each part of the reward said, None where it does not apply."""
    rollouts = [
        Rollout(
            Prompt(one["prompt_id"], one["prompt"], tuple(one.get("prompt_ids", ())), one["columns"]),
            tuple(one["token_ids"]),
            (),
            one["finish_reason"],
            one["completion"],
            written=tuple(one.get("written") or ()),
        )
        for one in records
    ]
    state = TrainerState(step, step)
    weighted = reward.at(state)
    weighted.check_columns({name for one in records for name in one["columns"]})
    rows = rows_from_rollouts(rollouts, 1, state)
    with Batch(weighted.components) as batch:
        batch.add(rows)
        outcomes = batch.outcomes(rows)
    per_row = zip(*(outcome.scores for outcome in outcomes), strict=True)
    totals = [weighted.total(scores, rows.place(index)) for index, scores in enumerate(per_row)]
    parts = {part.name: outcome.scores for part, outcome in zip(weighted.components, outcomes, strict=True)}
    return totals, parts


def _count(change: Change, group: Group, after: Sequence[float | None], shown: int) -> None:
    before = [record["reward"] for record in group]
    old, new = _advantages(before), _advantages(after)
    change.groups += 1
    fate = (any(old), any(new))
    names = {(True, True): "stayed", (False, True): "revived", (True, False): "died"}
    change.fates[names.get(fate, "stayed without spread")] += 1
    for record, was, now, was_advantage, advantage in zip(group, before, after, old, new, strict=True):
        change.rollouts += 1
        change.unscored["before"] += was is None
        change.unscored["after"] += now is None
        _add(change.before, was)
        _add(change.after, now)
        flipped = was_advantage * advantage < 0
        change.flipped += flipped
        differs = (was is None) != (now is None) or (was is not None and now is not None and not _equal(was, now))
        change.changed += differs
        if flipped or differs:
            _keep(change.examples, record, was, now, was_advantage, advantage, shown)


def _keep(
    examples: list[dict[str, Any]],
    record: Mapping[str, Any],
    was: float | None,
    now: float | None,
    was_advantage: float,
    advantage: float,
    shown: int,
) -> None:
    """Keep an example; flipped ones push out those that are only changed."""
    flipped = was_advantage * advantage < 0
    example = {
        "step": record["step"],
        "prompt_id": record["prompt_id"],
        "prompt": prompt_text(record["prompt"]),
        "completion": record["completion"],
        "reward": {"before": was, "after": now},
        "advantage": {"before": was_advantage, "after": advantage},
        "flipped": flipped,
    }
    if len(examples) >= shown:
        changed = next((place for place, one in enumerate(examples) if flipped and not one["flipped"]), None)
        if changed is None:
            return
        del examples[changed]
    examples.append(example)


def _advantages(rewards: Sequence[float | None]) -> list[float]:
    """Return r − mean of the group; 0 without a reward, and for all where the rewards are equal."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored or _equal(min(scored), max(scored)):
        return [0.0] * len(rewards)
    mean = sum(scored) / len(scored)
    return [0.0 if reward is None or _equal(reward, mean) else reward - mean for reward in rewards]


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _SPREAD * max(abs(one), abs(other))


def _add(mean: Mean, value: float | None) -> None:
    if value is not None:
        mean.add(value)


def _report(path: Path, reward: Reward, change: Change) -> dict[str, Any]:
    return {
        "path": str(path),
        "reward": reward.name,
        "rollouts": change.rollouts,
        "groups": change.groups,
        "mean": {"before": change.before.value, "after": change.after.value},
        "unscored": {"before": change.unscored["before"], "after": change.unscored["after"]},
        "parts": {name: mean.value for name, mean in change.parts.items()},
        "changed": change.changed,
        "flipped": change.flipped,
        "groups_revived": change.fates["revived"],
        "groups_died": change.fates["died"],
        "groups_with_spread": {
            "before": change.fates["stayed"] + change.fates["died"],
            "after": change.fates["stayed"] + change.fates["revived"],
        },
        "examples": change.examples,
    }


def change_lines(report: Mapping[str, Any]) -> list[str]:
    """Return what would have changed, in lines."""
    n, groups = report["rollouts"], report["groups"]
    mean, spread, unscored = report["mean"], report["groups_with_spread"], report["unscored"]
    parts = ", ".join(f"{name} {_number(value)}" for name, value in report["parts"].items())
    return [
        report["path"],
        f"{n:,} rollouts in {groups:,} groups, scored again with {report['reward']} (mean of its parts: {parts})",
        f"mean reward            {_number(mean['before'])} -> {_number(mean['after'])}",
        f"no reward at all       {unscored['before']:,} -> {unscored['after']:,}",
        f"another reward         {report['changed']:,} ({report['changed'] / n:.1%} of the rollouts)",
        f"advantages flipped     {report['flipped']:,} ({report['flipped'] / n:.1%} of the rollouts)",
        f"groups with a spread   {spread['before']:,} -> {spread['after']:,}: "
        f"{report['groups_revived']:,} revived, {report['groups_died']:,} died",
    ]


def example_table(report: Mapping[str, Any]) -> Table:
    """Return the examples as a table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from grpo_toolbox.callbacks.screen import one_line

    table = Table(title="examples", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("step", "reward", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prompt", "completion"):
        table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis")
    for one in report["examples"]:
        moved = [f"{_number(one[key]['before'])} -> {_number(one[key]['after'])}" for key in ("reward", "advantage")]
        texts = [Text(one_line(one[key]) or "(empty)") for key in ("prompt", "completion")]
        table.add_row(str(one["step"]), *moved, *texts)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
