"""The run: everything one training run is made of, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grpo_toolbox.callbacks import Callback, Due
from grpo_toolbox.controllers import CorrectionControl, EntropyControl, KlControl
from grpo_toolbox.critic import Critic
from grpo_toolbox.data import PromptStream
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.watch import SyncWatch
from grpo_toolbox.models.load import Reference
from grpo_toolbox.objectives import Objective
from grpo_toolbox.rewards import Divergence, ErrorBudget, Reward
from grpo_toolbox.types import Prompt, Rollout, RunInfo, Sampling, Scores, Step

Clock = Callable[[str], AbstractContextManager[None]]
"""`with clock(stage): ...` counts the block's seconds as the stage's."""


@dataclass(frozen=True)
class UpdateSettings:
    """How a batch becomes an optimizer step."""

    ppo_epochs: int = 1
    micro_batch_tokens: int = 1024
    max_grad_norm: float = 1.0
    packed: bool = True
    recompute_mlp: bool = False
    """Compute the wide activations of gated MLPs again in backward instead of keeping them."""
    skip_zero_advantage: bool = True
    """Leave out rows of exactly zero advantage where the objective allows it: same gradient, less work."""
    recompute_old_logps: bool = False
    """Compute on-policy log-probs of π_old before the step, which its first pass says as well."""
    router_aux_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts; above 0 no row is left out, for each is routed."""
    autocast: torch.dtype | None = None
    """Precision of the forward pass; None is that of the weights."""


@dataclass(frozen=True)
class GenerationSettings:
    """How many rollouts are made for how many optimizer steps."""

    steps_per_generation: int = 1
    """Optimizer steps that share one generation of rollouts; above 1 the later ones are off-policy."""
    reuse_logps: bool = True
    """Whether the engine's log-probs serve as the trainer's for π_old and a KL in the reward."""
    dynamic_sampling: bool = False
    """Go on sampling until enough groups have spread (DAPO)."""
    max_oversampling: int = 8
    """Ceiling on sampled groups, in multiples of those wanted."""
    max_empty_steps: int = 3
    """Stop after so many steps in a row without a group that has spread."""
    max_staleness: int = 1
    """k: updates that the policy may have had since the weights that drew rollouts made in the background."""
    old_is_sampler: bool = True
    """Whether, without a correction, the sampler that drew such rollouts is the π_old that the ratio is to."""
    on_stale: str = "drop"
    """What becomes of older ones: `drop` their groups, or `mask` the tokens that are too old."""


@dataclass(frozen=True)
class EvaluationSettings:
    """How the policy is evaluated, and by what the best checkpoint is chosen."""

    sampling: Sampling
    completions: int = 1
    """Per prompt."""
    with_loss: bool = False
    """Whether the training loss is computed on them, too."""
    every: int = 0
    """Steps between evaluations; 0 never evaluates."""
    at_start: bool = True
    """Whether the untrained policy is evaluated."""
    best_metric: str = "eval/reward"
    best_is_lowest: bool = False

    def better(self, value: float, best: float) -> bool:
        """Whether `value` of the metric is better than `best`."""
        return value < best if self.best_is_lowest else value > best


@dataclass(frozen=True)
class Generation:
    """The rollouts of one or several steps, scored: all that can be said without policy, reference and critic."""

    number: int
    """The first step that they were made for, from which their random streams follow."""
    rollouts: Sequence[Rollout]
    scores: Scores
    kept: Sequence[int]
    """Groups that may be trained; dynamic sampling leaves out those without spread."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    ahead: bool = False
    """Whether they were made in the background, by weights that may be older than the policy."""


@dataclass(frozen=True)
class Experience:
    """What one optimizer step learns from: whole groups, with what the reward and the estimator said about them."""

    rollouts: Sequence[Rollout]
    scores: Scores
    advantages: Tensor
    """(P, G) or (P, G, T)."""
    kept: Sequence[int]
    """Groups that are trained; dynamic sampling leaves out those without spread."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Tensor | None = None
    """(P, G, T) the critic's, NaN off what the policy wrote."""
    returns: Tensor | None = None
    """(P, G, T) what the critic is to learn; NaN where nothing."""
    off_policy: bool = False
    """Whether the policy has moved since these were sampled: then the ratio is to `old_logps`."""
    old_logps: Tensor | None = None
    """(B, T) π_old's, of the groups that are trained, where the trainer computed them; None: the engine's are."""
    oldest: int | None = None
    """The oldest weights version whose tokens are trained; None trains all."""


class Source(Protocol):
    """Where experience comes from, and who else may ask the engine and the reward."""

    def start(self, run: Run) -> None:
        """Begin, before the first step of this process."""
        ...

    def next(self, run: Run, number: int, clock: Clock) -> Experience:
        """Return what step `number` learns from; raises what engine and reward raised while it was made."""
        ...

    def sync(self, run: Run, number: int, clock: Clock) -> None:
        """Take over the weights that step `number` has made."""
        ...

    def release(self) -> None:
        """Let the newest weights be sampled with: an evaluation that was due has been done."""
        ...

    def evaluate(self, run: Run, work: Callable[[], Generation]) -> Generation:
        """Do `work`, which asks engine and reward, with the policy's present weights, and return what it returns."""
        ...

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return what a resumed run needs of data, reward, random states and of what was made ahead."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a saved run had made ahead."""
        ...

    def close(self, run: Run) -> None:
        """End what is under way, and release the engine."""
        ...


