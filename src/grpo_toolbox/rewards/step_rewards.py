"""Process reward models as rewards: what steps score, here or behind a server, paid per token or as one number."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo_toolbox.rewards.classifier import Classifier, Coder, load_tokenizer
from grpo_toolbox.rewards.model_server import COMBINE, Server, chat, log_spread, missing, only_number
from grpo_toolbox.rewards.steps import AGGREGATES, Place, Step, paid, plan, step_ends, step_scores, token_ends
from grpo_toolbox.rewards.text import completion_text

log = logging.getLogger(__name__)

_SUM_OF_PROBABILITIES = 1e-3
"""How far from 1 two numbers may add up that are probabilities; others are logits."""


class StepPay:
    """Makes rewards of the scores of steps: at the policy's tokens, or, with `aggregate`, one number."""

    def __init__(self, ensemble: str, aggregate: str | None, policy_tokenizer: Any) -> None:
        self.pays_per_token = aggregate is None
        self._combine = COMBINE[ensemble]
        self._aggregate = AGGREGATES[aggregate] if aggregate else None
        named = isinstance(policy_tokenizer, str)
        self._tokenizer = load_tokenizer(policy_tokenizer, "reward.policy_tokenizer") if named else policy_tokenizer

    def rewards(
        self,
        rows: Sequence[Sequence[list[Step] | Exception | None]],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None,
        log_metric: Any,
        log_extra: Any,
    ) -> list[Any]:
        """Of what each model says about each completion: a number, or the sum with `token_rewards`.

        None where a model says nothing, the exception where one failed. Extra column `step_scores` is the first's.
        """
        if log_extra is not None:
            shown = [row[0] for row in rows]
            log_extra("step_scores", [[score for _, score in one] if isinstance(one, list) else None for one in shown])
        whole = [[one for one in row if isinstance(one, list)] for row in rows]
        complete = [len(own) == len(row) for own, row in zip(whole, rows, strict=True)]
        if self._aggregate is not None:
            numbers = [[self._aggregate([score for _, score in one]) for one in own] for own in whole]
            log_spread([own for own, fits in zip(numbers, complete, strict=True) if fits], log_metric)
            made: list[Any] = [
                self._combine(own) if fits else None for own, fits in zip(numbers, complete, strict=True)
            ]
        elif completion_ids is None:
            raise TypeError("reward_model pays per token and needs completion_ids")
        else:
            made = [
                self._paid(own, ids, text) if fits else None
                for own, fits, ids, text in zip(whole, complete, completion_ids, texts, strict=True)
            ]
        return [one if one is not None else missing(row) for one, row in zip(made, rows, strict=True)]

    def _paid(self, steps: Sequence[list[Step]], ids: Sequence[int], text: str) -> dict[str, Any]:
        ends = token_ends(self._tokenizer, ids, text)
        pay = [self._combine(token) for token in zip(*(paid(one, ends) for one in steps), strict=True)]
        return {"score": math.fsum(pay), "token_rewards": pay}


class StepScores:
    """The scores that token classifiers of this process give to the steps of a completion."""

    __name__ = "reward_model"

    def __init__(self, models: Sequence[Classifier], pay: StepPay, separator: str | None) -> None:
        self.models = models
        self.pays_per_token = pay.pays_per_token
        self._pay = pay
        self._separator = separator
        self._truncation = Truncation()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Any = None,
        log_extra: Any = None,
    ) -> list[Any]:
        """Per completion what `StepPay` makes of it; None where a part did not fit."""
        texts = [completion_text(completion) for completion in completions]
        per_model = []
        for model in self.models:
            steps, long = step_scores(model, prompts, texts, self._separator)
            self._truncation.say(model, long, log_metric)
            per_model.append(steps)
        return self._pay.rewards([*zip(*per_model, strict=True)], texts, completion_ids, log_metric, log_extra)


