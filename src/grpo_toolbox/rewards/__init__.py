"""Rewards: what a completion is worth.

`build_reward(name, **options)` makes a `Reward`; `score_rollouts` applies it to a step's rollouts. The contract of a
reward function, the members and their options stand in docs/rewards.md.
"""

from grpo_toolbox.rewards.adaptive import AdaptiveReward, AdaptiveWeight
from grpo_toolbox.rewards.budget import ErrorBudget
from grpo_toolbox.rewards.build import COMMON, REWARDS, build_reward, check_options, named_reward, weighted_sum
from grpo_toolbox.rewards.component import Component, RewardFunction
from grpo_toolbox.rewards.contract import Reward, combine
from grpo_toolbox.rewards.exact import exact_match
from grpo_toolbox.rewards.formats import format_reward
from grpo_toolbox.rewards.heldout import Divergence, HeldOut, HeldOutScoring
from grpo_toolbox.rewards.judge import llm_judge
from grpo_toolbox.rewards.length import length_penalty
from grpo_toolbox.rewards.model import reward_model
from grpo_toolbox.rewards.named import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from grpo_toolbox.rewards.scoring import Scoring, joined_metrics, score_rollouts
from grpo_toolbox.rewards.text import completion_text
from grpo_toolbox.rewards.weights import TrainerState

__all__ = [
    "COMMON",
    "REWARDS",
    "AdaptiveReward",
    "AdaptiveWeight",
    "Component",
    "Divergence",
    "ErrorBudget",
    "HeldOut",
    "HeldOutScoring",
    "Reward",
    "RewardFunction",
    "Scoring",
    "TrainerState",
    "accuracy_reward",
    "build_reward",
    "check_options",
    "combine",
    "completion_text",
    "exact_match",
    "format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "joined_metrics",
    "length_penalty",
    "llm_judge",
    "named_reward",
    "reasoning_accuracy_reward",
    "reward_model",
    "score_rollouts",
    "think_format_reward",
    "weighted_sum",
]
