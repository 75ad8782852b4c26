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
from grpo_toolbox.rewards.classifier import Coder, load_tokenizer
from grpo_toolbox.rewards.http import Patience, Session, Sessions, Traffic, address
from grpo_toolbox.rewards.text import completion_text, content_text, without_control_tokens

T = TypeVar("T")
Chat = list[dict[str, Any]]

COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "min": min}
"""What several models say together."""


@dataclass(frozen=True)
class Endpoint:
    """One way of asking for scores."""

    path: str
    body: Callable[[Chat], dict[str, Any]]
    """What is sent of a conversation."""
    scores: Callable[[Any], Any]
    """Where the scores stand in what comes back; LookupError or TypeError for another form."""
    takes_text: bool = True
    """Whether it takes the text that a conversation makes, where a tokenizer is at hand."""


# the logit, not what a sigmoid or a softmax of one class makes of it
_LOGITS = {"use_activation": False}

ENDPOINTS: Mapping[str, Endpoint | None] = {
    "pooling": Endpoint(
        "/pooling",
        lambda chat: {"messages": chat, **_LOGITS},
        lambda answer: answer["data"][0]["data"],
    ),
    "classify": Endpoint(
        "/classify",
        lambda chat: {"messages": chat, **_LOGITS},
        lambda answer: answer["data"][0]["probs"],
    ),
    "score": Endpoint(
        "/score",
        lambda chat: {"text_1": _spoken(chat[:-1]), "text_2": chat[-1]["content"]},
        lambda answer: answer["data"][0]["score"],
        takes_text=False,
    ),
    "generic": None,
}
"""`generic` posts `{"model", "prompts": [...], "completions": [...]}` to the address itself and wants
`{"scores": [...]}`, one or null per completion."""


class Server:
    """Asks a server about completions; a row that could not be asked about holds the exception."""

    def __init__(
        self,
        models: Sequence[str],
        base_url: str,
        endpoint: str,
        tokenizer: str | None,
        api_key_env: str | None,
        batch_size: int,
        patience: Patience,
    ) -> None:
        self._models = models
        self._endpoint = ENDPOINTS[endpoint]
        self._address = address(base_url, self._endpoint.path if self._endpoint else "", api_key_env)
        self.coder = Coder(load_tokenizer(tokenizer, "reward.tokenizer"), tokenizer) if tokenizer else None
        self._batch_size = batch_size
        self._sessions = Sessions(patience)

    async def ask(
        self,
        chats: Sequence[Chat],
        plain: Mapping[str, Sequence[Any]],
        reads: Sequence[Callable[[Any], T]],
        log_metric: Any,
        texts: Sequence[str] | None = None,
    ) -> list[tuple[T | Exception | None, ...]]:
        """Per row what each model says, as the row's own of `reads` has it (ValueError for what is no score).

        A request holds one of `chats`, as one of `texts` where the caller has written them, or in the form `generic` a
        batch of what stands in `plain`.
        """
        traffic = Traffic()
        async with self._sessions.session() as session:
            if self._endpoint is None:
                said = [self._batches(session, model, len(chats), plain, reads, traffic) for model in self._models]
            else:
                bodies = [
                    self._body(self._endpoint, *row) for row in zip(chats, texts or map(self._text, chats), strict=True)
                ]
                said = [self._each(session, model, self._endpoint, bodies, reads, traffic) for model in self._models]
            per_model = await asyncio.gather(*said)
        if log_metric is not None:
            log_metric("reward_model/requests_total", traffic.requests)
            log_metric("reward_model/retries_total", traffic.retries)
        return [*zip(*per_model, strict=True)]

    async def _each(
        self,
        session: Session,
        model: str,
        endpoint: Endpoint,
        bodies: Sequence[dict[str, Any]],
        reads: Sequence[Callable[[Any], T]],
        traffic: Traffic,
    ) -> list[T | Exception | None]:
        """A request per row."""

        def reader(read: Callable[[Any], T]) -> Callable[[Any], T]:
            return lambda answer: read(endpoint.scores(answer))

        asked = (
            session.post(self._address, {"model": model, **body}, reader(read), traffic)
            for body, read in zip(bodies, reads, strict=True)
        )
        return [*await asyncio.gather(*map(_outcome, asked))]

    async def _batches(
        self,
        session: Session,
        model: str,
        rows: int,
        plain: Mapping[str, Sequence[Any]],
        reads: Sequence[Callable[[Any], T]],
        traffic: Traffic,
    ) -> list[T | Exception | None]:
        """A request per batch, in the plain form; a batch that failed has failed for each of its rows."""
        parts = [slice(start, start + self._batch_size) for start in range(0, rows, self._batch_size)]
        asked = (
            session.post(
                self._address,
                {"model": model, **{name: [*values[part]] for name, values in plain.items()}},
                functools.partial(_scores, reads=reads[part]),
                traffic,
            )
            for part in parts
        )
        answers = await asyncio.gather(*map(_outcome, asked))
        return [
            score
            for answer, part in zip(answers, parts, strict=True)
            for score in (answer if isinstance(answer, list) else [answer] * len(reads[part]))
        ]

    def _body(self, endpoint: Endpoint, chat: Chat, text: str | None) -> dict[str, Any]:
        """What is sent: the conversation, or the text that it makes."""
        if text is None or self.coder is None or not endpoint.takes_text:
            return endpoint.body(chat)
        templated = self.coder.tokenizer.chat_template is not None  # a template writes its special tokens itself
        return {"input": text, "add_special_tokens": not templated, **_LOGITS}

    def _text(self, chat: Chat) -> str | None:
        """The text that the tokenizer at hand makes of a conversation."""
        if self.coder is None:
            return None
        if self.coder.tokenizer.chat_template is None:
            return _spoken(chat)
        return str(self.coder.tokenizer.apply_chat_template(chat, tokenize=False))


