"""Judges behind chat-completions endpoints: each question to all of them, and what they say together."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from grpo_toolbox.errors import ConfigError, suggest
from grpo_toolbox.rewards.http import Address, Patience, Session, Sessions, Traffic, address
from grpo_toolbox.rewards.judge_cache import ReplyCache, request_key

VOTES = ("mean", "median", "majority")
Scored = Mapping[str, float]
"""The scores of a reply, by criterion."""

_CHAT = "/chat/completions"
_OF_A_JUDGE = ("base_url", "model", "api_key_env", "temperature", "max_tokens", "request", "price")


@dataclass(frozen=True)
class Judge:
    """One model behind one endpoint."""

    address: Address
    request: Mapping[str, Any]
    """What every request holds beside its messages."""
    price: tuple[float, float] = (0.0, 0.0)
    """Of a million tokens of prompt and of completion."""


@dataclass(frozen=True)
class Reply:
    """What a judge said."""

    text: str | None
    """None where it said nothing, or was cut off: half a number is another number."""
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Opinion:
    """What the judges said to one question."""

    scores: Scored | None
    """The outcome of the vote, None where there is none."""
    replies: tuple[str | None, ...]
    """One per judge."""
    failure: Exception | None
    """Why there are no scores, where judges that could not be asked are to blame."""
    spread: float = 0.0
    """Largest difference between two judges."""


@dataclass(frozen=True)
class Found:
    """What became of the rows that were judged."""

    scores: Sequence[float | Exception | None]
    replies: Sequence[Any]
    metrics: Mapping[str, float]


@dataclass
class Account:
    """What one call of the reward asked for and cost."""

    traffic: Traffic = field(default_factory=Traffic)
    unanswered: int = 0
    """Questions that a judge could not be asked, after all tries."""
    cache_hits: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def metrics(self, priced: bool) -> dict[str, float]:
        """The counters as metrics (names in `_total` add up over a step); the cost only where there are prices."""
        counted = {
            "requests": self.traffic.requests,
            "retries": self.traffic.retries,
            "unanswered": self.unanswered,
            "cache_hits": self.cache_hits,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        counts = {f"judge/{name}_total": float(value) for name, value in counted.items()}
        return counts | ({"judge/cost_total": self.cost} if priced else {})


class Panel:
    """The judges of a reward, and how they are asked."""

    def __init__(self, judges: Sequence[Judge], vote: str, cache: ReplyCache | None, patience: Patience) -> None:
        self.judges = judges
        self._vote = vote
        self._cache = cache
        self._sessions = Sessions(patience)

    @property
    def priced(self) -> bool:
        """Whether any judge has a price."""
        return any(any(judge.price) for judge in self.judges)

    async def ask(
        self, questions: Sequence[Sequence[Mapping[str, str]]], read: Callable[[str | None], Scored | None]
    ) -> tuple[list[Opinion], Account]:
        """Every judge's reply to every question (a list of messages), read and voted on, and what that cost.

        A question that comes twice is asked once.
        """
        account = Account()
        bodies = [[{**judge.request, "messages": list(messages)} for judge in self.judges] for messages in questions]
        keys = [[f"{place} {request_key(body)}" for place, body in enumerate(row)] for row in bodies]
        different = {
            key: (judge, body)
            for row, own in zip(bodies, keys, strict=True)
            for judge, body, key in zip(self.judges, row, own, strict=True)
        }
        account.cache_hits = len(questions) * len(self.judges) - len(different)
        async with self._sessions.session() as session:
            asked = {
                key: asyncio.ensure_future(self._reply(session, judge, body, read, account))
                for key, (judge, body) in different.items()
            }
            try:
                ended = await asyncio.gather(*asked.values(), return_exceptions=True)
            finally:
                for task in asked.values():
                    task.cancel()
        account.unanswered = sum(isinstance(one, BaseException) for one in ended)
        return [self._opinion([asked[key] for key in own], read) for own in keys], account

    async def _reply(
        self,
        session: Session,
        judge: Judge,
        body: Mapping[str, Any],
        read: Callable[[str | None], Scored | None],
        account: Account,
    ) -> Reply:
        """One judge's reply to one question; kept on disk where it holds a verdict, and taken from there."""
        key = request_key(body)
        kept = self._cache.get(key) if self._cache else None
        if kept is not None and read(kept["reply"]) is not None:
            account.cache_hits += 1
            return Reply(kept["reply"], 0, 0)
        reply = await session.post(judge.address, body, read_reply, account.traffic)
        account.prompt_tokens += reply.prompt_tokens
        account.completion_tokens += reply.completion_tokens
        account.cost += (judge.price[0] * reply.prompt_tokens + judge.price[1] * reply.completion_tokens) / 1e6
        if self._cache and read(reply.text) is not None:
            self._cache.put(key, {"model": body.get("model"), "reply": reply.text})
        return reply

    def _opinion(self, asked: Sequence[asyncio.Future[Reply]], read: Callable[[str | None], Scored | None]) -> Opinion:
        errors = [task.exception() for task in asked]
        failures = [error for error in errors if error is not None]
        for error in failures:
            if not isinstance(error, OSError | ConfigError):  # no fault of the server's
                raise error
        replies = tuple(None if error else task.result().text for task, error in zip(asked, errors, strict=True))
        given = [scores for scores in map(read, replies) if scores is not None]
        if 2 * len(given) < len(asked) or not given:
            return Opinion(None, replies, next((one for one in failures if isinstance(one, Exception)), None))
        spread = max(max(column) - min(column) for column in ([one[name] for one in given] for name in given[0]))
        return Opinion(vote(given, self._vote), replies, None, spread)


