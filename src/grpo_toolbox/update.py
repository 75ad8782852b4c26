"""The update: a batch becomes optimizer steps.

Denominators are counted once per optimizer step over the whole batch, so that the losses of micro-batches add up to the
loss of the step however it is split; nothing reaches the optimizer before loss and gradient have been found finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, collate, denominators, micro_batches, prompt_lengths, rows_with_gradient
from grpo_toolbox.checkpoint import finished_step, latest_checkpoint
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.gradients import in_place, lay_out
from grpo_toolbox.meter import Meter
from grpo_toolbox.mismatch import MismatchMeter
from grpo_toolbox.models.experts import ExpertBalance
from grpo_toolbox.models.forward import autocast, completion_hidden, completion_logps, eval_mode
from grpo_toolbox.models.shelf import Shelf
from grpo_toolbox.objectives import Objective, choose_tokens, kl_penalty, loss_and_terms
from grpo_toolbox.ops import Denominators
from grpo_toolbox.run import Run
from grpo_toolbox.types import Rollout

Forwarded = tuple[Batch, Tensor | None]
"""The rows that a model runs over, and where among them each row of a micro-batch stands, or None for in order."""
_WORTH_HANDING_BACK = 64 * 2**20
"""Bytes of gradients from which on memory counts more than the time of asking."""


def update(run: Run, batch: Batch, number: int, rollouts: Sequence[Rollout] = ()) -> dict[str, float]:
    """Take `ppo_epochs` optimizer steps on one batch and return the metrics of what was trained: policy and critic.

    `rollouts` are all of the step, those of groups left out of the batch included: where none is trained, the engine is
    measured on some of them.
    """
    # a generation that serves several steps is gone through several times by those steps, not within one
    epochs = run.settings.ppo_epochs if run.generation.steps_per_generation == 1 else 1
    critic = run.critic
    if critic is None:
        return _update_policy(run, batch, number, epochs, rollouts)
    waits = number <= critic.settings.pretrain_steps
    metrics = _sampler_metrics(run, rollouts, number) if waits else _update_policy(run, batch, number, epochs, rollouts)
    run.moving = True
    shown = {"critic/pretraining": float(waits)} if critic.settings.pretrain_steps else {}
    return metrics | critic.update(batch, number, epochs) | shown


def _update_policy(run: Run, batch: Batch, number: int, epochs: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
    objective = run.controlled_objective()
    rows = _trained_rows(run, batch)
    counts, micros, forwarded = _prepared(run, objective, batch, rows, number)
    lr = run.lr_at(number)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_share", 1.0)
    meter = Meter(of_completions=objective.ratio_level != "token")
    shown = {} if bool(batch.mask[rows].any()) else _sampler_metrics(run, rollouts, number)
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    balance = _expert_balance(run, batch)
    large = run.device.type == "cpu" and sum(one.nbytes for one in parameters) >= _WORTH_HANDING_BACK
    shelf = Shelf(recompute_mlp=run.settings.recompute_mlp, frugal=large)
    run.policy.train()
    for epoch in range(epochs):
        meter.begin_pass()
        balance.count(micros, partial(_hidden, run))
        shelf.tidy()
        lay_out(parameters)
        for index, micro in enumerate(micros):
            with balance.watching(micro), in_place():
                logps, entropy = _logps(run, run.policy, forwarded[index], shelf)
            loss, terms = _loss(objective, counts, micro, logps, entropy)
            loss = loss + balance.loss()
            with in_place():
                loss.backward()
            shelf.clear()
            meter.add(loss, terms, micro.advantages, micro.mask)
            if epoch == 0:
                old_logps = logps.detach() if micro.old_logps is None else micro.old_logps
                meter.mismatch.add(logps.detach(), micro.sampler_logps, micro.mask, _ages(micro, number))
                micros[index] = replace(micro, old_logps=old_logps)
        norm = _step(run, parameters, meter, number)
    tokens = sum(rows_forwarded.forward_tokens for rows_forwarded, _ in forwarded)
    trained = {"rows_trained": float(len(rows)), "forward_tokens": float(tokens), "grad_norm": norm}
    found = meter.metrics(float(batch.mask.sum()), len(batch)) | balance.metrics(epochs)
    return shown | _with_policy_loss(run, found) | trained | {"lr": lr}


@torch.no_grad()
def measure_loss(run: Run, batch: Batch, number: int) -> dict[str, float]:
    """Return the loss that an update on all of `batch` would begin with, and its terms; nothing moves."""
    objective = run.controlled_objective()
    counts, micros, forwarded = _prepared(run, objective, batch, range(len(batch)), number)
    meter = Meter(of_completions=objective.ratio_level != "token")
    balance = _expert_balance(run, batch)
    meter.begin_pass()
    with eval_mode(run.policy):
        balance.count(micros, partial(_hidden, run))
        for micro, rows in zip(micros, forwarded, strict=True):
            with balance.watching(micro):
                logps, entropy = _logps(run, run.policy, rows)
            loss, terms = _loss(objective, counts, micro, logps, entropy)
            meter.add(loss + balance.loss(), terms, micro.advantages, micro.mask)
            meter.mismatch.add(logps, micro.sampler_logps, micro.mask, _ages(micro, number))
    return _with_policy_loss(run, meter.metrics(float(batch.mask.sum()), len(batch)) | balance.metrics(1))


def _prepared(
    run: Run, objective: Objective, batch: Batch, rows: Sequence[int], number: int
) -> tuple[Denominators, list[Batch], list[Forwarded]]:
    """Return what a batch's losses are divided by, its `rows` as micro-batches, and what is forwarded for each."""
    counts = denominators(batch, objective.length or run.sampling.max_new_tokens)
    if run.settings.recompute_old_logps and batch.old_logps is None:
        batch = replace(batch, old_logps=trainer_logps(run, batch))
    micros = _micros(run, replace(batch, prompt_length=prompt_lengths(batch)), rows)
    forwarded = [_forwarded(run, micro) for micro in micros]  # policy, reference and all epochs run over the same
    micros = [_with_reference(run, *both) for both in zip(micros, forwarded, strict=True)]
    return counts, _with_choice(run, micros, forwarded, number), forwarded


