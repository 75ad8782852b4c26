"""Prompts to advantages: one generation of rollouts, scored and estimated, in portions of one optimizer step each.

`sample_generation` asks data, engine and reward alone, so that it may run ahead in another thread; `experiences` asks
policy, reference and critic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_toolbox.advantages import estimate, needs_others, value_targets
from grpo_toolbox.batch import Batch, collate, written
from grpo_toolbox.engines.convention import check_convention
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.metrics import without_spread
from grpo_toolbox.rewards import HeldOutScoring, Scoring, TrainerState, joined_metrics
from grpo_toolbox.rewards.heldout import Checked
from grpo_toolbox.rollout import rollout
from grpo_toolbox.run import Clock, Experience, Generation, Run
from grpo_toolbox.staleness import drawn_since, group_ages, tokens_before
from grpo_toolbox.types import Convention, Prompt, Rollout, Sampling, Scores
from grpo_toolbox.update import reward_penalty, trainer_logps


def next_experience(run: Run, number: int, clock: Clock) -> Experience:
    """Return what step `number` learns from: the next portion of the last generation, or of a new one."""
    if not run.pending:
        run.pending = experiences(run, sample_generation(run, number, clock), number, clock)
    return run.pending.pop(0)


def batch_of(run: Run, experience: Experience) -> Batch:
    """Put the groups that are trained into one batch; off-policy ones carry π_old's log-probs."""
    batch = collate(experience.rollouts, experience.advantages, mask_truncated=run.objective.mask_truncated)
    if experience.values is not None and experience.returns is not None:
        values, returns = (
            one.flatten(0, 1)[:, : batch.mask.shape[1]] for one in (experience.values, experience.returns)
        )
        batch = replace(batch, values=values, returns=returns)
    if experience.oldest is not None:
        batch = replace(batch, mask=batch.mask & drawn_since(experience.rollouts, experience.oldest))
    if len(experience.kept) < experience.advantages.shape[0]:
        batch = batch.select(_rows(experience.kept, run.group_size))
    if not experience.off_policy:
        return batch
    return replace(batch, old_logps=batch.sampler_logps if experience.old_logps is None else experience.old_logps)


def sample_generation(run: Run, number: int, clock: Clock) -> Generation:
    """Sample and score what step `number`, and those that share its rollouts, are to learn from."""
    wanted = run.prompts_per_step * run.generation.steps_per_generation
    rollouts, scores, metrics = _sample(run, wanted, number, clock)
    made = scores.total.shape[0]
    if not run.generation.dynamic_sampling:
        return Generation(number, rollouts, scores, list(range(made)), metrics)
    kept = (~without_spread(scores.total)).nonzero().squeeze(1).tolist()[:wanted]
    metrics |= {"rollout/groups_dropped": float(made - len(kept)), "rollout/oversampling": made / wanted}
    return Generation(number, rollouts, scores, kept, metrics)


def steps_served(run: Run, generation: Generation) -> int:
    """Return how many optimizer steps learn from a generation."""
    steps = run.generation.steps_per_generation
    portions = _portions(generation.kept, generation.scores.total.shape[0], steps, run.prompts_per_step)
    return len(portions) * (run.settings.ppo_epochs if steps > 1 else 1)


def experiences(run: Run, generation: Generation, number: int, clock: Clock) -> list[Experience]:
    """Return what the steps from `number` on learn from a generation: none where all its groups are too old."""
    _stop_when_empty(run, generation.kept)
    rollouts, metrics = generation.rollouts, dict(generation.metrics)
    kept, oldest = _young_enough(run, generation, number)
    if generation.kept and not kept:
        return []
    if generation.ahead:
        metrics["async/groups_dropped"] = float(len(generation.kept) - len(kept))
        metrics["async/tokens_masked"] = 0.0 if oldest is None else float(tokens_before(rollouts, oldest))
    whole = replace(estimated(run, replace(generation, kept=kept, metrics=metrics)), oldest=oldest)
    stale = generation.ahead and any(one.oldest_version < number - 1 for one in rollouts)
    # with a correction the ratio is to the policy as the update begins, and the correction takes it on to the sampler
    corrected = run.controlled_objective().corrects
    whole = replace(whole, off_policy=stale and not corrected and run.generation.old_is_sampler)
    if run.generation.steps_per_generation == 1:
        return [whole]
    again = not run.generation.reuse_logps or (stale and corrected)
    return _dealt(run, whole, clock, compute_old=again and not whole.off_policy)


