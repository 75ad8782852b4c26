"""Plain `generate` of transformers: the reference the other engines are compared with, and the way for any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from grpo_toolbox.models.forward import autocast, eval_mode, plain_model
from grpo_toolbox.types import Prompt, Rollout, Sampling


class HfEngine:
    """Samples with the policy itself through `model.generate`; random numbers are torch's, seeded per call."""

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Callable[[Sequence[int], str], str],
        stop_ids: Sequence[int],
        autocast_dtype: torch.dtype | None = None,
        weights_version: int = 0,
    ) -> None:
        self._model = model
        self._decode = decode
        self._stop_ids = tuple(stop_ids)
        self._autocast_dtype = autocast_dtype
        self._version = weights_version

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major; they all end together."""
        model: Any = plain_model(self._model)
        device = next(model.parameters()).device
        rows = [prompt.ids for prompt in prompts for _ in range(group_size)]
        width = max(map(len, rows))
        ids = torch.tensor([[*([0] * (width - len(row))), *row] for row in rows], device=device)
        pads = torch.tensor([width - len(row) for row in rows], device=device)
        with (
            eval_mode(model),
            _without_defaults(model),
            torch.random.fork_rng(),
            torch.inference_mode(),
            autocast(device, self._autocast_dtype),
        ):
            torch.manual_seed(sampling.seed)
            output = model.generate(
                input_ids=ids,
                attention_mask=(torch.arange(width, device=device) >= pads.unsqueeze(1)).long(),
                generation_config=_generation_config(sampling, self._stop_ids),
            )
            logps = _logps(output.logits, output.sequences[:, width:], sampling.temperature or 1.0)
        rollouts = [
            self._rollout(prompts[row // group_size], drawn, logps[row].tolist())
            for row, drawn in enumerate(output.sequences[:, width:].tolist())
        ]
        for row, one in enumerate(rollouts):
            if on_finished is not None:
                on_finished(row, one)
        return rollouts

    def sync(self, version: int | None = None) -> int:
        """The weights are the model's own, so nothing has to move; count the version, or take the one given."""
        self._version = self._version + 1 if version is None else version
        return self._version

    def close(self) -> None:
        """Nothing to release."""

    def _rollout(self, prompt: Prompt, drawn: list[int], logps: list[float]) -> Rollout:
        end = next((place + 1 for place, token in enumerate(drawn) if token in self._stop_ids), len(drawn))
        ids = drawn[:end]
        finish = "stop" if ids and ids[-1] in self._stop_ids else "length"
        text = self._decode(ids, finish)
        return Rollout(prompt, tuple(ids), tuple(logps[:end]), finish, text, self._version)  # type: ignore[arg-type]


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Keep the checkpoint's generation defaults (repetition penalties, banned words) out of what is sampled."""
    former = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = former


def _generation_config(sampling: Sampling, stop_ids: tuple[int, ...]) -> GenerationConfig:
    cuts: dict[str, Any] = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    if sampling.min_p:
        cuts["min_p"] = sampling.min_p
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        do_sample=sampling.temperature > 0,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,
        output_logits=True,
        return_dict_in_generate=True,
        **(cuts if sampling.temperature > 0 else {}),
    )


def _logps(logits: tuple[Tensor, ...], tokens: Tensor, temperature: float) -> Tensor:
    """Return log-probs (N, T) of the drawn tokens under softmax(logits / temperature), before any cut."""
    return torch.stack(
        [
            (step.float() / temperature).log_softmax(dim=-1).gather(1, tokens[:, place, None]).squeeze(1)
            for place, step in enumerate(logits)
        ],
        dim=1,
    )
