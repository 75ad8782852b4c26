"""Evaluation on held-out prompts: one completion each, scored by the training reward, never trained on."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_toolbox.engines import Engine
from grpo_toolbox.metrics import finite_metrics, pass_rate
from grpo_toolbox.rewards import ErrorBudget, Reward, Scoring, TrainerState
from grpo_toolbox.rollout import rollout
from grpo_toolbox.types import Prompt, Sampling


def evaluate(
    engine: Engine,
    reward: Reward,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    state: TrainerState | None = None,
    budget: ErrorBudget | None = None,
) -> dict[str, float]:
    """Return `eval/reward`, `eval/pass@1` (share solved), mean length and truncated share over `prompts`.

    A prompt that no reward applies to is left out of the first two, as in training; they are left out where none does.
    """
    with Scoring(reward, 1, state, budget) as scoring:
        rollouts = rollout(engine, prompts, 1, sampling, on_group=scoring.add)  # in groups of one, a group is a row
        scores = scoring.scores()
    rewards = finite_metrics({"eval/reward": scores.total.nanmean(), "eval/pass@1": pass_rate(scores)})
    return rewards | {
        "eval/completion_tokens": sum(one.written_tokens for one in rollouts) / len(rollouts),
        "eval/clipped_ratio": sum(one.finish_reason == "length" for one in rollouts) / len(rollouts),
    }
