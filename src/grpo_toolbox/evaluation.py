"""Evaluation on held-out prompts: one completion each, scored by the training reward, never trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from grpo_toolbox.engines import Engine
from grpo_toolbox.metrics import component_metrics, length_metrics, step_metrics
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
    """Return `eval/reward`, `eval/pass@1` (share solved), the reward's spread and components, lengths, and seconds.

    A prompt that no reward applies to is left out of what is said of rewards, as in training; where none does, all of
    that is left out.
    """
    started = time.perf_counter()
    with Scoring(reward, 1, state, budget) as scoring:
        rollouts = rollout(engine, prompts, 1, sampling, on_group=scoring.add)  # in groups of one, a group is a row
        scores = scoring.scores()
    found = step_metrics(rollouts, scores)
    named = {ours: found[name] for name, ours in NAMES.items() if name in found}
    alike = component_metrics(scores) | length_metrics(rollouts)
    named |= {f"eval/{name}": value for name, value in alike.items() if name not in NAMES}
    return named | {"time/eval": time.perf_counter() - started}


NAMES = {
    "reward_mean": "eval/reward",
    "reward_std": "eval/reward_std",
    "pass_rate": "eval/pass@1",
    "completion_tokens": "eval/completion_tokens",
    "completions/clipped_ratio": "eval/clipped_ratio",
}
"""What is called otherwise than in training."""
