"""A step of ours in TRL's words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo_toolbox.api.translate_rl import CLIPPED
from grpo_toolbox.config.fields import METRIC_MAP
from grpo_toolbox.types import Step

_CLIP = "clip_ratio/"


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
    metrics: Mapping[str, float], *, prompts: int, batch: int, tokens: float, prefix: str = "eval"
) -> dict[str, float]:
    """Return what an evaluation of `prompts` said under TRL's names; `batch` is what TRL takes for one of its steps.

    `tokens` are those that training has seen, in TRL's log, too. Without a loss of its own: completions are scored.
    """
    found = {METRIC_MAP.get(name, name.replace("eval/", "eval_")): value for name, value in metrics.items()}
    seconds = found["eval_runtime"]
    found["eval_samples_per_second"] = prompts / seconds
    found["eval_steps_per_second"] = math.ceil(prompts / batch) / seconds
    found["eval_num_tokens"] = tokens
    return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in found.items()}


def _with_own_clip(found: Mapping[str, float], loss_type: str | None) -> dict[str, float]:
    """Leave out the clip of the ratio, which the loss does not have; CISPO caps weights above."""
    kept = {name: value for name, value in found.items() if not name.startswith(_CLIP)}
    capped = found.get(f"{_CLIP}high_mean")
    return kept if loss_type != "cispo" or capped is None else kept | {"cispo_clip_ratio": capped}