class ServedSteps:
    """The scores that a server gives to steps of a completion, or (separator None) to its tokens.

    With `coder`, the served model's own, a server may answer with a score for every token that it was sent.
    """

    __name__ = "reward_model"

    def __init__(
        self, server: Server, pay: StepPay, separator: str | None, mark: str | None, coder: Coder | None
    ) -> None:
        self.pays_per_token = pay.pays_per_token
        self._server = server
        self._pay = pay
        self._separator = separator
        self._mark = mark
        self._coder = coder if mark is None else None

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Any = None,
        log_extra: Any = None,
    ) -> list[Any]:
        """Per completion what `StepPay` makes of it; the exception where the server could not be asked."""
        texts = [completion_text(completion) for completion in completions]
        chats = [chat(*row) for row in zip(prompts, texts, strict=True)]
        plain: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions}
        reads: list[Callable[[Any], list[Step]]] = [partial(_read_tokens, length=len(text)) for text in texts]
        if self._separator is not None:
            ends = [step_ends(text, self._separator) for text in texts]
            reads = [partial(_read_steps, ends=one) for one in ends]
            plain = {"prompts": prompts, "steps": [_cut(text, one) for text, one in zip(texts, ends, strict=True)]}
            for one, places in zip(chats, ends, strict=True):
                one[-1]["content"] = self._marked(_cut(one[-1]["content"], places))
        sent: list[str] | None = None
        if self._coder is not None:
            plans = [plan(self._coder, *row, self._separator) for row in zip(prompts, texts, strict=True)]
            reads = [partial(_read_rows, size=len(coded.ids), places=places or []) for coded, places in plans]
            sent = [coded.text for coded, _ in plans]
        rows = await self._server.ask(chats, plain, reads, log_metric, sent)
        return self._pay.rewards(rows, texts, completion_ids, log_metric, log_extra)

    def _marked(self, steps: Sequence[str]) -> str:
        """The steps as the model was trained to read them, each with its end; a mark that the policy writes is none."""
        assert self._separator is not None
        bare = [step.removesuffix(self._separator) for step in steps]
        if self._mark is None:
            return "".join(step + self._separator for step in bare)
        spelt_out = f"{self._mark[:1]} {self._mark[1:]}"
        return "".join(step.replace(self._mark, spelt_out) + self._mark for step in bare)


class Truncation:
    """What has been said about texts that were too long: each model's are reported once, and always counted."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, model: Classifier, long: int, log_metric: Any) -> None:
        """Count the texts of a call that were too long, and warn of a model's first."""
        if log_metric is not None:
            log_metric("reward_model/truncated_total", long)
        if long and model.path not in self._said:
            self._said.add(model.path)
            log.warning(
                "reward_model: %d texts exceed the %d tokens of %s and lost their beginning; the metric"
                " reward_model/truncated_total counts them.",
                long,
                model.max_length,
                model.path,
            )


def _cut(text: str, ends: Sequence[int]) -> list[str]:
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _read_steps(said: Any, ends: Sequence[int]) -> list[Step]:
    """The scores of steps, one number or two each; ValueError where there is not one for each of them."""
    if not isinstance(said, list) or len(said) != len(ends):
        raise ValueError("another number of steps")
    return [(end, _step_score(one)) for end, one in zip(ends, said, strict=True)]


def _read_rows(said: Any, size: int, places: Sequence[Place]) -> list[Step]:
    """The scores of steps: one for each, or one for each of all `size` tokens, read at their places."""
    if not isinstance(said, list) or len(said) not in (size, len(places)) or not places:
        raise ValueError("another number of steps, or of tokens")
    every_token = len(said) == size
    return [(end, _step_score(said[at if every_token else row])) for row, (end, at) in enumerate(places)]


def _step_score(said: Any) -> float:
    """A number as it is; of two, probabilities or logits, the probability of the second."""
    if not isinstance(said, list) or len(said) != 2:
        return only_number(said)
    bad, good = map(only_number, said)
    if min(bad, good) >= 0 and abs(bad + good - 1) <= _SUM_OF_PROBABILITIES:
        return good
    return 1 / (1 + math.exp(min(bad - good, 700.0)))


def _read_tokens(said: Any, length: int) -> list[Step]:
    """Pairs [where a token ends, in characters of the completion, its score], in order."""
    steps: list[Step] = []
    for end, score in said:
        if isinstance(end, bool) or not isinstance(end, int) or not (steps[-1][0] if steps else 0) <= end <= length:
            raise ValueError("a token ends outside of the text, or before the one before it")
        steps.append((end, only_number(score)))
    if not steps:
        raise ValueError("no token")
    return steps
