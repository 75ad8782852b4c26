"""Plain `generate` of transformers: the reference the other engines are compared with, and the way for any model."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig

from grpo_toolbox.engines.inprocess import Drawn, InProcessEngine
from grpo_toolbox.models.forward import plain_model
from grpo_toolbox.types import Prompt, Sampling


class HfEngine(InProcessEngine):
    """Samples with the policy itself through `model.generate`; random numbers are a torch generator's, seeded per call.

    The rows of a call all end together.
    """

    def _draw(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> Generator[Drawn]:
        model: Any = plain_model(self._model)
        device = next(model.parameters()).device
        rows = [prompt.ids for prompt in prompts for _ in range(group_size)]
        width = max(map(len, rows))
        ids = torch.tensor([[*([0] * (width - len(row))), *row] for row in rows], device=device)
        pads = torch.tensor([width - len(row) for row in rows], device=device)
        numbers = torch.Generator(device).manual_seed(sampling.seed)
        with _without_defaults(model), _DrawingFrom(numbers):
            output = model.generate(
                input_ids=ids,
                attention_mask=(torch.arange(width, device=device) >= pads.unsqueeze(1)).long(),
                generation_config=_generation_config(sampling, self._stop_ids),
                stopping_criteria=[self._stop_when_cancelled],
            )
        temperature = sampling.temperature or 1.0
        # what `generate` calls scores are logits over the temperature, with -inf on what was cut
        steps = output.scores if sampling.drawn_logps else tuple(step.float() / temperature for step in output.logits)
        tokens = output.sequences[:, width:]
        logps = _logps(steps, tokens).tolist()
        for row, drawn in enumerate(tokens.tolist()):
            end = next((place + 1 for place, token in enumerate(drawn) if token in self._stop_ids), len(drawn))
            yield row, drawn[:end], logps[row][:end], [(self._version, end)]

    def _stop_when_cancelled(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._check_cancelled()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class _DrawingFrom(TorchFunctionMode):
    """Let `torch.multinomial` draw from a generator: torch's own may be drawn from in another thread meanwhile."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = {"generator": self._generator} if function is torch.multinomial else {}
        return function(*args, **{**(kwargs or {}), **drawing})


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
        output_logits=not sampling.drawn_logps,
        output_scores=sampling.drawn_logps,
        return_dict_in_generate=True,
        **(cuts if sampling.temperature > 0 else {}),
    )


def _logps(steps: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """Return log-probs (N, T) of the drawn tokens under the softmax of each step's (N, V)."""
    columns = [step.float().log_softmax(dim=-1).gather(1, tokens[:, place, None]) for place, step in enumerate(steps)]
    return torch.cat(columns, dim=1)
