"""A step of ours in TRL's words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo_toolbox.api.translate_rl import CLIPPED
from grpo_toolbox.config.fields import METRIC_MAP
from grpo_toolbox.types import Step

_CLIP = "clip_ratio/"
_CISPO = "cispo_clip_ratio"


def logged_metrics(step: Step, loss_type: str | None) -> dict[str, float]:
    """Return the metrics of a step under TRL's names; those that TRL does not have keep ours.

    What is said of the clip depends on the loss, as it does in TRL; None is RLOO's. `num_tokens` are the prompt and
    completion tokens of this step; TRL's number is their sum over the run.
    """
    found = {METRIC_MAP.get(name, name): value for name, value in step.metrics.items()}
    if step.rollouts:
        found["num_tokens"] = float(sum(one.written_tokens + len(one.prompt.ids) for one in step.rollouts))
    return found if loss_type in (*CLIPPED, None) else _with_own_clip(found, loss_type)


def evaluation_metrics(
    metrics: Mapping[str, float],
    loss_type: str | None,
    *,
    prompts: int,
    batch: int,
    tokens: float,
    prefix: str = "eval",
) -> dict[str, float]:
    """Return what an evaluation of `prompts` said under TRL's names; `batch` is what TRL takes for one of its steps.

    `tokens` are those that training has seen, in TRL's log, too.
    """
    found = {_bare(name): value for name, value in metrics.items()}
    found = found if loss_type in (*CLIPPED, None) else _with_own_clip(found, loss_type)
    seconds = found["runtime"]
    found["samples_per_second"] = prompts / seconds
    found["steps_per_second"] = math.ceil(prompts / batch) / seconds
    found["num_tokens"] = tokens
    return {f"{prefix}_{name}": value for name, value in found.items()}


def own_name(metric: str) -> str:
    """Return our name of what TRL calls `metric` in an evaluation, with its `eval_` or without."""
    bare = metric.removeprefix("eval_")
    own = {_bare(f"eval/{name.removeprefix('eval/')}"): name.removeprefix("eval/") for name in METRIC_MAP}
    return f"eval/{own.get(bare, {_CISPO: 'clip_fraction/high'}.get(bare, bare))}"


def _bare(name: str) -> str:
    """Return TRL's name, without its `eval_`, of a metric of an evaluation."""
    inner = name.removeprefix("eval/")
    return METRIC_MAP.get(name, METRIC_MAP.get(inner, inner)).removeprefix("eval_")


def _with_own_clip(found: Mapping[str, float], loss_type: str | None) -> dict[str, float]:
    """Leave out the clip of the ratio, which the loss does not have; CISPO caps weights above."""
    kept = {name: value for name, value in found.items() if not name.startswith(_CLIP)}
    capped = found.get(f"{_CLIP}high_mean")
    return kept if loss_type != "cispo" or capped is None else kept | {_CISPO: capped}
