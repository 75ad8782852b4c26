"""A small server that speaks SGLang's protocol strictly, or OpenAI's, draws with a real model, and fails on command."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.types import LogpKind, Prompt, Rollout, Sampling
from served_models import END, byte_tokenizer, served_model
from sglang_weights import SglangWeights
from small_models import forced_log_probs, forced_logps

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
SGLANG_BODY = {"input_ids": list, "sampling_params": (list, dict), "return_logprob": bool}
SGLANG_MORE = {"stream": bool, "logprob_start_len": int, "top_logprobs_num": int}

Fault = Literal["500", "hang", "nan", "null", "garbage", "drop", "no logps", "abort", "stranger"]


class Drawn(NamedTuple):
    """One completion, and the weights version that was stated while it was drawn."""

    rollout: Rollout
    version: str


class Asked(NamedTuple):
    """One completion that was asked for."""

    ids: list[int]
    sampling: Sampling


@dataclass
class ProtocolServer:
    """Runs while the block does; `address` is where."""

    protocol: Literal["sglang", "openai"] = "sglang"
    model: Any = field(default_factory=served_model)
    kind: LogpKind = "tempered"
    name: str = "policy"
    version: str = "default"
    """Of the weights, at the start."""
    faults: list[Fault] = field(default_factory=list)
    """Of the next requests for completions, one each."""
    always: Fault | None = None
    tokenize: Callable[[str], list[int]] = field(
        default_factory=lambda: lambda text: byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    )
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    """Every completion that was answered in full."""
    requests: int = 0
    """That were answered in full; each may have asked for several completions."""
    healthy: bool = True
    most_at_once: int = 0
    strange: int = 0
    """How many of the next questions about it are answered by a stranger, as a proxy does while a server restarts."""

    def __enter__(self) -> ProtocolServer:
        self._at_once, self._lock = 0, threading.Lock()
        self.weights = SglangWeights(self.model, self.version)
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
        if path == "/model_info" and self.protocol == "sglang":
            return 200, {"model_path": self.weights.path, "weight_version": self.weights.version}
        if path == "/server_info" and self.protocol == "sglang":
            return 200, {"model_path": self.name, "tp_size": 1, "dp_size": 1, "context_length": None}
        if path == "/v1/models" and self.protocol == "openai":
            return 200, {"data": [{"id": self.name, "root": self.name, "max_model_len": 512}]}
        return 404, {"detail": "Not Found"}

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"])}
        if self.protocol == "sglang" and path != "/generate":
            return self.weights.answer(path, body)
        if self.protocol == "openai" and path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        with self._lock:
            self._at_once += len(_completions(body))
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self.faults.pop(0) if self.faults else self.always
        try:
            return self._completion(body, fault)
        finally:
            with self._lock:
                self._at_once -= len(_completions(body))

    def _completion(self, body: dict[str, Any], fault: Fault | None) -> tuple[int, Any]:
        if fault == "500":
            return 500, {"error": "CUDA error: an illegal memory access was encountered"}
        if fault == "hang":
            self._gone.wait(60)
        if fault == "drop" or self._gone.is_set():
            raise ConnectionResetError
        if fault == "garbage":
            return 200, "<html>It works!</html>"
        wrong = _wrong(body) if self.protocol == "sglang" else None
        if wrong:
            return 400, {"error": wrong}
        asked = [(_read_sglang if self.protocol == "sglang" else _read_openai)(*one) for one in _completions(body)]
        drawn = self._draw([_half(one) if fault == "abort" else one for one in asked], "logprob_start_len" in body)
        with self._lock:
            self.asked += asked
            self.requests += 1
        if self.protocol == "openai":
            return 200, {"choices": [_write_openai(place, one.rollout) for place, one in enumerate(drawn)]}
        return 200, [self._write_sglang(one, body, fault) for one in drawn]

    def _draw(self, asked: Sequence[Asked], scored: bool) -> list[Drawn]:
        """Wait for the next batch, and draw with whatever else is waiting."""
        waiting: list[Future[Drawn]] = [Future() for _ in asked]
        for one, drawn in zip(asked, waiting, strict=True):
            self._waiting.put((one, scored, drawn))
        return [self._wait(drawn) for drawn in waiting]

    def _wait(self, drawn: Future[Drawn]) -> Drawn:
        while not self._gone.is_set():
            with contextlib.suppress(TimeoutError):
                return drawn.result(0.1)
        raise ConnectionResetError

    def _decode(self) -> None:
        """Draw batches; a row's random numbers follow from its prompt's number, which is the request's seed."""
        while not self._gone.is_set():
            time.sleep(0.003)
            if self._waiting.empty():
                continue
            with self.weights.drawing:  # not while generation is paused
                batches: dict[tuple[int, Sampling], list[tuple[Prompt, Future[Drawn]]]] = {}
                while not self._waiting.empty():
                    asked, scored, drawn = self._waiting.get()
                    prompt = Prompt(asked.sampling.seed, "", tuple(asked.ids))
                    key = (self.weights.drawn_by(prompt.ids, cached=not scored), replace(asked.sampling, seed=0))
                    batches.setdefault(key, []).append((prompt, drawn))
                for (update, sampling), rows in batches.items():
                    self._decode_batch(self.weights.models[update], sampling, rows)

    def _decode_batch(self, model: Any, sampling: Sampling, rows: list[tuple[Prompt, Future[Drawn]]]) -> None:
        engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(END,))
        sampling = replace(sampling, drawn_logps=self.kind == "processed")
        for one, (prompt, drawn) in zip(engine.generate([row for row, _ in rows], 1, sampling), rows, strict=True):
            raw = self.kind == "raw"
            logps = tuple(forced_logps(model, prompt.ids, one.ids).tolist()) if raw else one.logps
            drawn.set_result(Drawn(replace(one, logps=logps), self.weights.version))

    def _write_sglang(self, drawn: Drawn, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        rollout, version = drawn.rollout, "of-another-run" if fault == "stranger" else drawn.version
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
            "weight_versions": [{"version": version, "start": 0, "end": len(rollout.ids)}],
        }
        if "logprob_start_len" in body:
            told["input_token_logprobs"] = [[None, token, None] for token in rollout.prompt.ids]
        if "top_logprobs_num" in body:
            following = forced_log_probs(self.weights.models[-1], rollout.prompt.ids, rollout.ids[:1])[0]
            top = following.topk(body["top_logprobs_num"])
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            told["output_top_logprobs"] = [[[logp, token, None] for logp, token in pairs]]
        if fault == "no logps":
            del told["output_token_logprobs"]
        return {"text": "", "output_ids": list(rollout.ids), "meta_info": told}


