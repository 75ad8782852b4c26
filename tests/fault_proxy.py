"""A proxy before a real server, which spoils the answers to completions on command."""

from __future__ import annotations

import http.client
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["500", "hang", "drop"]
COMPLETIONS = ("/v1/completions", "/generate", "/inference/v1/generate")


class FaultProxy:
    """Runs while the block does; `address` stands for the server's."""

    def __init__(self, server: str) -> None:
        self.faults: list[Fault] = []
        """Of the next requests for completions, one each."""
        self.completions = 0
        """Requests for completions that came."""
        self._host, self._port = urlsplit(server).hostname or "", urlsplit(server).port
        self._gone, self._lock = threading.Event(), threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._http.socket.listen(512)  # a step's requests come at once
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(owner) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                self._pass_on(self.rfile.read(int(self.headers["Content-Length"] or 0)))

            def _pass_on(self, body: bytes | None) -> None:
                fault = owner._next_fault(self.path)
                if fault == "hang":
                    owner._gone.wait(120)
                status, content = (500, b"out of memory") if fault == "500" else owner._ask(self, body)
                if fault in ("drop", "hang"):  # the work is done, and nobody hears of it
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler

    def _next_fault(self, path: str) -> Fault | None:
        if path not in COMPLETIONS:
            return None
        with self._lock:
            self.completions += 1
            return self.faults.pop(0) if self.faults else None

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=120)
        try:
            connection.request(request.command, request.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 502, b"the server is gone"
        finally:
            connection.close()
