"""vLLM's server: `/v1/completions` with token ids both ways."""

from __future__ import annotations

from typing import Any

from grpo_toolbox.engines.dialect import Ask
from grpo_toolbox.engines.http import HttpDialect
from grpo_toolbox.engines.server import Refused
from grpo_toolbox.engines.sync import Control

UNTOUCHED = "default"


class VllmDialect(HttpDialect):
    """One request per completion; its prefix cache makes one prefill of a group's."""

    name = "vllm"
    logprobs = 0
    """The drawn token alone."""

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