def estimated(run: Run, generation: Generation) -> Experience:
    """Add what policy, reference and critic say of a generation: a KL in the reward, values, advantages."""
    rollouts, scores, metrics = generation.rollouts, generation.scores, dict(generation.metrics)
    size = scores.total.shape[1]
    penalty = reward_penalty(run, rollouts, size)
    values = _values(run, rollouts, size)
    if penalty is not None:
        metrics["kl"] = float(penalty.nanmean()) / run.controlled_objective().beta
    return Experience(
        rollouts,
        scores,
        _advantages(run, scores, penalty, values, generation.kept),
        generation.kept,
        metrics,
        values=values,
        returns=None if values is None else value_targets(run.advantage, scores, values, penalty),
    )


def _dealt(run: Run, whole: Experience, clock: Clock, *, compute_old: bool) -> list[Experience]:
    """Deal a generation out to the steps that share it; with `compute_old` π_old's log-probs are the trainer's now."""
    steps, made = run.generation.steps_per_generation, whole.scores.total.shape[0]
    first, *later = [take(whole, groups) for groups in _portions(whole.kept, made, steps, run.prompts_per_step)]

    def with_old(portion: Experience) -> Experience:
        return replace(portion, old_logps=trainer_logps(run, batch_of(run, portion))) if compute_old else portion

    with clock("update"):
        first = with_old(first) if run.settings.ppo_epochs > 1 else first
        portions = [first, *map(with_old, later)]
    again = [replace(one, scores=replace(one.scores, metrics={}), metrics={}) for one in portions]
    passes = [*portions, *(again * (run.settings.ppo_epochs - 1))]
    return [replace(one, off_policy=index > 0 or one.off_policy) for index, one in enumerate(passes)]


def _young_enough(run: Run, generation: Generation, number: int) -> tuple[Sequence[int], int | None]:
    """Return the groups that are young enough to be trained, and the oldest version whose tokens are; None for all."""
    if not generation.ahead:
        return generation.kept, None
    limit = run.generation.max_staleness
    if run.generation.on_stale == "mask":
        return generation.kept, number - 1 - limit
    ages = group_ages(generation.rollouts, run.group_size, number)
    return [group for group in generation.kept if ages[group] <= limit], None


def _sample(run: Run, wanted: int, number: int, clock: Clock) -> tuple[list[Rollout], Scores, dict[str, float]]:
    """Sample and score `wanted` groups; with dynamic sampling, until so many have spread or the ceiling is reached.

    Returns the rollouts, their scores, and the metrics of what follows them: weights that move, the held-out verifier.
    """
    rollouts: list[Rollout] = []
    parts: list[Scores] = []
    checks: list[Checked] = []
    state = TrainerState(number, run.info.max_steps)
    for turn, prompts in enumerate(_prompts(run, wanted, parts)):
        drawn, scores, checked = _scored(run, prompts, _seeded(run.sampling, number, turn), state, clock)
        rollouts += drawn
        parts.append(scores)
        checks.append(checked)
    whole = _joined(parts, rollouts)
    metrics = run.reward.moving_weights(state)
    run.reward.observe(whole.components.flatten(0, 1).T.tolist())
    return rollouts, whole, metrics | (run.divergence.observe(checks) if run.divergence else {})


