"""vLLM's server: `/v1/completions` with token ids both ways."""

from __future__ import annotations

from typing import Any

from grpo_toolbox.engines.dialect import Ask
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import Control

UNTOUCHED = "default"


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
        salt = {"cache_salt": f"weights {ask.version}"}  # keeps prefixes of former weights out
        return {"ignore_eos": True, "min_tokens": ask.min_new_tokens} | salt

    def untouched(self, server: Control) -> bool:
        """Return whether it states the weights version that it starts with, or has no way of changing weights."""
        try:
            return str(server.get("/weight_info")["weight_version"]) == UNTOUCHED
        except Refused:  # not in VLLM_SERVER_DEV_MODE, or a version of before weight versions
            return True
