"""Advantage estimators: `(P, G)` rewards in, `(P, G)` advantages out. NaN in = "not applicable", 0 out.

    group_relative    (r − mean_group) / (std_group + eps)          GRPO: Shao et al., 2024
    dr_grpo            r − mean_group                                Dr. GRPO: Liu et al., 2025
    rloo               r − mean of the others in the group           RLOO: Ahmadian et al., 2024
    batch_normalized  (r − mean_group) / (std_batch + eps)          TRL's scale_rewards="batch"; ScaleRL
    gdpo              each reward standardised in its group, summed, standardised in the batch   GDPO: Liu et al., 2026
    reinforce_pp      (r − Σ later KL − mean_batch) / std_batch      REINFORCE++: Hu et al., 2025
    gae               Σ (γλ)^l δₜ₊ₗ of a critic's values             GAE: Schulman et al., 2015

Options are keyword arguments; `advantage.name=my_module:my_fn` plugs in a function of the same shape.
A row without any reward is left out of every mean and gets 0; so does the only scored row of a group (it has nothing
to be compared with), and every row of a group whose rewards are all equal: exactly 0, not a rounding residue.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.types import Scores

Std = Literal["sample", "population"]

_RESIDUE = 1e-14
"""Spread below this share of the rewards' size is what subtracting equal float64 numbers leaves behind."""
_LARGEST = 1e38
"""Advantages become float32, which ends at 3.4e38; RLOO's can be twice the largest reward."""


