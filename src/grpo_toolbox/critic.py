"""The critic: a model of its own that says what reward to expect before each token, and learns to say it better.

It is all of a decoder plus one linear head that starts at zero, and has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, micro_batches
from grpo_toolbox.checkpoint import copy_parameters
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.models.forward import autocast, completion_hidden, decoder, spread


@dataclass(frozen=True)
class CriticSettings:
    """How the critic learns."""

    lr: float = 1e-5
    clip: float | None = 0.2
    """How far a value may move from its old one before its gradient ends; None is any way."""
    max_grad_norm: float = 1.0
    pretrain_steps: int = 0
    """Steps at the start of the run in which the critic alone learns."""
    micro_batch_tokens: int = 1024
    packed: bool = True
    autocast: torch.dtype | None = None
    """Precision of the forward pass; None is that of the weights."""


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return ½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²) per token, and where the second is the larger."""
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, held) / 2, held > plain


class Critic:
    """A value model with its optimizer; `model` is a causal language model whose output head is not used."""

    def __init__(self, model: nn.Module, settings: CriticSettings, device: torch.device) -> None:
        self.settings = settings
        self._device = device
        self._model: Any = model
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        config: Any = model.config
        head = nn.Linear(config.get_text_config().hidden_size, 1, device=device, dtype=dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.parts = nn.ModuleDict({"decoder": decoder(model), "head": head})
        """What is trained; the output head of the language model is not."""
        self._optimizer = torch.optim.AdamW(self.parts.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Return V (B, T) before each token of the completions, on the CPU; zeros off them."""
        self._model.eval()
        values = torch.zeros(batch.mask.shape)
        for rows in micro_batches(batch, range(len(batch)), self.settings.micro_batch_tokens):
            found = self._forward(batch.select(rows).to(self._device)).float().cpu()
            values[torch.tensor(rows), : found.shape[1]] = found
        return values

    def update(self, batch: Batch, number: int, epochs: int) -> dict[str, float]:
        """Take `epochs` optimizer steps towards the batch's returns and return the metrics of step `number`."""
        taught = _taught(batch)
        if not taught.any():
            return {}
        assert batch.values is not None
        assert batch.returns is not None
        self._model.train()
        loss, clipped, norm = 0.0, 0.0, 0.0
        for _ in range(epochs):
            once, held = self.backward(batch, self.settings.micro_batch_tokens)
            loss, clipped = loss + once, clipped + held
            norm = self._step(loss, number)
        return _fit(batch.values[taught], batch.returns[taught]) | {
            "critic/loss": loss / epochs,
            "critic/clip_fraction": clipped / epochs,
            "critic/grad_norm": norm,
        }

    def backward(self, batch: Batch, micro_batch_tokens: int) -> tuple[float, float]:
        """Add the gradient of the mean loss over a batch's taught tokens; return that loss and the share clipped."""
        taught = _taught(batch)
        tokens = int(taught.sum())
        rows = taught.any(dim=1).nonzero().squeeze(1).tolist()
        loss, clipped = 0.0, 0.0
        for part in micro_batches(batch, rows, micro_batch_tokens):
            total, held = self._losses(batch.select(part).to(self._device))
            (total / tokens).backward()
            loss += float(total.detach()) / tokens
            clipped += float(held) / tokens
        return loss, clipped

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"parameters": self._parameters(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer: bool = True) -> None:
        """Go on from a saved state; without `load_optimizer` its moments start from zero."""
        copy_parameters(self._parameters(), state["parameters"], "critic", "critic.path")
        if load_optimizer:
            self._optimizer.load_state_dict(state["optimizer"])

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.parts.named_parameters())

    def _forward(self, micro: Batch) -> Tensor:
        with autocast(self._device, self.settings.autocast):
            hidden = completion_hidden(self._model, micro, packed=self.settings.packed)
        head: Any = self.parts["head"]
        return spread(head(hidden.to(head.weight.dtype)).squeeze(-1), micro)

    def _losses(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses, and the number of clipped tokens."""
        assert micro.values is not None
        assert micro.returns is not None
        taught = _taught(micro)
        loss, held = value_loss(
            self._forward(micro)[taught], micro.returns[taught], micro.values[taught], self.settings.clip
        )
        return loss.sum(), held.sum()

    def _step(self, loss: float, number: int) -> float:
        parameters = list(self.parts.parameters())
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if not (abs(loss) < float("inf") and norm < float("inf")):
            self._optimizer.zero_grad(set_to_none=True)
            what = "gradient" if abs(loss) < float("inf") else "loss"
            raise TrainingError(
                f"step {number}: the critic's {what} is not finite, so its optimizer was not called; the newest "
                "checkpoint is the one to go back to. Lower critic.lr, or scale the reward down."
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def _taught(batch: Batch) -> Tensor:
    """Return (B, T) True where the policy wrote a token and there is something to learn."""
    assert batch.returns is not None
    return batch.mask & ~batch.returns.isnan()


def _fit(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Say how good the values were that the rollouts were judged by; without variance there is nothing to explain."""
    fit = {"critic/value_mean": float(values.double().mean())}
    spread_of_returns = float(returns.double().var(correction=0))
    if spread_of_returns > 0:
        left = float((returns.double() - values.double()).var(correction=0))
        fit["critic/explained_variance"] = 1 - left / spread_of_returns
    return fit
