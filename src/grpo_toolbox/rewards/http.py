"""Asking a server over HTTP, patiently: what failed for now is tried again, what was refused is not."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_RETRIED = {408, 409, 425, 429}  # and 5xx: the server may do better later
_LARGEST_ANSWER = 32 << 20
"""Bytes; no verdict and no list of scores comes near, and a server that never ends must not fill the memory."""


@dataclass(frozen=True)
class Patience:
    """How a server is asked: seconds per try, tries after the first, pauses between them, requests at a time."""

    timeout: float
    retries: int
    retry_wait: float
    """Seconds before the second try; doubled each time, spread by ± half."""
    max_wait: float
    """The longest pause; a server that asks for a longer one (Retry-After) is given up."""
    max_concurrency: int

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.max_concurrency < 1 or min(self.retries, self.retry_wait, self.max_wait) < 0:
            raise ConfigError(
                f"reward.timeout={self.timeout} must be above 0, reward.max_concurrency={self.max_concurrency} at least"
                f" 1, reward.retries={self.retries}, reward.retry_wait={self.retry_wait} and"
                f" reward.max_wait={self.max_wait} at least 0."
            )

    def wait(self, attempt: int, asked: float | None = None) -> float:
        """Seconds before try `attempt` + 1: doubling, and no less than the server `asked` for.

        Spread, so that requests that failed together do not come back together; by a generator of its own, since an
        outage must not move the run's.
        """
        chance = random.Random().uniform(0.5, 1.5)
        own = min(self.max_wait, self.retry_wait * 2 ** min(attempt - 1, 64) * chance)
        return max(own, (asked or 0.0) + min(own, 1.0) * chance / 2)


@dataclass(frozen=True)
class Address:
    """Where a server takes JSON, and the key it wants, which no message and no file ever shows."""

    url: str
    key: str | None = field(default=None, repr=False)

    def shown(self, text: str) -> str:
        """`text` for a message: short, and without the key, which a server may have quoted."""
        text = text if self.key is None else text.replace(self.key, "***")
        return text if len(text) <= 200 else text[:200] + "…"


@dataclass(frozen=True)
class _Failure:
    """A try that did not work out and may be repeated."""

    problem: str
    timed_out: bool = False
    asked_wait: float | None = None


@dataclass
class Traffic:
    """What one caller sent."""

    requests: int = 0
    """Tries, the repeated ones among them."""
    retries: int = 0


class Sessions:
    """One session for everybody who asks at the same time, so that they share its limits; closed when all are done.

    Each event loop has its own: a connection lives on the loop that opened it.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Session, int]] = WeakKeyDictionary()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """The session of the running loop."""
        loop = asyncio.get_running_loop()
        session, users = self._open.get(loop) or (Session(self._patience), 0)
        self._open[loop] = (session, users + 1)
        try:
            yield session
        finally:
            session, users = self._open.pop(loop)
            if users > 1:
                self._open[loop] = (session, users - 1)
            else:
                await session.close()