def _scored(
    run: Run, prompts: Sequence[Prompt], sampling: Sampling, state: TrainerState, clock: Clock
) -> tuple[list[Rollout], Scores, Checked]:
    """Sample one call's groups and score them; rewards that wait are asked while the engine goes on."""
    size, heldout = run.group_size, run.reward.heldout
    with (
        Scoring(run.reward, size, state, run.error_budget) as scoring,
        HeldOutScoring(heldout, size, state, run.error_budget) as check,
    ):

        def on_group(group: int, finished: Sequence[Rollout]) -> None:
            scoring.add(group * size, finished)
            check.add(group, finished)

        with clock("rollout"):
            drawn = rollout(run.engine, prompts, size, sampling, on_group)
        for convention in {one.convention for one in drawn}:
            check_convention(convention, corrected=run.objective.corrects)
        with clock("reward"):
            scores = scoring.scores()
            settled = run.reward.settled(run.info.max_steps)
            return drawn, scores, check.checked(scores.components, [part.weight for part in settled.components])


def _prompts(run: Run, wanted: int, parts: Sequence[Scores]) -> Iterator[list[Prompt]]:
    """Hand out prompts for as many groups as `parts`, which the caller fills, still lacks."""
    yield run.data.next(wanted)
    if not run.generation.dynamic_sampling:
        return
    room = wanted * (run.generation.max_oversampling - 1)
    while room > 0:
        missing = wanted - sum(int((~without_spread(part.total)).sum()) for part in parts)
        if missing <= 0:
            return
        yield run.data.next(min(missing, room))
        room -= min(missing, room)


def _seeded(sampling: Sampling, number: int, turn: int) -> Sampling:
    """Return the sampling of one call: other random streams each step and turn, the same ones after a resume."""
    return replace(sampling, seed=sampling.seed * 1_000_003 + number + (turn << 40))


