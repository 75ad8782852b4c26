"""SGLang's native `/generate`: token ids in, token ids and log-probs out."""

from __future__ import annotations

from typing import Any

from grpo_toolbox.engines.dialect import FINISHES, Answer, Ask, Served, as_logps, only_for_evaluation
from grpo_toolbox.engines.sync import Control
from grpo_toolbox.errors import EngineError

UNTOUCHED = "default"


class SglangDialect:
    """One request per completion."""

    name = "sglang"

    def request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Return the request; stop tokens are those of the trainer beside the checkpoint's own.

        `ignore_eos` would also switch `stop_token_ids` off, so it is set where there are none.
        """
        sampling = ask.sampling
        parameters = {
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
        body = {"input_ids": list(ask.ids), "sampling_params": parameters, "return_logprob": True, "stream": False}
        return "/generate", body

    def read(self, answer: Any) -> Answer:
        """Return the pairs of `output_token_logprobs`."""
        told = answer["meta_info"]
        reason = told["finish_reason"]
        finish = FINISHES[None if reason is None else reason["type"]]
        pairs = told.get("output_token_logprobs")
        if pairs is None:
            raise only_for_evaluation("log-probs")
        return Answer(tuple(int(pair[1]) for pair in pairs), as_logps([pair[0] for pair in pairs]), finish)

    def served(self, server: Control) -> Served:
        """Return the folder or name it was started with."""
        path = str(server.get("/get_model_info")["model_path"])
        return Served(path, path)

    def untouched(self, server: Control) -> bool:
        """Return whether it states the weights version that it starts with."""
        return str(server.get("/get_model_info").get("weight_version", UNTOUCHED)) == UNTOUCHED

    def tokenize(self, server: Control, model: str, text: str) -> list[int] | None:
        """Ask `/tokenize`, which not every version has."""
        try:
            answer = server.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        except EngineError:
            return None
        return [int(one) for one in answer["tokens"]]