class Session:
    """Requests that share connections, a limit on how many are in flight, and the pauses that servers asked for."""

    def __init__(self, patience: Patience) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at level INFO
        limits = httpx.Limits(max_connections=patience.max_concurrency)
        self.patience = patience
        self._client = httpx.AsyncClient(timeout=patience.timeout, limits=limits, verify=_certificates())
        self._turns = asyncio.Semaphore(patience.max_concurrency)
        self._closed_until: dict[str, float] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, address: Address, body: Any, read: Callable[[Any], T], traffic: Traffic) -> T:
        """What `read` makes of the JSON that answers `body`.

        `read` raises LookupError, TypeError or ValueError where the answer has not the form it should have; that, too,
        is tried again. Raises TimeoutError or ConnectionError where no try worked out, ConfigError where the request
        was refused (HTTP 3xx, 4xx).
        """
        failure = _Failure("")
        async with self._turns:
            for attempt in range(self.patience.retries + 1):
                if attempt:
                    traffic.retries += 1
                    await asyncio.sleep(self.patience.wait(attempt, failure.asked_wait))
                await self._while_closed(address.url)
                traffic.requests += 1
                answer = await self._try(address, body, read)
                if not isinstance(answer, _Failure):
                    return answer
                failure = answer
                if (failure.asked_wait or 0.0) > self.patience.max_wait:
                    raise ConnectionError(
                        f"{address.url} asks to be left alone for {failure.asked_wait:g} seconds ({failure.problem}),"
                        f" more than reward.max_wait={self.patience.max_wait:g}."
                    )
        kind = TimeoutError if failure.timed_out else ConnectionError
        raise kind(
            f"{address.url} gave no usable answer in {self.patience.retries + 1} tries, at last: {failure.problem}"
        )

    async def _while_closed(self, url: str) -> None:
        """Wait while a server that said Retry-After to one request would say it to the next."""
        now = asyncio.get_running_loop().time
        while (left := self._closed_until.get(url, 0.0) - now()) > 0:
            await asyncio.sleep(left)

    async def _try(self, address: Address, body: Any, read: Callable[[Any], T]) -> T | _Failure:
        import httpx

        try:
            async with asyncio.timeout(self.patience.timeout):  # httpx limits each read, not the whole answer
                response, content = await self._exchange(address, body)
        except (httpx.RequestError, TimeoutError) as error:
            late = isinstance(error, httpx.TimeoutException | TimeoutError)
            problem = f"no answer within {self.patience.timeout:g} s" if late else ""
            return _Failure(problem or address.shown(f"{type(error).__name__} {error}".strip()), timed_out=late)
        status = response.status_code
        if status in _RETRIED or status >= 500:
            asked = retry_after(response.headers.get("Retry-After"))
            if asked and asked <= self.patience.max_wait:
                self._closed_until[address.url] = asyncio.get_running_loop().time() + asked
            return _Failure(f"HTTP {status}", asked_wait=asked)
        text = content.decode(errors="replace")
        if status >= 300:
            raise ConfigError(
                f"{address.url} refused the request (HTTP {status}: {address.shown(text)})."
                " Check reward.base_url, the model's name and reward.api_key_env."
            )
        try:
            return read(json.loads(text))
        except (ValueError, LookupError, TypeError, RecursionError):  # whatever answers at that address
            return _Failure(f"an answer of another form: {address.shown(text)!r}")

    async def _exchange(self, address: Address, body: Any) -> tuple[httpx.Response, bytes]:
        headers = {"Content-Type": "application/json"}
        if address.key is not None:
            headers["Authorization"] = f"Bearer {address.key}"
        sent = json.dumps(body).encode()  # in ASCII, so that half a character in a completion cannot stop the request
        content = bytearray()
        async with self._client.stream("POST", address.url, content=sent, headers=headers) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _LARGEST_ANSWER:
                    break
        return response, bytes(content)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust, read once: it takes longer than many a request."""
    import httpx

    return httpx.create_ssl_context()


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait (a number or a date), None where it says nothing readable."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:  # the server's text
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def address(base_url: str, path: str, api_key_env: str | None) -> Address:
    """The address `path` below `base_url` (which may end with it already), and the key of the variable `api_key_env`.

    ConfigError for what is no plain web address, and for a variable that is not set or holds no key.
    """
    base = str(base_url).rstrip("/")
    try:
        parts = urlsplit(base)
        host, _ = parts.hostname, parts.port
    except ValueError:  # such as a port that is no number
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"reward.base_url={base_url!r} must begin with http:// or https://, as in http://localhost:8000/v1."
        )
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"reward.base_url at {host} holds a user name, a query or a fragment, which run folders would keep: give"
            " the plain address, and the key by reward.api_key_env."
        )
    return Address(base if base.endswith(path) else base + path, _key(api_key_env))


def _key(api_key_env: str | None) -> str | None:
    if api_key_env is None:
        return None
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"reward.api_key_env={api_key_env}: that environment variable is not set. Export it, or set null."
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"reward.api_key_env={api_key_env}: that environment variable holds blanks or letters beyond ASCII, which"
            " no key has. Export the key alone."
        )
    return key
