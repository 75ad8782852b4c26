"""The action record: everything about one rollout of one step, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_toolbox.callbacks.jsonl import json_columns, short
from grpo_toolbox.types import Message, Step


def actions(step: Step, prompts: int | None = None, completions: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the action records of a step, prompt-major: of the first `prompts` groups the first `completions` each.

    A step without rollouts or scores has none. Rewards and advantages that are not a number are None; a per-token
    advantage is a list as long as the completion.
    """
    if not step.rollouts or step.scores is None:
        return
    components, totals = step.scores.components.tolist(), step.scores.total.tolist()  # (P, G, R), (P, G)
    advantages = step.advantages.tolist() if step.advantages is not None else None  # (P, G) or (P, G, T)
    group_size = len(totals[0])
    for p, group in enumerate(totals[:prompts]):
        prompt = step.rollouts[p * group_size].prompt
        columns = json_columns(prompt.columns)
        for g, total in enumerate(group[:completions]):
            rollout = step.rollouts[p * group_size + g]
            values = map(short, components[p][g])
            yield {
                "step": step.number,
                "prompt_id": prompt.id,
                "group": p,
                "index": g,
                "prompt": prompt.text,
                "completion": rollout.text,
                "finish_reason": rollout.finish_reason,
                "reward": short(total),
                "rewards": dict(zip(step.scores.names, values, strict=True)),
                "advantage": _advantage(advantages[p][g], len(rollout.ids)) if advantages else None,
                "columns": columns,
                "weights_version": rollout.weights_version,
                "prompt_ids": prompt.ids,
                "token_ids": rollout.ids,
                "logps": [short(logp) for logp in rollout.logps],
                "written": rollout.written or None,
            }


def judged(rewards: Mapping[str, float | None], total: float | None, name: str | None = None) -> float | None:
    """Return the value that says whether a completion is right: the component `name`, by default the first one.

    Where that component does not apply (None) the total decides. Correct means a value of at least 1.
    """
    first = next(iter(rewards), None) if name is None else name
    value = rewards.get(first) if first is not None else None
    return total if value is None else value


def prompt_text(text: str | list[Message]) -> str:
    """Return a prompt for one line of a table: its text, or the last message of a conversation."""
    if isinstance(text, str):
        return text
    return str(text[-1].get("content", "")) if text else ""


def _advantage(value: float | list[float], length: int) -> float | list[float | None] | None:
    if isinstance(value, list):
        return [short(v) for v in value[:length]]
    return short(value)
