"""What a probe can ask: an engine in this process, a vLLM server, an SGLang server."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.probe import DRAWN, SCORED, Reading, Row
from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import Control
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import Prompt, Sampling

log = logging.getLogger(__name__)

_SEED = 1
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in full: what is left out, a server takes from the checkpoint's own generation defaults."""


class EngineTarget:
    """Any engine, by what it draws; it scores nothing."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    def read(self, rows: Sequence[Row]) -> Reading:
        """Draw behind each row."""
        prompts = [Prompt(index, "", row) for index, row in enumerate(rows)]
        rollouts = self._engine.generate(prompts, 1, Sampling(DRAWN, seed=_SEED))
        return Reading(tuple((one.ids, one.logps) for one in rollouts))


class Served(Control, Protocol):
    """A server that has the policy."""

    up: bool
    """Whether it takes requests."""
    trouble: str
    """What was the matter when it was last given up."""

    @property
    def model(self) -> str:
        """The name of the policy there, an adapter's as it may be."""
        ...


class VllmTarget:
    """One vLLM server."""

    def __init__(self, server: Served, timeout_s: float) -> None:
        self.name = server.address
        self._server = server
        self._timeout_s = timeout_s

    def read(self, rows: Sequence[Row]) -> Reading | None:
        """Draw behind each row, then score with a salt that no cache has seen; None where the server went away.

        Not by `prompt_logprobs`, which ends a server on a processor that was started with `--enable-lora`.
        """
        return _unless_gone(self._server, lambda: self._read(rows))

    def _read(self, rows: Sequence[Row]) -> Reading:
        drawn = self._ask(rows, {"max_tokens": DRAWN, "logprobs": 0})
        scored = self._ask(rows, {"max_tokens": 1, "logprobs": SCORED, "cache_salt": secrets.token_hex(8)})
        return Reading(
            drawn=tuple((tuple(one["token_ids"]), tuple(one["logprobs"]["token_logprobs"])) for one in drawn),
            scored=tuple(_by_token(one["logprobs"]["top_logprobs"][0]) for one in scored),
            seen=tuple(tuple(one["prompt_token_ids"]) for one in drawn),
        )

    def _ask(self, rows: Sequence[Row], more: Mapping[str, Any]) -> list[dict[str, Any]]:
        body = {"model": self._server.model, "prompt": [list(row) for row in rows], "seed": _SEED}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, **_PLAIN, "top_k": 0, **more}
        choices: list[dict[str, Any]] = self._server.post("/v1/completions", body, timeout_s=self._timeout_s)["choices"]
        if len(choices) != len(rows):
            raise EngineError(f"{self.name} answered {len(choices)} of {len(rows)} canaries.")
        return choices


class SglangTarget:
    """One SGLang server; it has one model."""

    def __init__(self, server: Served, timeout_s: float) -> None:
        self.name = server.address
        self._server = server
        self._timeout_s = timeout_s

    def read(self, rows: Sequence[Row]) -> Reading | None:
        """Draw behind each row, then score; None where the server went away.

        A request for the log-probs of its input is computed without the cache.
        """
        return _unless_gone(self._server, lambda: self._read(rows))

    def _read(self, rows: Sequence[Row]) -> Reading:
        drawn = self._ask(rows, DRAWN, {})
        scored = self._ask(rows, 1, {"logprob_start_len": 0, "top_logprobs_num": SCORED})
        return Reading(
            drawn=tuple((_ids(one["output_token_logprobs"]), _logps(one["output_token_logprobs"])) for one in drawn),
            scored=tuple({int(one[1]): float(one[0]) for one in each["output_top_logprobs"][0]} for each in scored),
            seen=tuple(_ids(one["input_token_logprobs"]) for one in scored),
        )

    def _ask(self, rows: Sequence[Row], tokens: int, more: Mapping[str, Any]) -> list[dict[str, Any]]:
        sampling = {"max_new_tokens": tokens, "sampling_seed": _SEED, **_PLAIN, "top_k": -1}
        body = {"input_ids": [list(row) for row in rows], "sampling_params": sampling, "return_logprob": True, **more}
        answers: list[dict[str, Any]] = self._server.post("/generate", body, timeout_s=self._timeout_s)
        if len(answers) != len(rows):
            raise EngineError(f"{self.name} answered {len(answers)} of {len(rows)} canaries.")
        return [one["meta_info"] for one in answers]


def _unless_gone(server: Served, read: Callable[[], Reading]) -> Reading | None:
    """Return what was read; None where the server went away meanwhile, and is out of use until it is admitted again."""
    try:
        return read()
    except Refused:
        raise
    except EngineError as error:
        log.warning("%s is given up for now, as it was probed: %s", server.address, error)
        server.up, server.trouble = False, str(error)
        return None


def _by_token(listed: Mapping[str, float]) -> dict[int, float]:
    """Read vLLM's `{"token_id:12": -0.5, …}`."""
    return {int(name.removeprefix("token_id:")): logp for name, logp in listed.items()}


def _ids(triples: Sequence[Sequence[Any]]) -> Row:
    return tuple(int(one[1]) for one in triples)


def _logps(triples: Sequence[Sequence[Any]]) -> tuple[float, ...]:
    return tuple(float(one[0]) for one in triples)
