"""The adaptive entropy bonus follows TRL's controller, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_toolbox.controllers import EntropyControl

pytest.importorskip("trl")

from same_tensors import MASK, NOW, ROWS, WHOLE
from trl_side import loss_on_log_probs, save_reference, trl_trainer


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adaptive_entropy_is_trls(tmp_path: Path):
    trainer = trl_trainer(
        save_reference(tmp_path / "reference"),
        per_device_train_batch_size=ROWS,
        use_adaptive_entropy=True,
        entropy_target=1.5,
        entropy_coef_delta=0.1,
        entropy_coef_max=0.25,
    )
    control = EntropyControl(target=1.5, delta=0.1, highest=0.25)
    applied = []
    for measured in (1.0, 1.5, 1.2, 1.4, 2.0, 1.6, 1.7, 1.8, 1.0, 1.0):  # at, below and above the target, to both ends
        entropy = torch.full_like(NOW, measured, requires_grad=True)
        columns = {"advantages": torch.zeros(ROWS, dtype=torch.float64)}
        loss = loss_on_log_probs(trainer, NOW.clone().requires_grad_(), entropy, MASK, columns, WHOLE)
        (gradient,) = torch.autograd.grad(loss, entropy)
        applied.append(-gradient.sum().item())
        assert control.coef == pytest.approx(applied[-1], abs=1e-12)
        control.observe(measured)
        assert control.value == pytest.approx(trainer.entropy_coef, abs=1e-12)
    assert applied == pytest.approx([0, 0.1, 0.2, 0.25, 0.25, 0, 0, 0, 0, 0.1])