@dataclass
class Run:
    """Everything one training run is made of, and how far it has come."""

    info: RunInfo
    policy: nn.Module
    reference: Reference | None
    engine: Engine
    reward: Reward
    advantage: Callable[..., Tensor]
    objective: Objective
    optimizer: torch.optim.Optimizer
    lr_at: Callable[[int], float]
    data: PromptStream
    source: Source
    eval_prompts: Sequence[Prompt]
    callbacks: Sequence[Callback]
    export: Callable[[Path], None]
    """Writes the model files of a checkpoint into a folder."""
    sampling: Sampling
    group_size: int
    prompts_per_step: int
    settings: UpdateSettings
    evaluation: EvaluationSettings
    generation: GenerationSettings = field(default_factory=lambda: GenerationSettings())
    save_every: int = 0
    keep_checkpoints: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    finished: int = 0
    """The last finished step; parameters, optimizer and `snapshot` are its."""
    best: tuple[float, int] | None = None
    """The best value of `evaluation.best_metric` so far, and its step; the untrained policy, never saved, has none."""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """RNG states and data position of the last finished step."""
    unreported: Step | None = None
    """The finished step that callbacks have not seen yet."""
    due: Due = field(default_factory=Due)
    """What is to be done after the finished step."""
    moving: bool = False
    """Whether the optimizer has begun to move the parameters of a step that is not finished: then nothing is saved."""
    saved: int | None = None
    """The step of the newest checkpoint."""
    owed: dict[str, float] = field(default_factory=dict)
    """Metrics of the last finished step while its evaluation is due: a run that stops in it evaluates when resumed."""
    entropy_control: EntropyControl | None = None
    kl_control: KlControl | None = None
    correction_control: CorrectionControl | None = None
    """Where objective.correction=auto."""
    watch: SyncWatch | None = None
    """The probe of what a sync brought, where there is one."""
    critic: Critic | None = None
    """Where the advantage asks for values."""
    reference_every: int = 0
    """Steps between refreshes of the reference; 0 keeps it as it was loaded."""
    reference_mix: float = 1.0
    """α of π_ref ← α·π + (1 − α)·π_ref; 1 is a hard reset."""
    reference_resets_optimizer: bool = False
    """Whether the optimizer's moments start from zero with each refresh."""
    pending: list[Experience] = field(default_factory=list)
    """The rest of a generation that serves several optimizer steps."""
    empty_steps: int = 0
    error_budget: ErrorBudget = field(default_factory=ErrorBudget)
    """How often rewards have failed of late."""
    divergence: Divergence | None = None
    """Where there is a held-out verifier: how it has compared with the training reward of late."""

    def reward_state(self) -> dict[str, Any]:
        """Return what the reward and its checks remember from step to step, for the checkpoint."""
        return {
            "functions": self.reward.state_dict(),
            "errors": self.error_budget.state_dict(),
            "divergence": self.divergence.state_dict() if self.divergence else None,
        }

    def load_reward_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what is switched on with the resume starts afresh."""
        self.reward.load_state_dict(state["functions"])
        self.error_budget.load_state_dict(state["errors"])
        if self.divergence and state["divergence"]:
            self.divergence.load_state_dict(state["divergence"])

    def sync_engine(self, version: int) -> None:
        """Let the engine take over the weights it samples with, and probe whether it has them."""
        self.engine.sync(version)
        if self.watch is None:
            return
        noise = self.watch.after_sync(partial(self.engine.sync, version))
        if noise is not None and self.correction_control and version == 0:
            self.correction_control.observe(noise.mean, noise.max)

    def probed(self) -> dict[str, float]:
        """Return what the latest probe measured, once."""
        return {} if self.watch is None else self.watch.measured()

    def controls(self) -> dict[str, EntropyControl | KlControl | CorrectionControl]:
        """Return the controllers that are in use, by name."""
        known = {"entropy": self.entropy_control, "kl": self.kl_control, "correction": self.correction_control}
        return {name: control for name, control in known.items() if control is not None}

    def controlled_objective(self) -> Objective:
        """Return the objective with what the controllers set where they have it now."""
        changes: dict[str, Any] = {}
        if self.correction_control:
            changes["correction"] = self.correction_control.value
        if self.entropy_control:
            changes["entropy_coef"] = self.entropy_control.coef
        if self.kl_control:
            changes["beta"] = self.kl_control.beta
        return replace(self.objective, **changes) if changes else self.objective

    def observe(self, metrics: Mapping[str, float], completions: int) -> dict[str, float]:
        """Let the controllers see a step's metrics; return what of theirs it was trained with."""
        used = self.controlled_objective()
        shown = {}
        if self.correction_control:
            shown["sampler/correction"] = self.correction_control.level
            if "sampler/logp_gap_mean" in metrics:
                names = ("logp_gap_mean", "logp_gap_max", "ess")
                self.correction_control.observe(*(metrics[f"sampler/{name}"] for name in names))
        if self.entropy_control or used.entropy_coef:
            shown["entropy_coef"] = used.entropy_coef
        if self.entropy_control and "entropy" in metrics:
            self.entropy_control.observe(metrics["entropy"])
        if self.kl_control:
            shown["beta"] = used.beta
            if "kl" in metrics:
                self.kl_control.observe(metrics["kl"], completions)
        return shown