def _completions(body: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
    """Return ids and parameters of each completion of a request, as SGLang reads one, or OpenAI's."""
    if "input_ids" not in body:
        return [(body["prompt"], body)] * body.get("n", 1)
    rows, told = body["input_ids"], body.get("sampling_params", {})
    rows = rows if rows and isinstance(rows[0], list) else [rows]
    return [(row, told if isinstance(told, dict) else told[place]) for place, row in enumerate(rows)]


def _wrong(body: dict[str, Any]) -> str | None:
    told = body.get("sampling_params", {})
    if isinstance(told, list) and len(told) != len(body["input_ids"]):
        return f"{len(told)} parameters for {len(body['input_ids'])} prompts"
    parts = [(body, SGLANG_BODY | SGLANG_MORE), *((one, SGLANG) for _, one in _completions(body))]
    for given, known in parts:
        for key, value in given.items():
            if key not in known:
                return f"unknown field {key}"
            if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
                return f"{key}={value!r} is not of type {known[key]}"
    return None if set(SGLANG_BODY) <= set(body) else f"missing {sorted(set(SGLANG_BODY) - set(body))}"


def _half(asked: Asked) -> Asked:
    return Asked(asked.ids, replace(asked.sampling, max_new_tokens=max(1, asked.sampling.max_new_tokens // 2)))


def _read_sglang(ids: list[int], told: dict[str, Any]) -> Asked:
    sampling = Sampling(
        told["max_new_tokens"],
        min_new_tokens=told.get("min_new_tokens", 0),
        temperature=told["temperature"],
        top_k=max(told["top_k"], 0),
        top_p=told["top_p"],
        min_p=told["min_p"],
        seed=told["sampling_seed"],
    )
    return Asked(ids, sampling)


def _read_openai(ids: list[int], body: dict[str, Any]) -> Asked:
    sampling = Sampling(
        body["max_tokens"],
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        seed=body["seed"],
    )
    return Asked(ids, sampling)


def _write_openai(place: int, rollout: Rollout) -> dict[str, Any]:
    """As a plain OpenAI server answers: token strings, no ids."""
    told = {"tokens": ["x"] * len(rollout.ids), "token_logprobs": list(rollout.logps)}
    return {"index": place, "text": "x", "logprobs": told, "finish_reason": rollout.finish_reason}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