def group_relative(rewards: Tensor, *, std: Std = "sample", eps: float = 1e-4) -> Tensor:
    """Return (r − mean) / (std + eps) within each group (GRPO; Shao et al., 2024). `(P, G)` -> `(P, G)`.

    `std="sample"` divides by n − 1 (TRL, and the default here); `"population"` by n; the paper leaves it open. The two
    differ by the constant √((n−1)/n): for rewards 1,0,1,0,0,1,0,0 that is +1.2074/−0.7244 against +1.2910/−0.7746.
    """
    scored = _scored(rewards, "group_relative")
    centred = _centre(scored)
    return _finish(centred / _divisor(centred, std, eps), rewards)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Return r − mean within each group: no std, hence no difficulty bias (Dr. GRPO; Liu et al., 2025)."""
    return _finish(_centre(_scored(rewards, "dr_grpo")), rewards)


def rloo(
    rewards: Tensor,
    *,
    penalty: Tensor | None = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """Return r minus the mean of the other completions of the group (RLOO; Ahmadian et al., 2024).

    Equal to n/(n−1) · (r − mean) over the n scored completions. `reward_min` and `reward_max` bound the reward before
    `penalty` (P, G, T), beta · KL per token, is taken off it. `normalize` divides by the (sample) std of the batch's
    advantages plus 1e-4; their mean is 0 already. All three as in TRL's RLOO trainer, where they are off, too.
    """
    for key, given in (("reward_min", reward_min), ("reward_max", reward_max)):
        if given is not None and math.isnan(given):
            raise ConfigError(f"advantage.{key}={given} is not a number; null leaves the reward as it is.")
    if reward_min is not None and reward_max is not None and not reward_min < reward_max:
        raise ConfigError(f"advantage.reward_min={reward_min} must be below advantage.reward_max={reward_max}.")
    scored = _scored(rewards, "rloo")
    if reward_min is not None or reward_max is not None:
        scored = scored.clamp(reward_min, reward_max)
    if penalty is not None:
        scored = scored - penalty.double().nansum(dim=-1)
    count = scored.isfinite().sum(dim=1, keepdim=True)
    advantages = _centre(scored) * count / (count - 1).clamp(min=1)
    if normalize:
        advantages = advantages / _divisor(_compared(advantages, scored).reshape(1, -1), "sample", 1e-4)
    return _finish(advantages, rewards)


def batch_normalized(
    rewards: Tensor, *, std_of: Literal["rewards", "advantages"] = "rewards", std: Std = "sample", eps: float = 1e-4
) -> Tensor:
    """Return (r − mean of the group) / (std of the whole batch + eps): hard and easy prompts keep their scale.

    `std_of` says of what the std is: of the batch's rewards (TRL's `scale_rewards="batch"`), or of what is divided, the
    batch's r − mean of the group, whose own mean is 0 (ScaleRL; Khatri et al., 2025).
    """
    if std_of not in ("rewards", "advantages"):
        raise unknown_option("advantage.std_of", std_of, ("rewards", "advantages"))
    scored = _scored(rewards, "batch_normalized")
    centred = _centre(scored)
    batch = scored - scored.nanmean() if std_of == "rewards" else _compared(centred, scored)
    return _finish(centred / _divisor(batch.reshape(1, -1), std, eps), rewards)


def gdpo(
    rewards: Tensor,
    *,
    components: Tensor | None = None,
    weights: Tensor | None = None,
    std: Std = "sample",
    eps: float = 1e-4,
) -> Tensor:
    """Normalise each reward within its group, add them up weighted, normalise over the batch (GDPO; Liu et al., 2026).

    zₖ = (rₖ − mean_group) / (std_group + eps); s = Σ wₖ zₖ; A = (s − mean_batch) / (std_batch + eps). `components`
    (P, G, R) and `weights` (R,) come from the scores; without them the total is the only reward. A rare failure in one
    reward is not drowned by the spread of another.
    """
    _scored(rewards, "gdpo")
    parts = rewards.unsqueeze(-1) if components is None else components
    shares = torch.ones(parts.shape[-1], dtype=torch.float64) if weights is None else weights.double()
    standard = torch.stack(
        [group_relative(part.double(), std=std, eps=eps) for part in parts.unbind(dim=-1)], dim=-1
    )  # (P, G, R), 0 where a reward does not apply
    unscored = parts.isnan().all(dim=-1)
    # Every group adds up to 0, so the batch's mean is 0, too; to subtract what rounding leaves of it would push groups
    # without spread off 0.
    total = (standard * shares).sum(dim=-1)
    cancelled = total.abs() <= _RESIDUE * (standard * shares).abs().sum(dim=-1)  # weights of both signs
    total = torch.where(unscored, torch.nan, total.masked_fill(cancelled, 0.0))
    return _finish(total / _divisor(total.reshape(1, -1), std, eps), rewards)


def reinforce_pp(
    rewards: Tensor, *, penalty: Tensor | None = None, std: Std = "population", eps: float = 1e-8
) -> Tensor:
    """Return r − Σ_{i≥t} penaltyᵢ, standardised over the whole batch: no group baseline (REINFORCE++; Hu et al., 2025).

    `penalty` (P, G, T) is beta · KL per token, from `objective.kl_in=reward`, NaN off what was written. With it the
    result is per token, (P, G, T), and mean and std are over all tokens; without it (P, G). Works with G = 1.
    """
    scored = _finite(rewards, "reinforce_pp")
    if penalty is not None:
        left = penalty.double().nan_to_num(0.0).flip(-1).cumsum(-1).flip(-1)  # Σ over the tokens from t on
        scored = torch.where(penalty.isnan(), torch.nan, scored.unsqueeze(-1) - left)
    centred = _centre(scored.reshape(1, -1))
    standard = (centred / _divisor(centred, std, eps)).reshape(scored.shape)
    return _finish(standard, scored.to(rewards.dtype) if rewards.is_floating_point() else scored.float())


def gae(
    rewards: Tensor,
    *,
    values: Tensor | None = None,
    penalty: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> Tensor:
    """Return Âₜ = Σ_l (γλ)^l δₜ₊ₗ with δₜ = rₜ + γVₜ₊₁ − Vₜ (Schulman et al., 2015). `(P, G)` -> `(P, G, T)`.

    `values` (P, G, T) is the critic's V before each token that the policy wrote, NaN elsewhere: t runs over those
    alone, and after the last one V is 0. The reward comes at the last token, `penalty` (P, G, T), beta · KL, off each
    token's own. `whiten` makes mean 0 and (population) std 1 of all tokens. Works with G = 1.
    """
    scored = _finite(rewards, "gae")
    if values is None:
        raise ConfigError(
            "advantage=gae needs a critic's values (P, G, T): `toolbox train` builds one (critic.*); called as a "
            "function it takes them as values=."
        )
    for key, given in (("gamma", gamma), ("lam", lam)):
        if not 0 <= given <= 1:
            raise ConfigError(f"advantage.{key}={given} must be in [0, 1].")
    real = ~values.isnan()
    worth = values.double().nan_to_num(0.0)
    last = real & (real.flip(-1).cumsum(-1).flip(-1) == 1)  # tokens from here on
    paid = torch.where(last, scored.nan_to_num(0.0).unsqueeze(-1), 0.0)
    if penalty is not None:
        paid = paid - penalty.double().nan_to_num(0.0)
    advantages = torch.zeros_like(worth)
    running, following = torch.zeros_like(scored), torch.zeros_like(scored)
    for place in reversed(range(worth.shape[-1])):
        here, value = real[..., place], worth[..., place]
        delta = paid[..., place] + gamma * following - value
        running = torch.where(here, delta + gamma * lam * running, running)
        following = torch.where(here, value, following)
        advantages[..., place] = running
    advantages = torch.where(real & scored.isfinite().unsqueeze(-1), advantages, torch.nan)
    if whiten:
        centred = _centre(advantages.reshape(1, -1)).reshape(advantages.shape)
        advantages = centred / (centred.square().nanmean().sqrt() + 1e-8)
    return _finish(advantages, rewards.unsqueeze(-1))


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_relative": group_relative,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch_normalized": batch_normalized,
    "gdpo": gdpo,
    "reinforce_pp": reinforce_pp,
    "gae": gae,
}


def estimate(
    advantage: Callable[..., Tensor], scores: Scores, penalty: Tensor | None = None, values: Tensor | None = None
) -> Tensor:
    """Call an estimator with the rewards (P, G) and what else it names: `components`, `weights`, `penalty`, `values`.

    `penalty` (P, G, T) is beta · KL per token where the KL is in the reward; an estimator that does not name it gets
    rewards less the penalty of the whole completion. What the scores pay at single tokens is taken off the rewards and
    off the penalty: r_t = token_reward_t − penalty_t. `values` (P, G, T) are a critic's.
    """
    names = inspect.signature(advantage).parameters
    weights = torch.tensor(scores.weights, dtype=torch.float64)  # in float32 .1 + .2 − .3 is 1e-8, and a spread
    offered = {"components": scores.components, "weights": weights, "values": values}
    rewards = scores.total
    if scores.token_rewards is not None:
        rewards = (rewards.double() - scores.token_rewards.double().nansum(dim=-1)).to(rewards.dtype)
        penalty = (0.0 if penalty is None else penalty) - scores.token_rewards
    if penalty is not None and "penalty" not in names:
        rewards = rewards - penalty.nansum(dim=-1)
    offered["penalty"] = penalty
    found = advantage(rewards, **{name: value for name, value in offered.items() if name in names})
    if scores.token_rewards is not None and found.ndim == 2:
        raise unpaid_tokens(advantage)
    return found


def pays_per_token(advantage: Callable[..., Tensor]) -> bool:
    """Tell whether an estimator takes rewards of single tokens (as a `penalty` below zero) and keeps them apart."""
    zeros = torch.zeros(2, 2, 2)
    column = Scores(("r",), (1.0,), zeros[..., :1], zeros[..., 0], token_rewards=zeros)
    try:
        return estimate(advantage, column, values=zeros if needs_values(advantage) else None).ndim == 3
    except ConfigError:
        return False


def needs_others(advantage: Callable[..., Tensor]) -> bool:
    """Tell whether an estimator compares the completions of a group, so that a single one has nothing to learn."""
    try:
        advantage(torch.zeros(2, 1), **({"values": torch.zeros(2, 1, 2)} if needs_values(advantage) else {}))
    except ConfigError:
        return True
    return False


def unpaid_tokens(advantage: Callable[..., Tensor]) -> ConfigError:
    """Build the error for a reward that pays per token beside an estimator that knows whole completions alone."""
    name = getattr(getattr(advantage, "func", advantage), "__name__", "it")
    return ConfigError(
        f"a reward pays single tokens, and advantage={name} has one number per completion: set advantage=reinforce_pp,"
        " gae or one of yours that is per token, or reward.aggregate=min for one number."
    )


def needs_values(advantage: Callable[..., Tensor]) -> bool:
    """Tell whether an estimator names `values`: then the run has a critic."""
    return "values" in inspect.signature(advantage).parameters


def value_targets(
    advantage: Callable[..., Tensor], scores: Scores, values: Tensor, penalty: Tensor | None = None
) -> Tensor:
    """Return what the critic is to learn, Â + V with Â not whitened, (P, G, T); NaN where nothing is to be learnt."""
    raw = {"whiten": False} if "whiten" in inspect.signature(advantage).parameters else {}
    returns = estimate(partial(advantage, **raw), scores, penalty, values) + values
    return torch.where(scores.total.isnan().unsqueeze(-1), torch.nan, returns)


def _scored(rewards: Tensor, name: str) -> Tensor:
    """Return the rewards in float64 after the checks that all group estimators share."""
    scored = _finite(rewards, name)
    if rewards.shape[1] < 2:
        raise ConfigError(
            f"advantage={name} compares the completions of a group, and rollout.group_size={rewards.shape[1]} leaves "
            "nothing to compare with: set rollout.group_size to 2 or more."
        )
    return scored


def _finite(rewards: Tensor, name: str) -> Tensor:
    """Return the rewards in float64, NaN kept; other shapes and anything that would overflow float32 are refused."""
    if rewards.ndim != 2:
        raise ConfigError(f"advantage={name} takes rewards of shape (P, G), got {tuple(rewards.shape)}.")
    scored = rewards.double()
    too_large = scored[scored.abs() > _LARGEST]
    if len(too_large):
        raise ConfigError(
            f"advantage={name} got a reward of {float(too_large[0]):g}: rewards must be finite and at most "
            f"{_LARGEST:g} in size (beyond it advantages overflow float32), or NaN for not applicable."
        )
    return scored


def _centre(rewards: Tensor) -> Tensor:
    """Return r − mean per group; exact zeros for a group without spread or with fewer than two scored rows."""
    if not rewards.numel():
        return rewards
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    size = rewards.abs().nan_to_num(0.0).amax(dim=1, keepdim=True)
    flat = centred.abs().nan_to_num(0.0).amax(dim=1, keepdim=True) <= _RESIDUE * size
    return torch.where(flat & rewards.isfinite(), 0.0, centred)


def _compared(advantages: Tensor, scored: Tensor) -> Tensor:
    """Return the advantages with NaN for a row that has no others in its group: it says nothing of the spread."""
    return torch.where(scored.isfinite().sum(dim=1, keepdim=True) > 1, advantages, torch.nan)


def _divisor(centred: Tensor, std: str, eps: float) -> Tensor:
    """Return the standard deviation of each row, over the scored entries of already centred values, plus eps."""
    if std not in ("sample", "population"):
        raise unknown_option("advantage.std", std, ("sample", "population"))
    if not 0 <= eps < math.inf:  # a negative one may turn the sign of every advantage
        raise ConfigError(f"advantage.eps={eps} must be a finite number of at least 0.")
    count = centred.isfinite().sum(dim=1, keepdim=True)
    degrees = count - 1 if std == "sample" else count
    return (centred.square().nansum(dim=1, keepdim=True) / degrees.clamp(min=1)).sqrt() + eps


def _finish(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Return advantages in float32 or better, 0 where there was no reward or (eps=0) nothing to divide by."""
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return torch.where(rewards.isfinite() & advantages.isfinite(), advantages, 0.0).to(dtype)
