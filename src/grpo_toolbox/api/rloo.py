"""RLOOTrainer: the same trainer by another config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_toolbox.api.configs import RLOOConfig
from grpo_toolbox.api.trainer import GRPOTrainer


class RLOOTrainer(GRPOTrainer):
    """Trains a model by RLOO (Ahmadian et al., 2024), with TRL's arguments: each completion against the others' mean.

    As `GRPOTrainer`, with an `RLOOConfig`: the KL is in the reward, the ratio that of whole completions.
    """

    config_class: Any = RLOOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )
