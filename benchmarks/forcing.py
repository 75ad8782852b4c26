"""Completions of given lengths, by the least that can be done to either side.

Where all rows are equally long both sides are told `min_new_tokens`. Where they are not, a logits processor leaves
`generate` the stop token alone at a row's last step, and our sampler's draw is replaced by it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from workloads import Workload

from grpo_toolbox.engines import sampling


class EndRows(LogitsProcessor):
    """Lets row i of `generate` draw the stop token at its length, and never before."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        self._lengths = torch.tensor(lengths)
        self._prompt_tokens = prompt_tokens
        self._stop_ids = list(stop_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (N, V) for the next token."""
        place = input_ids.shape[1] - self._prompt_tokens + 1
        scores[:, self._stop_ids] = float("-inf")
        ending = (self._lengths == place).nonzero().squeeze(1).to(scores.device)
        scores[ending] = float("-inf")
        scores[ending, self._stop_ids[0]] = 0.0
        return scores


@contextmanager
def ending_our_rows(load: Workload, model: Any) -> Iterator[None]:
    """Replace the token that our sampler draws by the stop token where a row is as long as the workload wants it.

    Rows are known by the keys of their random streams, so that the engine may reorder, drop and add rows as it likes.
    """
    if load.mean_new_tokens is None:
        yield
        return
    lengths, stop = load.lengths(), _stop_id(model)
    length_of: dict[int, int] = {}
    ending: list[np.ndarray] = []
    originals = {name: getattr(sampling, name) for name in ("row_keys", "uniforms", "sample")}

    def row_keys(*args: Any, **options: Any) -> Any:
        keys = originals["row_keys"](*args, **options)
        for key in keys:
            length_of.setdefault(int(key), lengths[len(length_of) % len(lengths)])
        return keys

    def uniforms(keys: Any, position: Any) -> Any:
        wanted = np.array([length_of[int(key)] for key in keys])
        ending.append(wanted == np.asarray(position) + 1)
        return originals["uniforms"](keys, position)

    def sample(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        tokens, logps = originals["sample"](logits, *args, **options)
        ends = torch.from_numpy(ending.pop()).to(tokens.device)
        ended = logits[ends].float().log_softmax(dim=-1)[:, stop]
        return tokens.masked_fill(ends, stop), logps.masked_scatter(ends, ended.to(logps.dtype))

    with _in_place_of(originals, {"row_keys": row_keys, "uniforms": uniforms, "sample": sample}):
        yield


@contextmanager
def _in_place_of(originals: dict[str, Any], replacements: dict[str, Any]) -> Iterator[None]:
    """Put functions in the place of others in every module of the engines that has them by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("grpo_toolbox.engines")]
    places = [
        (module, name) for module in modules for name, one in originals.items() if getattr(module, name, None) is one
    ]
    for module, name in places:
        setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, originals[name])


def _stop_id(model: Any) -> int:
    stop = model.generation_config.eos_token_id
    return stop if isinstance(stop, int) else stop[0]
