"""Evaluation on held-out prompts: completions scored by the training reward, never trained on.

In two halves, as experience is made: `sample` asks engine and reward alone, and may be called in another thread;
`measure` asks policy, reference and critic for the loss. Neither moves anything that training goes on with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from grpo_toolbox.checkpoint import rng_kept
from grpo_toolbox.experience import batch_of, estimated
from grpo_toolbox.metrics import step_metrics
from grpo_toolbox.rewards import Scoring, TrainerState
from grpo_toolbox.rollout import rollout
from grpo_toolbox.run import Generation, Run
from grpo_toolbox.types import Prompt, Rollout
from grpo_toolbox.update import measure_loss


def evaluate(run: Run, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return the metrics of the policy as it is on `prompts`, named `eval/…`, and the seconds it took."""
    return measure(run, sample(run, prompts))


def sample(run: Run, prompts: Sequence[Prompt]) -> Generation:
    """Sample the evaluation's completions of each prompt and score them by the reward as it is at the end of training.

    A reward may draw random numbers; training goes on with those it would have had.
    """
    started = time.perf_counter()
    size = run.evaluation.completions
    state = TrainerState(run.finished + 1, run.info.max_steps, evaluating=True)
    settled = run.reward.settled(run.info.max_steps)
    with rng_kept(), Scoring(settled, size, state, run.error_budget) as scoring:

        def on_group(group: int, finished: Sequence[Rollout]) -> None:
            scoring.add(group * size, finished)

        rollouts = rollout(run.engine, prompts, size, run.evaluation.sampling, on_group)
        scores = scoring.scores()
    seconds = {"time/eval": time.perf_counter() - started}
    return Generation(run.finished + 1, rollouts, scores, range(len(prompts)), seconds)


def measure(run: Run, sampled: Generation) -> dict[str, float]:
    """Return `eval/reward`, `eval/pass@1` (share solved), spread, components, lengths; and where it is asked for the
    loss with its terms, over all completions, advantages estimated as in training.

    A prompt that no reward applies to is left out of what is said of rewards, as in training; where none does, all of
    that is left out.
    """
    started = time.perf_counter()
    found = step_metrics(sampled.rollouts, sampled.scores)
    if run.evaluation.completions == 1:
        del found["duplicate_rate"]
    if run.evaluation.with_loss:
        learnt = estimated(run, sampled)
        found |= measure_loss(run, batch_of(run, learnt), sampled.number) | dict(learnt.metrics)
    named = {NAMES.get(name, f"eval/{name}"): value for name, value in found.items() if not name.startswith("time/")}
    return named | {"time/eval": sampled.metrics["time/eval"] + time.perf_counter() - started}


NAMES = {
    "reward_mean": "eval/reward",
    "reward_std": "eval/reward_std",
    "pass_rate": "eval/pass@1",
    "completion_tokens": "eval/completion_tokens",
    "completions/clipped_ratio": "eval/clipped_ratio",
}
"""What is called otherwise than in training."""
