"""reward_model: scores of trained reward models, whole or step by step, in this process or behind a server.

A Bradley-Terry model is a sequence classifier with one label (Bradley & Terry, 1952; Ouyang et al., 2022). Several of
them, averaged or by the least, are harder to over-optimise than one (Coste et al., 2024).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.classifier import Classifier, load_tokenizer
from grpo_toolbox.rewards.http import Patience
from grpo_toolbox.rewards.model_server import COMBINE, ENDPOINTS, ServedModels, log_spread
from grpo_toolbox.rewards.steps import AGGREGATES, Step, paid, step_scores, token_ends
from grpo_toolbox.rewards.text import completion_text

log = logging.getLogger(__name__)

LEVELS = ("completion", "step", "token")


def reward_model(
    path: str | Sequence[str],
    ensemble: Literal["mean", "min"] = "mean",
    level: Literal["completion", "step", "token"] = "completion",
    separator: str = "\n\n",
    aggregate: Literal["min", "mean", "last", "sum", "product"] | None = None,
    policy_tokenizer: str | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    base_url: str | None = None,
    endpoint: Literal["pooling", "classify", "score", "generic"] = "pooling",
    tokenizer: str | None = None,
    api_key_env: str | None = None,
    timeout: float = 60.0,
    retries: int = 3,
    retry_wait: float = 0.5,
    max_wait: float = 60.0,
    max_concurrency: int = 16,
) -> Callable[..., Any]:
    """The score that the reward model at `path` (folder or hub name; several make an ensemble) gives to a completion.

    `level=completion`: the logit of a sequence classifier. `step` or `token`: a process reward model, a token
    classifier, read where `separator` ends a step, or at every token; what it says is paid at the policy's tokens, or,
    with `aggregate`, made one number. `base_url` asks a server by one of ENDPOINTS instead, for whole completions.
    ConfigError where a checkpoint cannot be loaded or is of another kind, and for options that do not go together.
    """
    paths = [path] if isinstance(path, str) else list(path)
    _check_choices(ensemble=ensemble, level=level, aggregate=aggregate, endpoint=endpoint)
    together: dict[str, Any] = {
        "level": level,
        "separator": separator,
        "aggregate": aggregate,
        "policy_tokenizer": policy_tokenizer,
    }
    together |= {"max_length": max_length, "base_url": base_url, "tokenizer": tokenizer}
    _check_together(paths, batch_size, together)
    if base_url is not None:
        patience = Patience(timeout, retries, retry_wait, max_wait, max_concurrency)
        return ServedModels(paths, ensemble, base_url, endpoint, tokenizer, api_key_env, batch_size, patience)
    head: Literal["sequence", "token"] = "sequence" if level == "completion" else "token"
    models = [Classifier(one, head, batch_size, max_length, device, dtype) for one in paths]
    if level == "completion":
        return CompletionScores(models, ensemble)
    return StepScores(models, ensemble, None if level == "token" else separator, aggregate, policy_tokenizer)


class CompletionScores:
    """The logits of sequence classifiers, as a reward."""

    __name__ = "reward_model"

    def __init__(self, models: Sequence[Classifier], ensemble: str) -> None:
        self.models = models
        self._combine = COMBINE[ensemble]
        self._truncation = _Truncation()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None) -> list[float]:
        """One score per completion, the same as if each were scored alone."""
        per_model = []
        for model in self.models:
            coded = [model.code(*row) for row in zip(prompts, completions, strict=True)]
            self._truncation.say(model, sum(one.lost > 0 for one in coded), log_metric)
            per_model.append([float(logits[0]) for logits in model.logits([one.ids for one in coded])])
        rows = [*zip(*per_model, strict=True)]
        log_spread(rows, log_metric)
        return [self._combine(row) for row in rows]


class StepScores:
    """The scores of the steps of a completion: paid at the policy's tokens, or made one number."""

    __name__ = "reward_model"

    def __init__(
        self,
        models: Sequence[Classifier],
        ensemble: str,
        separator: str | None,
        aggregate: str | None,
        policy_tokenizer: str | None,
    ) -> None:
        self.models = models
        self.pays_per_token = aggregate is None
        self._combine = COMBINE[ensemble]
        self._separator = separator
        self._aggregate = AGGREGATES[aggregate] if aggregate else None
        self._policy_tokenizer = (
            load_tokenizer(policy_tokenizer, "reward.policy_tokenizer") if policy_tokenizer else models[0].tokenizer
        )
        self._truncation = _Truncation()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Any = None,
        log_extra: Any = None,
    ) -> list[Any]:
        """Per completion its number, or the sum of its scores with `token_rewards`; None where a part did not fit."""
        texts = [completion_text(completion) for completion in completions]
        per_model = []
        for model in self.models:
            steps, long = step_scores(model, prompts, texts, self._separator)
            self._truncation.say(model, long, log_metric)
            per_model.append(steps)
        if log_extra is not None:
            shown = per_model[0]
            log_extra("step_scores", [None if one is None else [score for _, score in one] for one in shown])
        rows = [*zip(*per_model, strict=True)]  # per completion, of each model
        if self._aggregate is not None:
            whole = [self._aggregated(row) for row in rows]
            log_spread([numbers for numbers in whole if numbers is not None], log_metric)
            return [None if numbers is None else self._combine(numbers) for numbers in whole]
        if completion_ids is None:
            raise TypeError("reward_model pays per token and needs completion_ids")
        return [self._paid(row, *one) for row, one in zip(rows, zip(completion_ids, texts, strict=True), strict=True)]

    def _aggregated(self, steps: Sequence[list[Step] | None]) -> list[float] | None:
        """The number of each model, None where one has none."""
        assert self._aggregate is not None
        numbers = [self._aggregate([score for _, score in one]) for one in steps if one is not None]
        return numbers if len(numbers) == len(steps) else None

    def _paid(self, steps: Sequence[list[Step] | None], ids: Sequence[int], text: str) -> dict[str, Any] | None:
        ends = token_ends(self._policy_tokenizer, ids, text)
        per_model = [paid(one, ends) for one in steps if one is not None]
        if len(per_model) < len(steps):
            return None
        pay = [self._combine(token) for token in zip(*per_model, strict=True)]
        return {"score": math.fsum(pay), "token_rewards": pay}


