"""A hub on this machine for tests: as much of its API as an upload of a model folder calls, kept in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER = "someone"


@dataclass
class Hub:
    """What has been asked for, and what lies in the one repository."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    """Of each its `summary`, `revision` and the `tokens` it came with."""
    files: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Serve a hub for the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(_answered(hub, self.path, body, self.headers.get("Authorization")))

        def do_GET(self) -> None:
            self._answer({"name": OWNER, "orgs": []} if "whoami" in self.path else None)

        def _answer(self, answer: dict[str, Any] | None) -> None:
            text = json.dumps(answer or {}).encode()
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _answered(hub: Hub, path: str, body: bytes, token: str | None) -> dict[str, Any] | None:
    if path.endswith("/api/repos/create"):
        asked = json.loads(body)
        hub.created.append(asked | {"token": token})
        return {"url": f"{hub.address}/{asked.get('organization') or OWNER}/{asked['name']}"}
    if path.endswith("/api/validate-yaml"):
        return {"errors": [], "warnings": []}
    if "/preupload/" in path:
        names = [one["path"] for one in json.loads(body)["files"]]
        return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
    if "/commit/" in path:
        lines = [json.loads(line) for line in body.decode().splitlines()]
        (head,) = (line["value"] for line in lines if line["key"] == "header")
        hub.commits.append({"summary": head["summary"], "revision": path.rpartition("/commit/")[2], "token": token})
        for line in lines:
            if line["key"] == "file":
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        repository = path.partition("/api/models/")[2].partition("/commit/")[0]
        return {"commitUrl": f"{hub.address}/{repository}/commit/1", "commitOid": "1", "pullRequestUrl": None}
    return None