def vote(given: Sequence[Scored], how: str) -> Scored | None:
    """The judges' common score per criterion: mean, median, or the one that more than half of them gave.

    None where there is no such majority.
    """
    outcome: dict[str, float] = {}
    for name in given[0]:
        column = [scores[name] for scores in given]
        if how == "majority":
            score, times = Counter(column).most_common(1)[0]
            if 2 * times <= len(column):
                return None
            outcome[name] = score
        else:
            outcome[name] = statistics.fmean(column) if how == "mean" else statistics.median(column)
    return outcome


def read_reply(answer: Any) -> Reply:
    """The assistant's text in a chat-completions answer; LookupError, TypeError or ValueError for another form."""
    choice = answer["choices"][0]
    content = choice["message"]["content"]
    if isinstance(content, list):  # of parts
        content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    usage = answer.get("usage")
    used = [(usage if isinstance(usage, dict) else {}).get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (value if type(value) is int and value > 0 else 0 for value in used)
    return Reply(None if choice.get("finish_reason") == "length" else content, prompt, completion)


def build_judges(judges: Sequence[Mapping[str, Any]] | None, **first: Any) -> list[Judge]:
    """The judge that the reward's own options describe, and the further ones of `judges`, which take over from it
    what they leave out: `base_url`, `model`, `temperature`, `max_tokens`, `request`, `price`, and, at the same
    address, `api_key_env`."""
    if judges is not None and (isinstance(judges, str) or not isinstance(judges, Sequence)):
        raise ConfigError(f"reward.judges={judges!r} must be a list such as [{{model: another}}], or null.")
    described = [first]
    for index, own in enumerate(judges or ()):
        if not isinstance(own, Mapping) or not own:
            raise ConfigError(f"reward.judges[{index}]={own!r} must name what differs, such as {{model: another}}.")
        for key in own:
            if key not in _OF_A_JUDGE:
                known = ", ".join(_OF_A_JUDGE)
                raise ConfigError(f"reward.judges[{index}].{key} is not an option: {known}.{suggest(key, _OF_A_JUDGE)}")
        inherited = first if "base_url" not in own else {**first, "api_key_env": None}
        described.append({**inherited, **own})
    return [_judge(**options) for options in described]


def _judge(
    base_url: str,
    model: str,
    api_key_env: str | None,
    temperature: float | None,
    max_tokens: int | None,
    request: Mapping[str, Any] | None,
    price: Mapping[str, float] | None,
) -> Judge:
    own = dict(request or {})
    taken = [name for name in ("messages", "model", "stream", "n") if name in own]
    if taken:
        raise ConfigError(f"reward.request.{taken[0]} cannot be set: it holds further fields, such as seed or top_p.")
    sent = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **own}
    return Judge(
        chat_address(base_url, api_key_env),
        {name: value for name, value in sent.items() if value is not None},
        _price(price),
    )


def _price(price: Mapping[str, float] | None) -> tuple[float, float]:
    if price is None:
        return 0.0, 0.0
    whole = isinstance(price, Mapping) and set(price) <= {"prompt", "completion"}
    amounts = [price.get(name, 0.0) for name in ("prompt", "completion")] if whole else []
    if not whole or not all(type(one) in (int, float) and 0 <= one < float("inf") for one in amounts):
        raise ConfigError(
            f"reward.price={price!r} must be what a million tokens cost, such as {{prompt: 0.15, completion: 0.6}},"
            " or null."
        )
    return float(amounts[0]), float(amounts[1])


def chat_address(base_url: str, api_key_env: str | None) -> Address:
    """The chat-completions address below `base_url`: a bare host gets `/v1`, a path is taken as it is."""
    base = str(base_url).rstrip("/")
    bare = "//" in base and not urlsplit(base).path
    return address(f"{base}/v1" if bare else base, _CHAT, api_key_env)
