"""What is measured: prompts of an exact length, completions of forced lengths, rewards that are fixed beforehand.

Everything here is the same for every side of a comparison, and needs no torch.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

SEED = 0


@dataclass(frozen=True)
class Workload:
    """One batch of rollouts: P prompts, G completions of each."""

    prompts: int
    group_size: int
    prompt_tokens: int
    """Exactly so many in every prompt."""
    max_new_tokens: int
    """Length of every completion, or of the longest where they are long-tailed."""
    mean_new_tokens: int | None = None
    """Mean of the long-tailed lengths; None: all completions are equally long."""
    flat_prompts: int = 0
    """Prompts whose completions all get the same reward."""
    lora_rank: int = 0
    """0 trains all weights."""

    @property
    def rows(self) -> int:
        """Completions of the batch."""
        return self.prompts * self.group_size

    def lengths(self) -> list[int]:
        """Return the length of each completion, prompt-major."""
        if self.mean_new_tokens is None:
            return [self.max_new_tokens] * self.rows
        return long_tailed(self.rows, self.mean_new_tokens, self.max_new_tokens)

    def small(self) -> Workload:
        """Return a batch of the same kind that takes a second: for trying a script out."""
        long = self.prompt_tokens > 100
        return replace(
            self,
            prompts=2,
            group_size=2,
            prompt_tokens=24 if long else 12,
            max_new_tokens=4 if self.mean_new_tokens is None else 8,
            mean_new_tokens=None if self.mean_new_tokens is None else 4,
            flat_prompts=min(self.flat_prompts, 1),
        )


STEPS = {
    "A": Workload(prompts=8, group_size=8, prompt_tokens=41, max_new_tokens=64),
    "A-lora": Workload(prompts=8, group_size=8, prompt_tokens=41, max_new_tokens=64, lora_rank=16),
    "B": Workload(prompts=8, group_size=8, prompt_tokens=41, max_new_tokens=64, flat_prompts=4),
    "C": Workload(prompts=4, group_size=8, prompt_tokens=401, max_new_tokens=32),
    "D": Workload(prompts=8, group_size=8, prompt_tokens=41, max_new_tokens=256, mean_new_tokens=64),
}
"""Whole optimizer steps, by the bar that they stand for."""

ROLLOUTS = {
    "E-64": Workload(prompts=8, group_size=8, prompt_tokens=41, max_new_tokens=64),
    "E-256": Workload(prompts=32, group_size=8, prompt_tokens=41, max_new_tokens=64),
    "E-prompt": Workload(prompts=8, group_size=8, prompt_tokens=401, max_new_tokens=64),
}
"""Rollouts alone."""


def workload(name: str, scale: str) -> Workload:
    """Return a workload by its name, at scale `full` or `small`."""
    found = (STEPS | ROLLOUTS)[name]
    return found.small() if scale == "small" else found


def long_tailed(rows: int, mean: int, longest: int) -> list[int]:
    """Return lengths at the quantiles of a log-normal (sigma 0.9) cut at `longest`, in a fixed random order.

    Their sum is exactly rows × mean, and the longest is `longest`.
    """
    quantiles = [NormalDist(sigma=0.9).inv_cdf((row + 0.5) / rows) for row in range(rows)]
    spread = [2.718281828459045**quantile for quantile in quantiles]
    low, high = 0.0, float(longest)
    for _ in range(60):
        median = (low + high) / 2
        cut = [min(max(median * factor, 1.0), longest) for factor in spread]
        low, high = (median, high) if sum(cut) < rows * mean else (low, median)
    lengths = [round(length) for length in cut]
    lengths[-1] = longest
    lengths[rows // 2] += rows * mean - sum(lengths)
    random.Random(SEED).shuffle(lengths)
    return lengths


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompt_rows(load: Workload, tokenizer: Any) -> list[dict[str, str]]:
    """Return the data of a workload: all prompts different, `kind` says whether rewards differ within the group."""
    texts = exact_prompts(load.prompts, load.prompt_tokens, tokenizer)
    kinds = ["flat"] * load.flat_prompts + ["mixed"] * (load.prompts - load.flat_prompts)
    return [{"prompt": text, "kind": kind} for text, kind in zip(texts, kinds, strict=True)]


def write_prompts(load: Workload, tokenizer: Any, path: Path) -> Path:
    """Write the data of a workload as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(load, tokenizer)), encoding="utf-8")
    return path


def exact_prompts(count: int, tokens: int, tokenizer: Any) -> list[str]:
    """Return `count` different few-shot prompts that the tokenizer turns into exactly `tokens` ids each."""
    draw = random.Random(SEED)
    prompts: list[str] = []
    while len(prompts) < count:
        text = ""
        while len(tokenizer(text).input_ids) < tokens:
            text += _solved_problem(draw)
        text = tokenizer.decode(tokenizer(text).input_ids[:tokens])
        if len(tokenizer(text).input_ids) == tokens and text not in prompts:
            prompts.append(text)
    return prompts


def _solved_problem(draw: random.Random) -> str:
    have, more = draw.randint(11, 89), draw.randint(11, 89)
    thing = draw.choice(["marbles", "stamps", "pencils", "walnuts", "buttons"])
    return (
        f"Question: A box holds {have} {thing}, and {more} more are put in. How many {thing} are in the box now?\n"
        f"Answer: {have} + {more} = {have + more}, so the box holds {have + more} {thing}.\n\n"
    )


# ---- rewards ---------------------------------------------------------------------------------------------------------

_scored: Counter[str] = Counter()


def fixed_reward(prompts: Sequence[str], kind: Sequence[str], **_: Any) -> list[float]:
    """Give 0 and 1 in turn to the completions of a `mixed` prompt and 1 to all of a `flat` one.

    Turns are counted per prompt, so that it does not matter in which portions a batch is scored.
    """
    rewards = []
    for prompt, one in zip(prompts, kind, strict=True):
        rewards.append(1.0 if one == "flat" else float(_scored[prompt] % 2))
        _scored[prompt] += 1
    return rewards


def reached(rewards: Sequence[float], goal: float, steps: int = 10) -> bool:
    """Tell whether the mean reward of the last ten steps is at least `goal`."""
    return len(rewards) >= steps and sum(rewards[-steps:]) / steps >= goal


def as_job(load: Workload) -> dict[str, Any]:
    """Return the workload as plain values, for another process."""
    return asdict(load)
