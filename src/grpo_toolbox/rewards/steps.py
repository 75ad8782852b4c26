"""Process reward models: a score for every step of a completion, paid at the policy's tokens.

A process reward model (Lightman et al., 2023; Wang et al., 2024) is a token classifier that is read where steps end.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.classifier import Classifier, Coded, Coder

if TYPE_CHECKING:
    from torch import Tensor

Step = tuple[int, float]
"""Where a step ends, in characters of the completion, and its score."""
Place = tuple[int, int]
"""Where a step ends, in characters of the completion, and the token of the model's at which its score is read."""

AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
    "sum": math.fsum,
    "product": math.prod,
}
"""One number of the scores of all steps."""

_LONGEST_CHARACTER = 8
"""Tokens that may spell one character; more of them are taken for text that is not well-formed."""


def step_ends(text: str, separator: str) -> list[int]:
    """Where each step of `text` ends, in characters, its separator included.

    Blank steps are none; a text without any is one step.
    """
    ends, begin = [], 0
    for found in re.finditer(re.escape(separator), text):
        if text[begin : found.start()].strip():
            ends.append(found.end())
        begin = found.end()
    return [*ends, len(text)] if text[begin:].strip() or not ends else ends


def step_scores(
    model: Classifier, prompts: Sequence[Any], texts: Sequence[str], separator: str | None
) -> tuple[list[list[Step] | None], int]:
    """The scores of every step of each completion, or (separator None) of every token of the model's; and how many
    texts were too long.

    A head with one label scores by its logit, one with two by the probability of the second. None for a completion that
    lost a part of its own. A last step without separator is read with one behind it, as such models are trained.
    """
    plans = [plan(model, *row, separator) for row in zip(prompts, texts, strict=True)]
    logits = model.logits([coded.ids for coded, _ in plans])
    steps = [
        None if read is None else [*zip([end for end, _ in read], _scores(row, [at for _, at in read]), strict=True)]
        for (_, read), row in zip(plans, logits, strict=True)
    ]
    return steps, sum(coded.lost > 0 for coded, _ in plans)


def plan(model: Classifier | Coder, prompt: Any, text: str, separator: str | None) -> tuple[Coded, list[Place] | None]:
    """What a model reads, and where its steps, or its tokens, are; None where the completion lost a part of its own."""
    ends = [] if separator is None else step_ends(text, separator)
    added = separator if separator and ends[-1] == len(text) and not text.endswith(separator) else ""
    coded = model.code(prompt, text + added)
    if coded.length < 0:
        raise ConfigError(
            f"the chat template of reward.path={model.path!r} rewrites completions, so that steps cannot be found in"
            " them: set reward.level=completion."
        )
    own = [(first, at) for at, (first, _) in enumerate(coded.spans) if 0 <= first < coded.length]
    real = [first for first, last in coded.spans if last > first]
    if coded.lost and (not real or real[0] > 0):
        return coded, None
    if separator is None:
        return coded, [(min(coded.spans[at][1], len(text)), at) for _, at in own]
    reach = [*ends[:-1], ends[-1] + len(added)]
    last = [max((at for first, at in own if first < end), default=len(coded.ids) - 1) for end in reach]
    return coded, [*zip(ends, last, strict=True)]


def _scores(logits: Tensor, places: Sequence[int]) -> list[float]:
    """The score at each place, of logits (T, 1) or (T, 2)."""
    scored = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(dim=-1)[:, 1]
    return [float(scored[place]) for place in places]


def paid(steps: Sequence[Step], ends: Sequence[int]) -> list[float]:
    """The scores of steps, each at the token of the policy's that completes it: `ends` is where those end."""
    pay = [0.0] * len(ends)
    for end, score in steps:
        pay[min(bisect_left(ends, end), len(ends) - 1)] += score
    return pay


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> list[int]:
    """How many characters of `text` stand when each token of the policy's is in.

    `text` is what `tokenizer` makes of `ids` without the stop token; ConfigError where it is not. A token that does not
    complete a character has the end of the one before.
    """
    ends: list[int] = []
    built, begin, read = "", 0, 0  # of ids[:read]; decoding from `begin` on keeps what a token looks like behind others
    kept = [token for token in ids if token != tokenizer.pad_token_id]
    place = 0
    for token in ids:
        place += token != tokenizer.pad_token_id
        before, now = _decoded(tokenizer, kept[begin:read]), _decoded(tokenizer, kept[begin:place])
        if len(now) > len(before) and (not now.endswith("\ufffd") or place - read >= _LONGEST_CHARACTER):
            built += now[len(before) :]
            begin, read = read, place
        ends.append(min(len(built), len(text)))
    built += _decoded(tokenizer, kept[begin:])[len(_decoded(tokenizer, kept[begin:read])) :]
    ends[-1] = min(len(built), len(text))  # also where the last character was never finished
    if not built.startswith(text):
        raise ConfigError(
            "the tokens of the policy do not spell its completions in the reward model's vocabulary: name the policy's"
            " tokenizer, reward.policy_tokenizer=${model.path}."
        )
    return ends


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
