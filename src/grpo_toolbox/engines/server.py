"""One rollout server: where it is, whether it is up, which weights it has, and calls that must not wait for ever."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, EngineError

if TYPE_CHECKING:  # nothing of HTTP is loaded before a server is used
    import ssl

    import httpx


HEALTH, HEALTH_TIMEOUT_S = "/health", 10.0


@dataclass(frozen=True)
class Limits:
    """How long a server is waited for, in seconds, and how often it is asked."""

    start_timeout_s: float = 300.0
    outage_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    control_timeout_s: float = 60.0
    """Of a call that generates nothing."""
    retries: int = 5
    max_in_flight: int = 256
    """Completions at a time, of each server."""
    health_every_s: float = 5.0
    """Between looks at a server that is working, and between tries to reach one that is not."""
    unhealthy_after: int = 3
    """Looks in a row that fail before a server that still holds its connections is given up."""


class Refused(EngineError):
    """The server is there and does not take the request (HTTP 4xx): asking again would not help."""


class Foreign(Refused):
    """The server has not the trainer's model or tokenizer: waiting would not help either."""


class Server:
    """One address. Calls block, are safe from several threads, and raise EngineError naming address and path."""

    def __init__(self, url: str, limits: Limits, key: str | None = None) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at level INFO
        self.address = server_address(url)
        self.limits = limits
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.lock = threading.Lock()
        """Held while weights are sent, so that no two pushes meet."""
        self.model = ""
        """What completions ask for."""
        self.version: int | None = None
        """Of its weights; None before it is known."""
        self.up = False
        """Whether it takes requests: reached, known to be the right one, with the run's weights."""
        self.trouble = "it was not asked yet"
        """What was the matter when it was last given up."""
        self._client = httpx.Client(
            base_url=self.address, headers=self.headers, timeout=limits.control_timeout_s, verify=trusted()
        )

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON that answers GET `path`, None for an empty answer; an outage is tried again for a while."""
        until = time.monotonic() + 3 * self.limits.health_every_s
        while True:
            try:
                return self._call("GET", path, None, timeout_s)
            except EngineError as error:
                if isinstance(error, Refused) or time.monotonic() > until:
                    raise
            time.sleep(0.2)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return the JSON that answers POST `path`, None for an empty answer; sent once, for an update counts."""
        return self._call("POST", path, body, timeout_s)

    def healthy(self) -> bool:
        """Ask once, for a short time."""
        try:
            self._call("GET", HEALTH, None, min(self.limits.control_timeout_s, HEALTH_TIMEOUT_S))
        except Refused:  # up, and without that page
            return True
        except EngineError as error:
            self.trouble = str(error)
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        import httpx

        options: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        try:
            response = self._client.request(method, path, json=body, **options)
        except httpx.RequestError as error:
            raise EngineError(f"{self.address}{path}: {what_failed(error)}.") from error
        return read_answer(self.address + path, response)


@cache
def trusted() -> ssl.SSLContext:
    """Return the certificates that are trusted: reading them takes a clients' making thirty milliseconds."""
    import httpx

    return httpx.create_ssl_context()


def read_json(place: str, response: httpx.Response) -> Any:
    """Return what a server said, None for an empty answer. Raises EngineError for an error status, Refused for 4xx."""
    text = response.text
    if "not JSON compliant" in text:  # how vLLM fails to say NaN
        raise Refused(f"{place} has a log-prob that is not finite to tell: its weights are broken.")
    if response.status_code >= 400:
        kind = Refused if response.status_code < 500 and response.status_code not in (408, 425, 429) else EngineError
        raise kind(f"{place} answered HTTP {response.status_code}: {' '.join(text[:300].split())}")
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(f"{place} answered something that is not JSON: {text[:100]!r}") from error


def read_answer(place: str, response: httpx.Response) -> Any:
    """Return what a server said to a call that generates nothing; some of those are answered with plain words."""
    if response.is_success and response.text.strip()[:1] not in ("{", "["):
        return response.text.strip() or None
    return read_json(place, response)


def what_failed(error: httpx.RequestError) -> str:
    """Say in a few words why there was no answer."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return f"no connection ({type(error).__name__})" if not str(error) else f"{error} ({type(error).__name__})"


def server_address(url: str) -> str:
    """Return `http://host:port` of what a user gives: with or without a scheme, a trailing slash or `/v1`."""
    scheme, _, rest = url.strip().rpartition("://")
    rest = rest.rstrip("/").removesuffix("/v1").rstrip("/")
    if scheme not in ("", "http", "https") or not rest:
        raise ConfigError(f"rollout.server.urls has {url!r}, which is no address: write http://host:port.")
    return f"{scheme or 'http'}://{rest}"


def addresses(urls: Any) -> list[str]:
    """Return addresses of a list, or of one text, each once. Raises ConfigError where there is none."""
    listed = [urls] if isinstance(urls, str) else list(urls or [])
    found = list(dict.fromkeys(server_address(str(url)) for url in listed))
    if not found:
        raise ConfigError("rollout.server.urls is empty: give the address of a rollout server, http://host:port.")
    return found