def _values(run: Run, rollouts: Sequence[Rollout], group_size: int) -> Tensor | None:
    """Return the critic's values (P, G, T) before each token, NaN where the policy wrote none, if there is a critic."""
    if run.critic is None:
        return None
    batch = collate(rollouts, torch.zeros(len(rollouts) // group_size, group_size))
    values = torch.where(batch.mask, run.critic.values(batch), torch.nan)
    return values.reshape(-1, group_size, values.shape[1])


def _advantages(run: Run, scores: Scores, penalty: Tensor | None, values: Tensor | None, kept: Sequence[int]) -> Tensor:
    """Estimate over the kept groups alone; the others get exactly 0, and so does a completion without others."""
    if scores.total.shape[1] == 1 and needs_others(run.advantage):  # in an evaluation
        return torch.zeros_like(scores.total)
    if len(kept) == scores.total.shape[0]:
        return estimate(run.advantage, scores, penalty, values)
    advantages = torch.zeros_like(scores.total)
    if not kept:
        return advantages
    groups = torch.tensor(kept)
    per_token = [None if column is None else column[groups] for column in (penalty, values)]
    found = estimate(run.advantage, _groups_of(scores, kept), *per_token)
    if found.ndim == 3:
        advantages = torch.zeros(*scores.total.shape, found.shape[2])
    return advantages.index_copy(0, groups, found)


def _stop_when_empty(run: Run, kept: Sequence[int]) -> None:
    run.empty_steps = 0 if kept else run.empty_steps + 1
    if run.empty_steps >= run.generation.max_empty_steps:
        raise TrainingError(
            f"{run.empty_steps} steps in a row found no group whose rewards differ: there is nothing to learn from. "
            "The task is too hard or too easy for the policy, or the reward never (or always) pays: see samples.jsonl."
        )


def _portions(kept: Sequence[int], made: int, steps: int, size: int) -> list[list[int]]:
    """Deal the kept groups out to the steps; groups that were dropped are reported with the first."""
    dropped = sorted(set(range(made)) - set(kept))
    portions = [list(kept[index * size : (index + 1) * size]) for index in range(steps)]
    return [sorted([*portions[0], *dropped]), *(portion for portion in portions[1:] if portion)]


def take(whole: Experience, groups: Sequence[int]) -> Experience:
    """Return these groups of a generation; what was counted over all of it is reported once, with the first."""
    group_size = whole.scores.total.shape[1]
    index = torch.tensor(groups, dtype=torch.long)
    first = 0 in groups or not groups
    scores = _groups_of(whole.scores, groups)
    return Experience(
        rollouts=[whole.rollouts[row] for row in _rows(groups, group_size)],
        scores=scores if first else replace(scores, metrics={}),
        advantages=whole.advantages[index],
        kept=[place for place, group in enumerate(groups) if group in set(whole.kept)],
        metrics=whole.metrics if first else {},
        values=None if whole.values is None else whole.values[index],
        returns=None if whole.returns is None else whole.returns[index],
        off_policy=whole.off_policy,
        oldest=whole.oldest,
    )


def _rows(groups: Sequence[int], group_size: int) -> list[int]:
    return [group * group_size + place for group in groups for place in range(group_size)]


def _groups_of(scores: Scores, groups: Sequence[int]) -> Scores:
    index = torch.tensor(groups, dtype=torch.long)
    rows = _rows(groups, scores.total.shape[1])
    return replace(
        scores,
        components=scores.components[index],
        total=scores.total[index],
        extras={name: [values[row] for row in rows] for name, values in scores.extras.items()},
        token_rewards=None if scores.token_rewards is None else scores.token_rewards[index],
    )


def _joined(parts: Sequence[Scores], rollouts: Sequence[Rollout]) -> Scores:
    if len(parts) == 1:
        return parts[0]
    rows = [part.total.numel() for part in parts]
    names = sorted({name for part in parts for name in part.extras})
    return replace(
        parts[0],
        components=torch.cat([part.components for part in parts]),
        total=torch.cat([part.total for part in parts]),
        extras={
            name: [
                value for part, size in zip(parts, rows, strict=True) for value in part.extras.get(name, [None] * size)
            ]
            for name in names
        },
        metrics=joined_metrics([part.metrics for part in parts], rows),
        token_rewards=_joined_tokens(parts, rollouts),
    )


def _joined_tokens(parts: Sequence[Scores], rollouts: Sequence[Rollout]) -> Tensor | None:
    """Put token rewards of different T together, (P, G, T): NaN off what was written, 0 where a part has none."""
    if all(part.token_rewards is None for part in parts):
        return None
    on = written(rollouts)  # (B, T)
    width, group_size = on.shape[1], parts[0].total.shape[1]
    columns = [torch.zeros(*one.total.shape, 1) if one.token_rewards is None else one.token_rewards for one in parts]
    paid = torch.cat([nn.functional.pad(one.nan_to_num(0.0), (0, width - one.shape[-1])) for one in columns])
    return torch.where(on.reshape(-1, group_size, width), paid, torch.nan)


# ---- the checkpoint's form of what is not used up --------------------------------------------------------------------


def to_state(records: Sequence[Experience] | Sequence[Generation]) -> list[dict[str, Any]]:
    """Return records as plain dicts and tensors."""
    return [
        {
            **vars(one),
            "rollouts": [
                {**vars(row), "prompt": vars(row.prompt), "convention": vars(row.convention)} for row in one.rollouts
            ],
            "scores": vars(one.scores),
        }
        for one in records
    ]


Record = TypeVar("Record", Experience, Generation)


def from_state(state: Sequence[Mapping[str, Any]], kind: type[Record]) -> list[Record]:
    """Return the records, all of one kind, that `to_state` was given."""
    return [
        kind(
            **{
                **one,
                "rollouts": [_rollout(row) for row in one["rollouts"]],
                "scores": Scores(**one["scores"]),
            }
        )
        for one in state
    ]


def _rollout(row: Mapping[str, Any]) -> Rollout:
    convention = Convention(**row.get("convention", {}))  # which checkpoints of old do not have
    return Rollout(**{**row, "prompt": Prompt(**row["prompt"]), "convention": convention})
