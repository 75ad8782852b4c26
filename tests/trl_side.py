"""TRL's side of the parity tests: real trainers whose own code scores given completions and computes its loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import torch
from torch import Tensor

from grpo_toolbox.models.tiny import build_tiny

huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # a trainer announces itself when it is built

from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer  # noqa: E402

GROUP_SIZE = 4
MAX_TOKENS = 7
_KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "gmpo": (GMPOTrainer, GMPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def save_reference(folder: Path) -> Path:
    """Save the model that the trainers load as their reference: the tiny one, with other weights than the policy's."""
    build_tiny(seed=1)[0].save_pretrained(folder)
    return folder


def trl_trainer(
    reference: Path,
    kind: str = "grpo",
    *,
    rewards: Sequence[Any] = (),
    completions: Sequence[Sequence[int]] = (),
    sampler_logps: Sequence[Sequence[float]] | None = None,
    micro_batches: int = 1,
    prompts: Sequence[str] = ("1+2=", "10+20="),
    **options: Any,
) -> Any:
    """Build one of TRL's trainers on the tiny policy; its sampler hands out `completions`, everything else is TRL's.

    `sampler_logps` stand for those of vLLM, which is not there: they switch on what TRL does with them.
    """
    trainer_class, config_class = _KINDS[kind]
    model, tokenizer = build_tiny(seed=0)
    model.config._name_or_path = str(reference)

    def sampled(*_: Any, **__: Any) -> Any:
        ids = [list(row) for row in completions]
        return ids if kind == "rloo" else (ids, sampler_logps)

    given = type("Given", (trainer_class,), {"_generate_single_turn": sampled})
    settings = {
        "output_dir": str(reference.parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 1,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": GROUP_SIZE,
        "gradient_accumulation_steps": micro_batches,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_TOKENS,
    }
    trainer = given(
        model=model,
        reward_funcs=list(rewards) or [lambda completions, **_: [0.0] * len(completions)],
        args=config_class(**(settings | options)),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = micro_batches  # set by the loop that is not run here
    trainer.use_vllm = sampler_logps is not None
    trainer.model.train()
    return trainer


def loss_on_log_probs(
    trainer: Any,
    logps: Tensor,
    entropy: Tensor,
    mask: Tensor,
    columns: dict[str, Tensor],
    parts: Sequence[Sequence[int]],
) -> Tensor:
    """Add up the trainer's loss on these log-probs and entropies (B, T) over micro-batches; differentiable in both.

    The model is a function that returns them: `_compute_loss` is TRL's own, in whatever precision the columns have.
    """
    losses = []
    trained = mask & columns["tool_mask"].bool() if "tool_mask" in columns else mask
    for part in parts:
        rows = list(part)
        inputs = {
            "prompt_ids": torch.full((len(rows), 1), 5),
            "prompt_mask": torch.ones(len(rows), 1, dtype=torch.long),
            "completion_ids": torch.full((len(rows), mask.shape[1]), 5),
            "completion_mask": mask[rows].long(),
            "num_items_in_batch": trained.sum().to(logps.dtype),
            **{name: column[rows] for name, column in columns.items()},
        }
        outputs = SimpleNamespace(log_probs=logps[rows], entropy=entropy[rows], aux_loss=None)
        losses.append(trainer._compute_loss(lambda outputs=outputs, **_: outputs, inputs))
    return torch.stack(losses).sum()


def scored(trainer: Any, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Return what the trainer makes of its completions, one prompt a row: masks, advantages, log-probs, ratios."""
    return trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])


def losses_of(trainer: Any, batch: dict[str, Tensor], parts: Sequence[Sequence[int]]) -> float:
    """Add up the trainer's loss over micro-batches and leave the gradient in its model."""
    total = 0.0
    for part in parts:
        rows = list(part)
        inputs = {name: column if column.ndim == 0 else column[rows] for name, column in batch.items()}
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return total
