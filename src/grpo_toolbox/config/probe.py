"""One call on small tensors shows what is wrong with an advantage or objective function before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_toolbox.advantages import estimate, needs_values, pays_per_token, unpaid_tokens
from grpo_toolbox.errors import ConfigError, ToolboxError
from grpo_toolbox.objectives import Objective, call_surrogate
from grpo_toolbox.rewards import Reward
from grpo_toolbox.rewards.signatures import unwrapped
from grpo_toolbox.types import Scores


def check_estimator(advantage: Callable[..., Tensor], group_size: int) -> None:
    """Let the estimator itself refuse a group size it cannot work with, or options it does not take."""
    probe = torch.arange(2 * group_size, dtype=torch.float32).reshape(2, group_size)
    with _probing("advantage"):
        result = advantage(probe, **({"values": torch.zeros(2, group_size, 3)} if needs_values(advantage) else {}))
    if not isinstance(result, Tensor) or result.shape[:2] != probe.shape or not bool(torch.isfinite(result).all()):
        raise ConfigError(
            f"the advantage function returned {getattr(result, 'shape', type(result).__name__)} for rewards of shape "
            f"{tuple(probe.shape)}: it must return finite advantages of shape (P, G) or (P, G, T)."
        )


def check_credit(advantage: Callable[..., Tensor], reward: Reward) -> None:
    """Refuse a reward that is known to pay single tokens where the estimator has one number per completion."""
    paying = [one for one in reward.components if getattr(unwrapped(one.function), "pays_per_token", False)]
    if paying and not pays_per_token(advantage):
        raise unpaid_tokens(advantage)


def check_penalty(advantage: Callable[..., Tensor], group_size: int) -> None:
    """Refuse an estimator that a KL in the reward does not reach: it would be logged and never learnt from."""
    rewards = torch.arange(2.0 * group_size).reshape(2, group_size)
    scores = Scores(("probe",), (1.0,), rewards.unsqueeze(-1), rewards)
    penalty = torch.arange(6.0 * group_size).reshape(2, group_size, 3).square()
    values = torch.zeros_like(penalty) if needs_values(advantage) else None
    with _probing("advantage"):
        plain, penalised = (estimate(advantage, scores, part, values) for part in (None, penalty))
    if torch.equal(plain, penalised):
        name = getattr(getattr(advantage, "func", advantage), "__name__", "it")
        raise ConfigError(
            f"objective.kl_in=reward takes the KL off the total reward, which advantage={name} does not look at: set "
            "objective.kl_in=loss."
        )


def check_surrogate(objective: Objective) -> None:
    """Call the surrogate once on two rows of three tokens and look at what comes back."""
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    with _probing("objective"):
        advantages, mask = torch.tensor([[1.0], [-1.0]]).expand_as(logps), torch.ones_like(logps, dtype=torch.bool)
        result = call_surrogate(objective, logps, logps.detach(), torch.zeros_like(logps), advantages, mask)
    first = result[:2] if isinstance(result, tuple) else ()
    if [getattr(part, "shape", None) for part in first] != [logps.shape] * 2 or not _are_terms(result[2:]):
        raise ConfigError(
            "the objective function must return two tensors of the shape (B, T) of logps: the loss per token, and "
            "where it is clipped (torch.zeros_like(logps, dtype=torch.bool) where nothing is); and, where it likes, a "
            "dict of tensors (B, T) or (B,) for the log."
        )


def _are_terms(more: tuple[Any, ...]) -> bool:
    """Whether what a surrogate returned behind the loss is nothing, or one dict of terms per token or row."""
    shapes = [getattr(term, "shape", None) for one in more if isinstance(one, dict) for term in one.values()]
    return all(isinstance(one, dict) for one in more) and len(more) < 2 and all(one in ((2, 3), (2,)) for one in shapes)


@contextmanager
def _probing(group: str) -> Iterator[None]:
    try:
        yield
    except ToolboxError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"the {group} function failed on a small probe ({type(error).__name__}: {error}).") from error