class ServedModels:
    """The scores that a server gives, as a reward; a row that could not be asked about holds the exception."""

    __name__ = "reward_model"

    def __init__(self, server: Server, ensemble: str) -> None:
        self._server = server
        self._combine = COMBINE[ensemble]

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None
    ) -> list[float | Exception | None]:
        """One score per completion."""
        chats = [chat(*row) for row in zip(prompts, completions, strict=True)]
        plain = {"prompts": prompts, "completions": completions}
        rows = await self._server.ask(chats, plain, [only_number] * len(chats), log_metric)
        log_spread([row for row in rows if all(isinstance(one, float) for one in row)], log_metric)
        return [self._together(row) for row in rows]

    def _together(self, said: Sequence[float | Exception | None]) -> float | Exception | None:
        numbers = [one for one in said if isinstance(one, float)]
        return missing(said) if len(numbers) < len(said) else self._combine(numbers)


def missing(said: Sequence[Any]) -> Exception | None:
    """Why a row has no score, of what the models say about it: the first failure; None where one says nothing."""
    return next((one for one in said if isinstance(one, Exception)), None)


async def _outcome(asked: Coroutine[Any, Any, T]) -> T | Exception:
    try:
        return await asked
    except (OSError, ConfigError) as error:  # one row's failure must not lose the others
        return error


def chat(prompt: Any, completion: Any) -> Chat:
    """Prompt and completion as one conversation, without control tokens in what the policy wrote."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = without_control_tokens(completion_text(completion))
    return [*asked, {"role": "assistant", "content": said}]


def _spoken(chat: Sequence[Mapping[str, Any]]) -> str:
    return "".join(content_text(message.get("content")) for message in chat)


def only_number(value: Any) -> float:
    """The one number in (lists of) lists; ValueError where there are several, or it is no finite number."""
    while isinstance(value, list):
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)


def _scores(answer: Any, reads: Sequence[Callable[[Any], T]]) -> list[T | None]:
    found = answer["scores"]
    if len(found) != len(reads):
        raise ValueError("another number of scores")
    return [None if one is None else read(one) for one, read in zip(found, reads, strict=True)]


def log_spread(rows: Sequence[Sequence[Any]], log_metric: Any) -> None:
    """Report how far several models are apart: where it grows, the policy has left what they were trained on."""
    if log_metric is not None and rows and len(rows[0]) > 1:
        log_metric("reward_model/spread", sum(max(row) - min(row) for row in rows) / len(rows))
