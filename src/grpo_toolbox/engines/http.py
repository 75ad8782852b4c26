"""Any server with OpenAI's `/v1/completions` that takes token ids and tells ids and log-probs: llama.cpp's, vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_toolbox.engines.dialect import FINISHES, Answer, Ask, Incomplete, Served, as_logps, only_for_evaluation
from grpo_toolbox.engines.sync import Control
from grpo_toolbox.errors import EngineError

_TOKEN_ID = "token_id:"


class HttpDialect:
    """Reads ids and log-probs wherever one of the known servers puts them."""

    name = "http"
    late = 0
    logprobs = 1
    """Of how many tokens to ask for at each place; some servers take 0 for none at all."""

    def joins(self, ask: Ask, former: Ask) -> bool:
        """A request of its own for each: servers number the completions of one request in ways of their own."""
        return False

    def request(self, asks: Sequence[Ask]) -> tuple[str, dict[str, Any]]:
        """Return OpenAI's request; fields that a server does not know, it skips."""
        ask = asks[0]
        body = {"model": ask.model, "prompt": list(ask.ids), "stream": False, "return_token_ids": True}
        return "/v1/completions", body | self.drawing(asks) | self.beside(ask)

    def drawing(self, asks: Sequence[Ask]) -> dict[str, Any]:
        """Return the sampling options.

        Every one is said, since a server's own defaults (a checkpoint's repetition penalty, top-k) would make its
        log-probs those of another distribution.
        """
        ask, sampling = asks[0], asks[0].sampling
        return {
            "n": len(asks),
            "max_tokens": ask.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": ask.seed,
            "logprobs": self.logprobs,
            "stop_token_ids": list(ask.stop_ids),
        }

    def beside(self, ask: Ask) -> dict[str, Any]:
        """Return what llama.cpp calls by names of its own; it has no way of holding the stop token back."""
        if ask.min_new_tokens:
            raise EngineError(
                f"rollout.min_new_tokens={ask.min_new_tokens} is not in the protocol of rollout.engine=http: set it to "
                "0, or use rollout.engine=vllm or sglang."
            )
        samplers = ["top_k", "top_p", "min_p", "temperature"]
        return {"cache_prompt": True, "samplers": samplers, "repeat_penalty": 1.0}

    def read(self, answer: Any) -> list[Answer]:
        """Return ids from `token_ids`, `logprobs.content[].id` or tokens named `token_id:N`, with their log-probs."""
        answers = [_read(choice) for choice in sorted(answer["choices"], key=lambda one: int(one.get("index", 0)))]
        told = sum(len(one.ids) for one in answers)
        count = (answer.get("usage") or {}).get("completion_tokens", told)
        if told != count and any(one.finish != "abort" for one in answers):
            raise Incomplete(
                f"{told} of {count} tokens were told: llama.cpp leaves out those that end inside a character."
            )
        return answers

    def served(self, server: Control) -> Served:
        """Return the first of `/v1/models`."""
        first = server.get("/v1/models")["data"][0]
        positions = first.get("max_model_len")
        return Served(str(first["id"]), str(first.get("root") or first["id"]), positions)

    def untouched(self, server: Control) -> bool:
        """Nothing in this protocol changes weights."""
        return True

    def tokenize(self, server: Control, model: str, text: str) -> list[int] | None:
        """Ask `/tokenize`, as vLLM and llama.cpp spell it."""
        try:
            body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
            answer = server.post("/tokenize", body)
        except EngineError:  # not every server has it
            return None
        return [int(one) for one in answer["tokens"]]


def _read(choice: dict[str, Any]) -> Answer:
    told: dict[str, Any] = choice.get("logprobs") or {}
    logps: list[float | None] | None
    finish = FINISHES[choice.get("finish_reason")]
    content = told.get("content")
    if content is not None:
        logps = [one["logprob"] for one in content]
        named = [one["id"] for one in content if "id" in one]
    else:
        logps = told.get("token_logprobs")
        named = _named_ids(told.get("tokens") or [])
    ids = choice.get("token_ids") or named
    if finish == "abort" and not ids:
        return Answer((), (), finish)
    if not ids:
        raise only_for_evaluation("token ids")
    if logps is None:
        raise only_for_evaluation("log-probs")
    return Answer(tuple(map(int, ids)), as_logps(logps), finish)


def _named_ids(tokens: list[Any]) -> list[int]:
    named = [str(one) for one in tokens]
    if not all(one.startswith(_TOKEN_ID) for one in named):
        return []
    return [int(one.removeprefix(_TOKEN_ID)) for one in named]
