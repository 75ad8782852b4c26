"""Reward models behind a server: vLLM's and SGLang's scoring endpoints, and a plain JSON form of our own."""

from __future__ import annotations

import asyncio
import functools
import math
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.classifier import load_tokenizer
from grpo_toolbox.rewards.http import Patience, Session, Sessions, Traffic, address
from grpo_toolbox.rewards.text import completion_text, content_text, without_control_tokens

T = TypeVar("T")

COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "min": min}
"""What several models say together."""


@dataclass(frozen=True)
class Endpoint:
    """One way of asking for scores."""

    path: str
    body: Callable[[list[dict[str, Any]], str | None], dict[str, Any]]
    """What is sent of a conversation, or of the text that it makes where a tokenizer is at hand."""
    read: Callable[[Any], float]
    """The score in what comes back; LookupError, TypeError or ValueError for another form."""


ENDPOINTS: Mapping[str, Endpoint | None] = {
    "pooling": Endpoint(
        "/pooling",
        lambda chat, text: {"messages": chat} if text is None else {"input": text},
        lambda answer: _only_number(answer["data"][0]["data"]),
    ),
    "classify": Endpoint(
        "/classify",
        # the logit, not what a sigmoid or a softmax of one class makes of it
        lambda chat, text: {**({"messages": chat} if text is None else {"input": text}), "use_activation": False},
        lambda answer: _only_number(answer["data"][0]["probs"]),
    ),
    "score": Endpoint(
        "/score",
        lambda chat, _: {"text_1": _spoken(chat[:-1]), "text_2": chat[-1]["content"]},
        lambda answer: _only_number(answer["data"][0]["score"]),
    ),
    "generic": None,
}
"""`generic` posts `{"model", "prompts": [...], "completions": [...]}` to the address itself and wants
`{"scores": [...]}`, one number or null per completion."""


class ServedModels:
    """The scores that a server gives, as a reward; a row that could not be asked about holds the exception."""

    __name__ = "reward_model"

    def __init__(
        self,
        models: Sequence[str],
        ensemble: str,
        base_url: str,
        endpoint: str,
        tokenizer: str | None,
        api_key_env: str | None,
        batch_size: int,
        patience: Patience,
    ) -> None:
        self._models = models
        self._combine = COMBINE[ensemble]
        self._endpoint = ENDPOINTS[endpoint]
        self._address = address(base_url, self._endpoint.path if self._endpoint else "", api_key_env)
        self._tokenizer = load_tokenizer(tokenizer, "reward.tokenizer") if tokenizer else None
        self._batch_size = batch_size
        self._sessions = Sessions(patience)

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None
    ) -> list[float | Exception | None]:
        """One score per completion."""
        rows = [*zip(prompts, completions, strict=True)]
        traffic = Traffic()
        ask = self._each if self._endpoint else self._batches
        async with self._sessions.session() as session:
            per_model = await asyncio.gather(*(ask(session, model, rows, traffic) for model in self._models))
        rows_said = [*zip(*per_model, strict=True)]
        if log_metric is not None:
            log_metric("reward_model/requests_total", traffic.requests)
            log_metric("reward_model/retries_total", traffic.retries)
        log_spread([row for row in rows_said if all(isinstance(one, float) for one in row)], log_metric)
        return [self._together(row) for row in rows_said]

    def _together(self, said: Sequence[float | Exception | None]) -> float | Exception | None:
        """What the models say about one row: nothing where one of them says nothing."""
        failure = next((one for one in said if isinstance(one, Exception)), None)
        numbers = [one for one in said if isinstance(one, float)]
        return failure if failure is not None or len(numbers) < len(said) else self._combine(numbers)

    async def _each(
        self, session: Session, model: str, rows: Sequence[tuple[Any, Any]], traffic: Traffic
    ) -> list[float | Exception | None]:
        """A request per row."""
        assert self._endpoint is not None
        bodies = [{"model": model, **self._endpoint.body(chat, self._text(chat))} for chat in map(_chat, rows)]
        asked = (session.post(self._address, body, self._endpoint.read, traffic) for body in bodies)
        return [*await asyncio.gather(*map(_outcome, asked))]

    async def _batches(
        self, session: Session, model: str, rows: Sequence[tuple[Any, Any]], traffic: Traffic
    ) -> list[float | Exception | None]:
        """A request per batch, in the plain form; a batch that failed has failed for each of its rows."""
        batches = [rows[start : start + self._batch_size] for start in range(0, len(rows), self._batch_size)]
        bodies = [
            {"model": model, "prompts": [prompt for prompt, _ in batch], "completions": [one for _, one in batch]}
            for batch in batches
        ]
        asked = (
            session.post(self._address, body, functools.partial(_scores, size=len(batch)), traffic)
            for body, batch in zip(bodies, batches, strict=True)
        )
        answers = await asyncio.gather(*map(_outcome, asked))
        return [
            score
            for answer, batch in zip(answers, batches, strict=True)
            for score in (answer if isinstance(answer, list) else [answer] * len(batch))
        ]

    def _text(self, chat: list[dict[str, Any]]) -> str | None:
        if self._tokenizer is None:
            return None
        if self._tokenizer.chat_template is None:
            return _spoken(chat)
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False))


async def _outcome(asked: Coroutine[Any, Any, T]) -> T | Exception:
    try:
        return await asked
    except (OSError, ConfigError) as error:  # one row's failure must not lose the others
        return error


def _chat(row: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Prompt and completion as one conversation, without control tokens in what the policy wrote."""
    prompt, completion = row
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = without_control_tokens(completion_text(completion))
    return [*asked, {"role": "assistant", "content": said}]


def _spoken(chat: Sequence[Mapping[str, Any]]) -> str:
    return "".join(content_text(message.get("content")) for message in chat)


def _only_number(value: Any) -> float:
    """The one number in (lists of) lists; ValueError where there are several, or it is no finite number."""
    while isinstance(value, list):
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _scores(answer: Any, size: int) -> list[float | None]:
    scores = [None if one is None else _only_number(one) for one in answer["scores"]]
    if len(scores) != size:
        raise ValueError("another number of scores")
    return scores


def log_spread(rows: Sequence[Sequence[Any]], log_metric: Any) -> None:
    """Report how far several models are apart: where it grows, the policy has left what they were trained on."""
    if log_metric is not None and rows and len(rows[0]) > 1:
        log_metric("reward_model/spread", sum(max(row) - min(row) for row in rows) / len(rows))
