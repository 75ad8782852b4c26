"""The load-balancing loss of a mixture of experts, exact over an optimizer step however the step is split.

    aux = E · Σ_e f_e · P_e

over E experts (Fedus et al., 2021; pooled over layers as transformers has it): f_e is how many of a token's k choices
fall on expert e, P_e the router's probability of e, both means over the tokens and layers of the step. Uniform routing
has aux = k. A product of means is no mean of products, so the losses of micro-batches would not add up. But f has no
gradient: it is counted first, in a pass without gradient, and then each micro-batch adds its own tokens' part of P.

A token counts once for each time that a generation has to run the model over it: a prompt once for its whole group,
a completion once without its last token, which nothing follows; padding never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.forward import decoder, plain_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAME_LOSS = 0.02
"""Largest relative difference from the model's own loss that is rounding: in half precision probabilities tie."""


@dataclass(frozen=True)
class Routing:
    """What the routers of L layers made of some tokens."""

    chosen: Tensor
    """(L, E) how often each expert was among a token's k; without gradient."""
    probability: Tensor
    """(E,) probabilities, added up over layers and tokens."""
    tokens: Tensor
    """() tokens, each with its weight."""

    def __add__(self, other: Routing) -> Routing:
        return Routing(self.chosen + other.chosen, self.probability + other.probability, self.tokens + other.tokens)


def routing(logits: Sequence[Tensor], weights: Tensor, top_k: int) -> Routing:
    """Add up what routers with `logits` (N, E), one of each layer, chose for N tokens that count `weights` (N,)."""
    chosen, probability = [], []
    for layer in logits:
        each = layer.flatten(0, -2).to(torch.promote_types(layer.dtype, torch.float32)).softmax(dim=-1)  # (N, E)
        weight = weights.to(each).unsqueeze(1)
        picked = torch.zeros_like(each).scatter(1, each.detach().topk(top_k).indices, 1.0)
        # no matrix products: autocast would round them to half precision
        chosen.append((weight * picked).sum(dim=0).to(weights.device))
        probability.append((weight * each).sum(dim=0).to(weights.device))
    return Routing(torch.stack(chosen), torch.stack(probability).sum(dim=0), weights.sum())


def aux_loss(part: Routing, step: Routing) -> Tensor:
    """Return the share of E · Σ_e f_e · P_e that `part` of the tokens of `step` has; the shares of all parts add up."""
    pool = step.tokens * len(step.chosen)
    return len(part.probability) * (step.chosen.sum(dim=0) / pool * part.probability / pool).sum()


def max_load(step: Routing) -> Tensor:
    """Return the load of the busiest expert of any layer, in multiples of an even one; 1 is perfect balance."""
    return step.chosen.max() * step.chosen.numel() / step.chosen.sum()


def token_weights(batch: Batch, *, rows_per_prompt: float, packed: bool) -> Tensor:
    """Return how much each token of the forward pass counts (N,), in the order of that pass.

    Each row brings its share of the prompt, 1 / `rows_per_prompt`: the parts of a group that was split add up to one.
    """
    share = 1.0 / rows_per_prompt
    lengths = [max(len(ids) - 1, 0) for ids in batch.completions]  # the last token predicts nothing
    if packed:
        rows = Counter(batch.group)
        parts = [[rows[group] * share] * len(ids) for group, ids in enumerate(batch.prompts)]
        parts += [[1.0] * length for length in lengths]
    else:
        width = max(
            len(batch.prompts[group]) + len(ids) for group, ids in zip(batch.group, batch.completions, strict=True)
        )
        parts = []
        for group, length in zip(batch.group, lengths, strict=True):
            prompt = len(batch.prompts[group])
            parts.append([share] * prompt + [1.0] * length + [0.0] * (width - prompt - length))
    return torch.tensor([weight for part in parts for weight in part], device=batch.mask.device)


