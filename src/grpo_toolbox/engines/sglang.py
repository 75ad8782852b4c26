"""SGLang's native `/generate`: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_toolbox.engines.dialect import (
    FINISHES,
    Answer,
    Ask,
    Served,
    as_logps,
    as_stretches,
    only_for_evaluation,
)
from grpo_toolbox.engines.sync import UNTOUCHED, Control
from grpo_toolbox.errors import EngineError


class SglangDialect:
    """One request for the completions of a group, each with parameters of its own.

    `in_place`: weights change by pauses in place. Such a pause leaves the token that is computed ahead of the others
    where it is, and it is counted when generation goes on, as if the newer weights had drawn it.
    """

    name = "sglang"

    def __init__(self, *, in_place: bool = False) -> None:
        self.late = int(in_place)

    def joins(self, ask: Ask, former: Ask) -> bool:
        """Whatever belongs to one group."""
        return True

    def request(self, asks: Sequence[Ask]) -> tuple[str, dict[str, Any]]:
        """Return the request of a batch; stop tokens are those of the trainer beside the checkpoint's own."""
        ids, parameters = [list(ask.ids) for ask in asks], [_parameters(ask) for ask in asks]
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, "stream": False}
        return "/generate", body

    def read(self, answer: Any) -> list[Answer]:
        """Return the pairs of `output_token_logprobs`."""
        return [_read(one["meta_info"]) for one in answer]

    def served(self, server: Control) -> Served:
        """Return the folder or name it was started with; `/model_info` has that of the newest weights."""
        info = server.get("/server_info")
        path, positions = str(info["model_path"]), info.get("context_length")
        return Served(path, path, None if positions is None else int(positions))

    def untouched(self, server: Control) -> bool:
        """Return whether it states the weights version that it starts with."""
        return str(server.get("/model_info").get("weight_version", UNTOUCHED)) == UNTOUCHED

    def tokenize(self, server: Control, model: str, text: str) -> list[int] | None:
        """Ask `/tokenize`, which not every version has."""
        try:
            answer = server.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        except EngineError:
            return None
        return [int(one) for one in answer["tokens"]]


def _parameters(ask: Ask) -> dict[str, Any]:
    """`ignore_eos` would also switch `stop_token_ids` off, so it is set where there are none."""
    sampling = ask.sampling
    return {
        "max_new_tokens": ask.max_new_tokens,
        "min_new_tokens": ask.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(ask.stop_ids),
        "ignore_eos": not ask.stop_ids,
        "skip_special_tokens": False,
        "sampling_seed": ask.seed,
    }


def _read(told: dict[str, Any]) -> Answer:
    reason = told["finish_reason"]
    finish = FINISHES[None if reason is None else reason["type"]]
    pairs = told.get("output_token_logprobs")
    if pairs is None:
        raise only_for_evaluation("log-probs")
    stretches = as_stretches(told.get("weight_versions"), len(pairs))
    return Answer(tuple(int(pair[1]) for pair in pairs), as_logps([pair[0] for pair in pairs]), finish, stretches)
