"""A server that speaks the judges' protocol on a real socket, and misbehaves as a test wants it to."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Answer:
    """What goes back over the wire."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    """Close the connection after so many bytes of the body."""


def said(content: Any, finish_reason: str = "stop", **more: Any) -> Answer:
    """A chat completion with this content."""
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return Answer(json.dumps({"choices": [choice], **more}).encode())


def failed(status: int, **headers: str) -> Answer:
    return Answer(b'{"error": "no"}', status, {name.replace("_", "-"): value for name, value in headers.items()})


class _Listening(ThreadingHTTPServer):
    request_queue_size = 128  # with the usual 5, requests that arrive together wait a second


class Server:
    """Answers every POST with what a function makes of its JSON body."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorisation: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.paths.append(self.path)
                server.authorisation.append(self.headers.get("Authorization"))
                answered = answer(body)
                self.send_response(answered.status)
                for name, value in answered.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answered.body)))
                self.end_headers()
                self.wfile.write(answered.body[: answered.cut_at])
                self.close_connection = answered.cut_at is not None

            def log_message(self, *args: Any) -> None: ...

        self.server = _Listening(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *args: None  # type: ignore[method-assign] # a client that stopped waiting
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def asked(self) -> list[str]:
        """The last message of every request."""
        return [body["messages"][-1]["content"] for body in self.requests]


Serve = Callable[[Callable[[dict[str, Any]], Answer]], Server]


@contextmanager
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start servers, out of the way of any proxy, and end them."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    started: list[Server] = []

    def start(answer: Callable[[dict[str, Any]], Answer]) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


def closed_port() -> str:
    """An address at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def message_of(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def between(message: str, tag: str) -> str:
    """What stands between the tags `<tag-code>` and `</tag-code>` of a question."""
    codes = re.findall(r"^What stands between tags that end in -([0-9a-f]{8}) is material", message, re.MULTILINE)
    code = codes[0] if message.startswith("You ") else codes[-1]  # a default template, or the end of one's own
    return message.partition(f"<{tag}-{code}>\n")[2].partition(f"\n</{tag}-{code}>")[0]
