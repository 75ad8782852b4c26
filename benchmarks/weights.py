"""The model that is measured, and the small first calls that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def ready_model(path: str, scratch: Path) -> str:
    """Return a folder with weights: `path`, or, where only config and tokenizer lie in it, a copy with random ones.

    Speed does not depend on the weights, since lengths are forced; so a machine without the checkpoint can measure.
    """
    from grpo_toolbox.models.paths import resolve_model_path

    folder = Path(resolve_model_path(path))
    if any(folder.glob("*.safetensors")):
        return str(folder)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    made = scratch / "random-weights"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().save_pretrained(made)
    AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    return str(made)


def plain_model(path: str, device: str) -> tuple[Any, Any]:
    """Load model and tokenizer as any user of transformers does, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    return model, AutoTokenizer.from_pretrained(path)


def warm_up(model: Any, device: str) -> None:
    """Generate two tokens and take one gradient on 2 × 8 tokens: threads and libraries are then up on either side."""
    import torch

    ids = torch.arange(16, device=device).reshape(2, 8) + 100
    with torch.no_grad():
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2, do_sample=True
        )
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


def warm_optimizer(optimizer: Any) -> None:
    """Let AdamW make its moments by a step of length zero: what is measured is then like every later step.

    Without it the first step would hold them at its end only, and its peak memory would be no other step's.
    """
    import torch

    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