class ExpertBalance:
    """The load-balancing loss of one optimizer step; with `coef` = 0 it does nothing and costs nothing."""

    def __init__(self, model: nn.Module, coef: float, *, rows_per_prompt: float, packed: bool) -> None:
        self._model = plain_model(model)
        self._coef = coef
        self._rows_per_prompt = rows_per_prompt
        self._packed = packed
        self._step: Routing | None = None
        self._part: Routing | None = None
        self._aux = 0.0

    def count(self, micros: Sequence[Batch], forward: Callable[[Batch], object]) -> None:
        """Count, before the gradients of an optimizer step, how its tokens are routed by the weights as they are.

        Costs one `forward` without gradient per micro-batch, or nothing where there is only one: that counts itself.
        The same random numbers are drawn again afterwards, so that an adapter's dropout routes the same way twice.
        """
        self._step = None
        if not self._coef or len(micros) < 2:
            return
        parts: list[Routing] = []
        devices = sorted({one.device.index for one in self._model.parameters() if one.device.type == "cuda"})
        with torch.no_grad(), torch.random.fork_rng(devices):
            for micro in micros:
                with self.watching(micro):
                    forward(micro)
                parts += [self._part] if self._part is not None else []
        self._step = reduce(add, parts)

    @contextmanager
    def watching(self, micro: Batch) -> Iterator[None]:
        """Look at the routers in the one forward pass over `micro` that the block makes."""
        if not self._coef:
            yield
            return
        weights = token_weights(micro, rows_per_prompt=self._rows_per_prompt, packed=self._packed)
        top_k = experts_per_token(self._model)

        def ask(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, options | {"output_router_logits": True}

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._part = routing(output.router_logits, weights, top_k)

        body = decoder(self._model)
        hooks = (body.register_forward_pre_hook(ask, with_kwargs=True), body.register_forward_hook(keep))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self) -> Tensor | float:
        """Return coef · aux, the share of it that the micro-batch watched last has."""
        if self._part is None:
            return 0.0
        if self._step is None:
            self._step = self._part
        aux = aux_loss(self._part, self._step)
        self._aux += float(aux.detach())
        return self._coef * aux

    def metrics(self, epochs: int) -> dict[str, float]:
        """Return aux, as a mean over `epochs` passes, and the load of the busiest expert in the last one."""
        if self._step is None:
            return {}
        return {"aux_loss": self._aux / epochs, "experts/max_load": float(max_load(self._step))}


# ---- which models have one -------------------------------------------------------------------------------------------


def router_coefficient(config: PretrainedConfig, wanted: float | None) -> float:
    """Return the loss's weight for a model of this configuration: `wanted`, or for None the model's own.

    Raises ConfigError for a weight above 0 on a model that has no experts, or does not hand out its router logits.
    """
    text = config.get_text_config()
    has_logits = hasattr(text, "output_router_logits")
    if wanted is None:
        return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if has_logits else 0.0
    if wanted and not has_logits:
        raise _refusal(wanted, f"a model of type {text.model_type} has none")
    return wanted


@torch.no_grad()
def check_router(model: nn.Module, coef: float) -> None:
    """Raise ConfigError where a loaded model's router logits do not come, or give another loss than its own."""
    if not coef:
        return
    plain = plain_model(model)
    embedding = plain.get_input_embeddings()
    places = torch.arange(40, device=embedding.weight.device)
    probe = (7 * places + 3).remainder(embedding.num_embeddings).unsqueeze(0)
    found = plain(input_ids=probe, output_router_logits=True, use_cache=False)
    if not getattr(found, "router_logits", None) or getattr(found, "aux_loss", None) is None:
        raise _refusal(coef, f"{type(plain).__name__} hands out none")
    rows = found.router_logits[0].flatten(0, -2)
    part = routing(found.router_logits, torch.ones(len(rows), device=rows.device), experts_per_token(plain))
    own, ours = float(found.aux_loss), float(aux_loss(part, part))
    if not abs(own - ours) <= SAME_LOSS * own:
        raise _refusal(
            coef, f"{type(plain).__name__} balances by another formula ({own:.4g}, where this is {ours:.4g})"
        )


def experts_per_token(model: Any) -> int:
    """Return k, the experts that a token is routed to."""
    return int(getattr(model, "num_experts_per_tok", None) or model.config.get_text_config().num_experts_per_tok)


def _refusal(coef: float, reason: str) -> ConfigError:
    return ConfigError(
        f"model.router_aux_loss_coef={coef:g} balances the experts by the model's router logits, and {reason}: "
        "set model.router_aux_loss_coef=0."
    )
