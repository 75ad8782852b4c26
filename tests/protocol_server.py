"""A small server that speaks SGLang's protocol strictly, or OpenAI's, draws with a real model, and fails on command."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.types import LogpKind, Prompt, Rollout, Sampling
from served_models import END, byte_tokenizer, served_model
from small_models import forced_logps

SGLANG = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "stop_token_ids": list,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "sampling_seed": int,
}
"""Every sampling parameter that SGLang 0.5 knows and we send, with its type; others are refused."""
SGLANG_BODY = {"input_ids": list, "sampling_params": dict, "return_logprob": bool, "stream": bool}

Fault = Literal["500", "hang", "nan", "null", "garbage", "drop", "no logps", "abort"]


@dataclass
class ProtocolServer:
    """Runs while the block does; `address` is where."""

    protocol: Literal["sglang", "openai"] = "sglang"
    model: Any = field(default_factory=served_model)
    kind: LogpKind = "tempered"
    name: str = "policy"
    version: str = "default"
    faults: list[Fault] = field(default_factory=list)
    """Of the next requests for completions, one each."""
    always: Fault | None = None
    tokenize: Callable[[str], list[int]] = field(
        default_factory=lambda: lambda text: byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    )
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Every request for a completion that was answered in full."""
    healthy: bool = True
    most_at_once: int = 0
    strange: int = 0
    """How many of the next questions about it are answered by a stranger, as a proxy does while a server restarts."""

    def __enter__(self) -> ProtocolServer:
        self._at_once, self._lock = 0, threading.Lock()
        self._engine = LocalEngine(self.model, decode=lambda ids, _: "", stop_ids=(END,))
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._connections: list[socket.socket] = []
        self._gone, self._waiting = threading.Event(), queue.SimpleQueue()
        threading.Thread(target=self._decode, daemon=True).start()
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def address(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def _handler(owner) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                owner._connections.append(self.connection)

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._say(*owner._told(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
                try:
                    self._say(*owner._answer(self.path, body))
                except (ConnectionResetError, BrokenPipeError):
                    self.close_connection = True

            def _say(self, status: int, value: Any) -> None:
                content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler

    def _told(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            return (200, "") if self.healthy else (503, "")
        if self.strange:
            self.strange -= 1
            return 404, "no route"
        if path == "/get_model_info" and self.protocol == "sglang":
            return 200, {"model_path": self.name, "weight_version": self.version}
        if path == "/v1/models" and self.protocol == "openai":
            return 200, {"data": [{"id": self.name, "root": self.name, "max_model_len": 512}]}
        return 404, {"detail": "Not Found"}

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"])}
        if path != {"sglang": "/generate", "openai": "/v1/completions"}[self.protocol]:
            return 404, {"detail": "Not Found"}
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self.faults.pop(0) if self.faults else self.always
        try:
            return self._completion(body, fault)
        finally:
            with self._lock:
                self._at_once -= 1

    def _completion(self, body: dict[str, Any], fault: Fault | None) -> tuple[int, Any]:
        if fault == "500":
            return 500, {"error": "CUDA error: an illegal memory access was encountered"}
        if fault == "hang":
            self._gone.wait(60)
        if fault == "drop" or self._gone.is_set():
            raise ConnectionResetError
        if fault == "garbage":
            return 200, "<html>It works!</html>"
        wrong = _wrong(body, SGLANG_BODY, SGLANG) if self.protocol == "sglang" else None
        if wrong:
            return 400, {"error": wrong}
        read, write = (_read_sglang, _write_sglang) if self.protocol == "sglang" else (_read_openai, _write_openai)
        ids, sampling = read(body)
        if fault == "abort":
            sampling = Sampling(
                max(1, sampling.max_new_tokens // 2), temperature=sampling.temperature, seed=sampling.seed
            )
        rollout = self._draw(ids, replace(sampling, drawn_logps=self.kind == "processed"))
        if self.kind == "raw":
            rollout = replace(rollout, logps=tuple(forced_logps(self.model, ids, rollout.ids).tolist()))
        answer = write(rollout, fault)
        with self._lock:
            self.asked.append(body)
        return 200, answer

    def _draw(self, ids: list[int], sampling: Sampling) -> Rollout:
        """Wait for the next batch, and draw with whatever else is waiting."""
        drawn: Future[Rollout] = Future()
        self._waiting.put((Prompt(sampling.seed, "", tuple(ids)), replace(sampling, seed=0), drawn))
        while not self._gone.is_set():
            with contextlib.suppress(TimeoutError):
                return drawn.result(0.1)
        raise ConnectionResetError

    def _decode(self) -> None:
        """Draw batches; a row's random numbers follow from its prompt's number, which is the request's seed."""
        while not self._gone.is_set():
            time.sleep(0.003)
            batches: dict[Sampling, list[tuple[Prompt, Future[Rollout]]]] = {}
            while not self._waiting.empty():
                prompt, sampling, drawn = self._waiting.get()
                batches.setdefault(sampling, []).append((prompt, drawn))
            for sampling, rows in batches.items():
                for one, (_, drawn) in zip(
                    self._engine.generate([prompt for prompt, _ in rows], 1, sampling), rows, strict=True
                ):
                    drawn.set_result(one)


def _wrong(body: dict[str, Any], fields: dict[str, Any], parameters: dict[str, Any]) -> str | None:
    for given, known in ((body, fields), (body.get("sampling_params", {}), parameters)):
        for key, value in given.items():
            if key not in known:
                return f"unknown field {key}"
            if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
                return f"{key}={value!r} is not of type {known[key]}"
    return None if set(fields) <= set(body) else f"missing {sorted(set(fields) - set(body))}"


def _read_sglang(body: dict[str, Any]) -> tuple[list[int], Sampling]:
    told = body["sampling_params"]
    return body["input_ids"], Sampling(
        told["max_new_tokens"],
        min_new_tokens=told["min_new_tokens"],
        temperature=told["temperature"],
        top_k=max(told["top_k"], 0),
        top_p=told["top_p"],
        min_p=told["min_p"],
        seed=told["sampling_seed"],
    )


def _write_sglang(rollout: Rollout, fault: Fault | None) -> dict[str, Any]:
    logps: list[float | None] = list(rollout.logps)
    if fault == "nan":
        logps[-1] = float("nan")
    if fault == "null":
        logps[-1] = None
    reason = {"type": "abort"} if fault == "abort" and rollout.finish_reason == "length" else None
    told: dict[str, Any] = {
        "finish_reason": reason or {"type": rollout.finish_reason},
        "output_token_logprobs": [[logp, token, None] for logp, token in zip(logps, rollout.ids, strict=True)],
        "prompt_tokens": len(rollout.prompt.ids),
    }
    if fault == "no logps":
        del told["output_token_logprobs"]
    return {"text": "", "output_ids": list(rollout.ids), "meta_info": told}


def _read_openai(body: dict[str, Any]) -> tuple[list[int], Sampling]:
    return body["prompt"], Sampling(
        body["max_tokens"],
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        seed=body["seed"],
    )


def _write_openai(rollout: Rollout, fault: Fault | None) -> dict[str, Any]:
    """As a plain OpenAI server answers: token strings, no ids."""
    told = {"tokens": ["x"] * len(rollout.ids), "token_logprobs": list(rollout.logps)}
    choice = {"index": 0, "text": "x", "logprobs": told, "finish_reason": rollout.finish_reason}
    return {"choices": [choice]}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