class _Truncation:
    """What has been said about texts that were too long: each model's are reported once, and always counted."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, model: Classifier, long: int, log_metric: Any) -> None:
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


def _check_choices(**chosen: str | None) -> None:
    allowed = {"ensemble": [*COMBINE], "level": [*LEVELS], "aggregate": [*AGGREGATES], "endpoint": [*ENDPOINTS]}
    for name, value in chosen.items():
        if value not in allowed[name] and not (name == "aggregate" and value is None):
            raise unknown_option(f"reward.{name}", value, allowed[name])


def _check_together(paths: Sequence[Any], batch_size: int, options: Mapping[str, Any]) -> None:
    """ConfigError for options that cannot be, or not with the others."""
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"reward.path={[*paths]!r} must be a folder or hub name, or a list of them.")
    longest = options["max_length"]
    if batch_size < 1 or (longest is not None and longest < 1):
        raise ConfigError(f"reward.batch_size={batch_size} and reward.max_length={longest} must be at least 1.")
    if options["level"] == "step" and not options["separator"].strip(" "):
        raise ConfigError(
            f"reward.separator={options['separator']!r} must be what ends a step, such as a blank line;"
            " reward.level=token scores every token."
        )
    behind_server, whole = options["base_url"] is not None, options["level"] == "completion"
    misplaced = {
        "aggregate": (whole, "reward.level=step or token"),
        "policy_tokenizer": (whole or options["aggregate"] is not None, "rewards that are paid per token"),
        "tokenizer": (not behind_server, "reward.base_url; a checkpoint brings its own"),
        "max_length": (behind_server, "a model of this process; a server says itself what is too long"),
    }
    for name, (is_misplaced, goes_with) in misplaced.items():
        if is_misplaced and options[name] is not None:
            raise ConfigError(f"reward.{name}={options[name]!r} goes with {goes_with}: set it to null.")
    if behind_server and not whole:
        raise ConfigError(
            "reward.base_url scores whole completions: set reward.level=completion, or give a folder without it."
        )
