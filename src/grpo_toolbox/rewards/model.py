"""reward_model: scores of trained reward models, whole or step by step, in this process or behind a server.

A Bradley-Terry model is a sequence classifier with one label (Bradley & Terry, 1952; Ouyang et al., 2022). Several of
them, averaged or by the least, are harder to over-optimise than one (Coste et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.classifier import Classifier
from grpo_toolbox.rewards.http import Patience
from grpo_toolbox.rewards.model_server import COMBINE, ENDPOINTS, ServedModels, Server, log_spread
from grpo_toolbox.rewards.step_rewards import ServedSteps, StepPay, StepScores, Truncation
from grpo_toolbox.rewards.steps import AGGREGATES

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
    step_mark: str | None = None,
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
    with `aggregate`, made one number. `base_url` asks a server by one of ENDPOINTS instead; `step_mark` is what it
    reads behind a step.
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
    together |= {"max_length": max_length, "base_url": base_url, "tokenizer": tokenizer, "step_mark": step_mark}
    _check_together(paths, batch_size, {**together, "endpoint": endpoint})
    ends = separator if level == "step" else None
    if base_url is not None:
        patience = Patience(timeout, retries, retry_wait, max_wait, max_concurrency)
        server = Server(paths, base_url, endpoint, tokenizer, api_key_env, batch_size, patience)
        if level == "completion":
            return ServedModels(server, ensemble)
        coder = server.coder if endpoint == "pooling" else None
        if level == "token" and coder is not None and not coder.tokenizer.is_fast:
            raise ConfigError(f"reward.tokenizer={tokenizer!r} does not say where tokens stand; save a fast one.")
        return ServedSteps(server, StepPay(ensemble, aggregate, policy_tokenizer), ends, step_mark, coder)
    head: Literal["sequence", "token"] = "sequence" if level == "completion" else "token"
    models = [Classifier(one, head, batch_size, max_length, device, dtype) for one in paths]
    if level == "completion":
        return CompletionScores(models, ensemble)
    return StepScores(models, StepPay(ensemble, aggregate, policy_tokenizer or models[0].tokenizer), ends)


class CompletionScores:
    """The logits of sequence classifiers, as a reward."""

    __name__ = "reward_model"

    def __init__(self, models: Sequence[Classifier], ensemble: str) -> None:
        self.models = models
        self._combine = COMBINE[ensemble]
        self._truncation = Truncation()

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
    level, behind_server = options["level"], options["base_url"] is not None
    whole = level == "completion"
    misplaced = {
        "aggregate": (whole, "reward.level=step or token"),
        "policy_tokenizer": (whole or options["aggregate"] is not None, "rewards that are paid per token"),
        "step_mark": (not behind_server or level != "step", "reward.level=step behind a server"),
        "tokenizer": (not behind_server, "reward.base_url; a checkpoint brings its own"),
        "max_length": (behind_server, "a model of this process; a server says itself what is too long"),
    }
    for name, (is_misplaced, goes_with) in misplaced.items():
        if is_misplaced and options[name] is not None:
            raise ConfigError(f"reward.{name}={options[name]!r} goes with {goes_with}: set it to null.")
    spoken = [*ENDPOINTS] if whole else ["pooling", "generic"]
    if behind_server and options["endpoint"] not in spoken:
        raise ConfigError(
            f"reward.level={level} behind a server is asked for by reward.endpoint={' or '.join(spoken)}, not by"
            f" {options['endpoint']}."
        )
    if behind_server and level == "token" and options["endpoint"] == "pooling" and options["tokenizer"] is None:
        raise ConfigError(
            "reward.level=token behind reward.endpoint=pooling: name the served model's own tokenizer,"
            " reward.tokenizer=<folder or hub name>, which says where its tokens stand."
        )
    if behind_server and not whole and options["aggregate"] is None and options["policy_tokenizer"] is None:
        raise ConfigError(
            "a process reward model behind a server pays per token: name the policy's tokenizer,"
            " reward.policy_tokenizer=${model.path}, or set reward.aggregate=min for one number per completion."
        )
