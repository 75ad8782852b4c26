"""The reference: the model that the KL term compares the policy with, and how it is refreshed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.lora import has_adapter, trains_biases
from grpo_toolbox.models.snapshot import frozen_copy

if TYPE_CHECKING:  # settings are checked without loading torch
    import torch


class Reference:
    """The policy as it was when this was built, or when it was last refreshed; never trained.

    With full fine-tuning it is a frozen copy. With LoRA it is the policy with its adapter switched off, which costs no
    memory and is the model as it was loaded even when built later; once reset, or where the base's biases are trained
    along, it is a copy of what is trained on the same base weights. `net` is given where another library holds the
    reference's model.
    """

    def __init__(self, policy: torch.nn.Module, net: torch.nn.Module | None = None) -> None:
        self._policy: Any = policy
        self._adapted = has_adapter(policy)
        switched_off = self._adapted and not trains_biases(policy)
        self._net: Any = net if net is not None else None if switched_off else frozen_copy(policy)
        self._refreshed = False

    @property
    def net(self) -> torch.nn.Module | None:
        """The reference's own model; None where it is the policy without its adapter."""
        return self._net

    @contextmanager
    def model(self) -> Iterator[torch.nn.Module]:
        """Yield the module to run, in eval mode and without gradients; afterwards the policy is as it was before."""
        import torch

        if self._net is not None:
            with torch.no_grad():
                yield self._net
            return
        training = self._policy.training
        self._policy.eval()
        try:
            with torch.no_grad(), self._policy.disable_adapter():
                yield self._policy
        finally:
            self._policy.train(training)

    def refresh(self, policy: torch.nn.Module, mix: float) -> None:
        """Set π_ref ← mix·π + (1 − mix)·π_ref (TR-DPO; Gorbatovski et al., 2024); mix = 1 is a reset (ProRL, 2025)."""
        import torch

        check_mix(mix, adapted=self._adapted)
        self._refreshed = True
        if self._net is None:
            self._net = frozen_copy(policy)
            return
        with torch.no_grad():
            for own, current in zip(self._net.parameters(), policy.parameters(), strict=True):
                if own is not current:
                    own.lerp_(current.to(own.dtype), mix)

    def state_dict(self) -> dict[str, torch.nn.Parameter] | None:
        """Return its own weights; None while it is the model as it was loaded."""
        return self.own_weights() if self._refreshed else None

    def own_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights that it does not share with the policy, by name, to put saved ones into; with LoRA the
        adapter's alone. From here on they are saved."""
        self._refreshed = True
        if self._net is None:
            self._net = frozen_copy(self._policy)
        shared = {id(parameter) for parameter in self._policy.parameters()}
        return {name: value for name, value in self._net.named_parameters() if id(value) not in shared}


def check_mix(mix: float, *, adapted: bool) -> None:
    """Raise ConfigError for a refresh that low-rank adapters cannot hold.

    Δ = B·A, and (mix·B + (1 − mix)·B')·(mix·A + (1 − mix)·A') is not mix·B·A + (1 − mix)·B'·A'.
    """
    if adapted and mix != 1:
        raise ConfigError(
            f"trainer.reference_mix={mix} cannot be done with LoRA: mixing the factors A and B of two adapters does "
            "not mix their products. Set trainer.reference_mix=1 (a reset), or model.lora.r=0 to train all weights."
        )


def make_reference(policy: torch.nn.Module) -> Reference:
    """Keep the policy's present weights as the reference: call it before any update and before loading a checkpoint."""
    return Reference(policy)
