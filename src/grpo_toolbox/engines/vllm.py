"""vLLM's server: `/v1/completions` with token ids both ways, or its endpoint of tokens alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_toolbox.engines.dialect import FINISHES, Answer, Ask, Served, as_stretches, only_for_evaluation
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import UNTOUCHED, Control

TOKENS = "/inference/v1/generate"
_NO_LOGP = -9999.0
"""What that endpoint says of a log-prob that is not finite."""


class VllmDialect(HttpDialect):
    """One request for the completions of a group, which its prefix cache makes one prefill of."""

    name = "vllm"
    logprobs = 0
    """The drawn token alone."""

    def joins(self, ask: Ask, former: Ask) -> bool:
        """Seeds count up within a request, and a greedy one has one completion."""
        alike = (ask.ids, ask.max_new_tokens, ask.min_new_tokens) == (
            former.ids,
            former.max_new_tokens,
            former.min_new_tokens,
        )
        return alike and ask.seed == former.seed + 1 and ask.sampling.temperature > 0

    def beside(self, ask: Ask) -> dict[str, Any]:
        """Let the trainer's stop tokens alone end a completion, and say how early they may come."""
        return {"ignore_eos": True, "min_tokens": ask.min_new_tokens, "cache_salt": _salt(ask)}

    def untouched(self, server: Control) -> bool:
        """Return whether it states the weights version that it starts with, or has no way of changing weights."""
        try:
            return str(server.get("/weight_info")["weight_version"]) == UNTOUCHED
        except Refused:  # not in VLLM_SERVER_DEV_MODE, or a version of before weight versions
            return True


class StampedVllmDialect(VllmDialect):
    """The endpoint of tokens alone, whose answers say which weights drew which tokens: for weights that come in flight.

    vLLM stamps what each step of its scheduler brings, and no step is under way while it is paused.
    """

    def request(self, asks: Sequence[Ask]) -> tuple[str, dict[str, Any]]:
        """Return the request for completions that join each other."""
        ask = asks[0]
        sampling = {"ignore_eos": True, "min_tokens": ask.min_new_tokens, "detokenize": False}
        body = {"model": ask.model, "token_ids": list(ask.ids), "stream": False, "cache_salt": _salt(ask)}
        return TOKENS, body | {"sampling_params": self.drawing(asks) | sampling}

    def read(self, answer: Any) -> list[Answer]:
        """Return ids, log-probs and the weights versions of each completion."""
        return [_read(choice) for choice in sorted(answer["choices"], key=lambda one: int(one["index"]))]

    def served(self, server: Control) -> Served:
        """Return the first of `/v1/models`. Raises Refused for a vLLM without that endpoint."""
        if TOKENS not in server.get("/openapi.json")["paths"]:
            raise Refused(
                f"it has no {TOKENS}, which says what weights drew which tokens: start it with --enable-scale-out, as "
                "`toolbox serve` does with these words, or set rollout.async.in_flight=none"
            )
        return super().served(server)


def _salt(ask: Ask) -> str:
    """Return what keeps prefixes of former weights out."""
    return f"weights {ask.version}"


def _read(choice: Mapping[str, Any]) -> Answer:
    ids = tuple(int(one) for one in choice["token_ids"] or ())
    told = choice["logprobs"]
    if told is None:
        raise only_for_evaluation("log-probs")
    logps = tuple(float(one["logprob"]) for one in told["content"] or ())
    logps = tuple(logp if logp > _NO_LOGP else math.nan for logp in logps)
    return Answer(ids, logps, FINISHES[choice["finish_reason"]], as_stretches(choice.get("weight_versions"), len(ids)))