def _loss(
    objective: Objective, counts: Denominators, micro: Batch, logps: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the loss, and the terms to be logged, entropy (B, T) among them."""
    loss, terms = loss_and_terms(
        objective,
        logps=logps,
        entropy=entropy,
        advantages=micro.advantages,
        mask=micro.mask,
        denominators=replace(counts, prompt_length=micro.prompt_length),
        old_logps=micro.old_logps,
        ref_logps=micro.ref_logps,
        sampler_logps=micro.sampler_logps,
        trained=micro.trained,
        anchored=micro.anchored,
    )
    return loss, terms | {"entropy": entropy.detach()}


def _with_policy_loss(run: Run, found: dict[str, float]) -> dict[str, float]:
    """Add the loss without the entropy's bonus and the router's loss, where there is a bonus."""
    bonus = found.pop("entropy_bonus", 0.0)
    if not run.objective.entropy_coef and run.objective.entropy_target is None:
        return found
    return found | {"policy_loss": found["loss"] + bonus - run.settings.router_aux_coef * found.get("aux_loss", 0.0)}


def _sampler_metrics(run: Run, rollouts: Sequence[Rollout], number: int) -> dict[str, float]:
    """Measure engine and entropy where no row is trained, on as many rollouts as a micro-batch holds, whole."""
    meter, shown = MismatchMeter(), {}
    if rollouts:
        batch = collate(rollouts, torch.zeros(len(rollouts) // run.group_size, run.group_size))
        wrote = batch.mask.any(dim=1).nonzero().squeeze(1).tolist()
        for rows in micro_batches(batch, wrote, run.settings.micro_batch_tokens)[:1]:
            micro = batch.select(rows).to(run.device)
            logps, entropy = _as_sampled(run, micro)
            meter.add(logps, micro.sampler_logps, micro.mask, _ages(micro, number))
            shown = {"entropy": float(entropy[micro.mask].mean())}
    return shown | meter.metrics()


def _expert_balance(run: Run, batch: Batch) -> ExpertBalance:
    rows_per_prompt = len(batch) / max(len(batch.prompts), 1)
    settings = run.settings
    return ExpertBalance(run.policy, settings.router_aux_coef, rows_per_prompt=rows_per_prompt, packed=settings.packed)


def reward_penalty(run: Run, rollouts: Sequence[Rollout], group_size: int) -> Tensor | None:
    """Return beta · KL per token (P, G, T), NaN off what was written, where the objective takes it off the reward.

    The policy's log-probs are those its engine sampled with, or the trainer's where the engine's are not as good.
    """
    if run.reference is None or run.objective.kl_in != "reward":
        return None
    batch = collate(rollouts, torch.zeros(len(rollouts) // group_size, group_size))
    penalty = torch.full_like(batch.sampler_logps, torch.nan)
    for rows in micro_batches(batch, range(len(batch)), run.settings.micro_batch_tokens):
        micro = batch.select(rows).to(run.device)
        micro = _with_reference(run, micro, _forwarded(run, micro), always=True)
        assert micro.ref_logps is not None
        logps = micro.sampler_logps if run.generation.reuse_logps else _as_sampled(run, micro)[0]
        taken = kl_penalty(run.controlled_objective(), logps, micro.ref_logps, micro.mask)
        taken = torch.where(micro.mask, taken, torch.nan).cpu()
        penalty[torch.tensor(rows), : taken.shape[1]] = taken
    return penalty.reshape(-1, group_size, penalty.shape[1])


def trainer_logps(run: Run, batch: Batch) -> Tensor:
    """Return the log-probs (B, T) of the policy as it is now, without gradient, zeros for rows that are not trained."""
    logps = torch.zeros(batch.mask.shape)
    for rows in micro_batches(batch, _trained_rows(run, batch), run.settings.micro_batch_tokens):
        found = _as_sampled(run, batch.select(rows).to(run.device))[0].cpu()
        logps[torch.tensor(rows), : found.shape[1]] = found
    return logps


def _trained_rows(run: Run, batch: Batch) -> list[int]:
    objective, settings = run.controlled_objective(), run.settings
    skip = settings.skip_zero_advantage and objective.zero_advantage_is_zero_gradient and not settings.router_aux_coef
    return rows_with_gradient(batch) if skip else list(range(len(batch)))


@torch.no_grad()
def _as_sampled(run: Run, micro: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (B, T) of the policy as it samples: without gradient, and without dropout."""
    with eval_mode(run.policy):
        return policy_logps(run, micro)


def policy_logps(run: Run, micro: Batch) -> tuple[Tensor, Tensor]:
    """Return the policy's log-probs and entropies (B, T) at the sampling temperature."""
    return _logps(run, run.policy, _forwarded(run, micro))


def _logps(run: Run, model: nn.Module, forwarded: Forwarded, shelf: Shelf | None = None) -> tuple[Tensor, Tensor]:
    rows, place = forwarded
    with autocast(run.device, run.settings.autocast):
        both = completion_logps(
            model,
            rows,
            temperature=run.sampling.temperature or 1.0,
            packed=run.settings.packed,
            shelf=shelf,
        )
    return both if place is None else (both[0][place], both[1][place])


def _forwarded(run: Run, micro: Batch) -> Forwarded:
    """Return the rows that a model runs over: equal ones once, where nothing counts each row's tokens."""
    return micro.distinct if run.settings.packed and not run.settings.router_aux_coef else (micro, None)


def _hidden(run: Run, micro: Batch) -> Tensor:
    with autocast(run.device, run.settings.autocast):
        return completion_hidden(run.policy, micro, packed=run.settings.packed)


def _micros(run: Run, batch: Batch, rows: Sequence[int]) -> list[Batch]:
    parts = micro_batches(batch, rows, run.settings.micro_batch_tokens)
    return [batch.select(part).to(run.device) for part in parts]


def _with_reference(run: Run, micro: Batch, forwarded: Forwarded, always: bool = False) -> Batch:
    """Add the reference's log-probs, once for all epochs, where the loss (or `always`) needs them."""
    if run.reference is None or not (always or run.objective.kl_in_loss):
        return micro
    with torch.no_grad(), run.reference.model() as reference:
        ref_logps, _ = _logps(run, reference, forwarded)
    return replace(micro, ref_logps=ref_logps)


@torch.no_grad()
def _with_choice(run: Run, micros: list[Batch], forwarded: Sequence[Forwarded], number: int) -> list[Batch]:
    """Mark which tokens are trained, and which anchored, where the objective chooses: a pass over the step before."""
    if not run.objective.chooses_tokens or not micros:
        return micros
    seen = [
        (micro.mask, *_logps(run, run.policy, rows), micro.advantages.expand(micro.mask.shape))
        for micro, rows in zip(micros, forwarded, strict=True)
    ]
    logps, entropies, advantages = (torch.cat([one[index][one[0]] for one in seen]) for index in (1, 2, 3))
    seed = run.sampling.seed * 1_000_003 + number
    chosen = choose_tokens(run.objective, seed, logps=logps, entropies=entropies, advantages=advantages)
    columns = zip(micros, *(_per_micro(marks, micros) for marks in chosen), strict=True)
    return [replace(micro, trained=trained, anchored=anchored) for micro, trained, anchored in columns]


def _per_micro(flat: Tensor | None, micros: Sequence[Batch]) -> list[Tensor | None]:
    """Deal marks of all of a step's tokens (N,) out to the micro-batches they came from, each (B, T)."""
    if flat is None:
        return [None] * len(micros)
    parts = flat.split([int(micro.mask.sum()) for micro in micros])
    return [
        torch.zeros_like(micro.mask).masked_scatter(micro.mask, part) for micro, part in zip(micros, parts, strict=True)
    ]


def _ages(micro: Batch, number: int) -> Tensor:
    """Return how many updates before step `number` the weights were made that drew each token (B, T)."""
    return torch.zeros_like(micro.mask, dtype=torch.long) if micro.versions is None else number - 1 - micro.versions


def _step(run: Run, parameters: Sequence[nn.Parameter], meter: Meter, number: int) -> float:
    """Clip the gradient and let the optimizer move, unless something is not finite; return the norm before clipping.

    A batch without any gradient still decays momentum, skipped rows or not.
    """
    norm = float(nn.utils.clip_grad_norm_(parameters, run.settings.max_grad_norm))
    if not (meter.is_finite() and norm < float("inf")):
        run.optimizer.zero_grad(set_to_none=True)
        what = "loss" if not meter.is_finite() else "gradient"
        raise TrainingError(
            f"step {number}: the {what} is not finite, so the optimizer was not called; {_what_is_left(run, number)}. "
            "Lower trainer.lr or trainer.max_grad_norm, or look at what the step was trained on."
        )
    run.moving = True
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


def _what_is_left(run: Run, number: int) -> str:
    """Say where a run stands whose step `number` broke off: whose parameters it has, and what can be gone back to."""
    if not run.moving:
        return f"the parameters are still those of step {number - 1}" if number > 1 else "no parameter has moved yet"
    newest = latest_checkpoint(run.info.run_dir / "checkpoints", warn=False)
    moved = "earlier epochs of the step have moved the parameters"
    if newest is None:
        return f"{moved}, and there is no checkpoint to go back to (trainer.save_every=N saves every N steps)"
    return f"{moved}, so the newest checkpoint, that of step {finished_step(newest)}, is the one to go back to"
