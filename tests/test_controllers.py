"""Coefficients that follow a measurement, and the reference that follows the policy: by hand, and through a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import refused
from grpo_toolbox.controllers import EntropyControl, KlControl
from grpo_toolbox.models.load import Reference
from toolbox_runs import SMALL, all_metrics, built_run, differences, metrics, one_thread, state, toolbox_train

PAID = (*SMALL, "reward=custom", "reward.name=plugs:digits", "trainer.lr=0.01")

# ---- by hand


def test_the_entropy_coefficient_by_hand() -> None:
    """Up by δ at or below the target, down above it, inside its bounds; it counts only while entropy is low."""
    control = EntropyControl(target=1.0, delta=0.1, highest=0.25)
    seen = [control.coef]
    for entropy in (0.9, 1.0, 0.5, 1.1, 0.8, 2.0, 2.0, 2.0):
        control.observe(entropy)
        seen.append(control.coef)
    # values: .1 .2 .25(max) .15 .25 .15 .05 0(min); those after an entropy above the target do not count
    assert seen == pytest.approx([0, 0.1, 0.2, 0.25, 0, 0.25, 0, 0, 0])
    assert control.value == 0


def test_the_kl_coefficient_by_hand() -> None:
    """β·(1 + clip(KL/target − 1, ±0.2)·n/horizon), Ziegler et al. (2019), with 50 of 1000 completions a step."""
    control = KlControl(target=0.1, horizon=1000, beta=0.5)
    control.observe(0.11, 50)  # +10 % -> 1 + 0.1·0.05
    assert control.beta == pytest.approx(0.5 * 1.005)
    control.observe(9.0, 50)  # +20 % at most -> 1 + 0.2·0.05
    assert control.beta == pytest.approx(0.5 * 1.005 * 1.01)
    control.observe(0.0, 100)  # −20 % at most -> 1 − 0.2·0.1
    assert control.beta == pytest.approx(0.5 * 1.005 * 1.01 * 0.98)
    control.observe(0.1, 100)
    assert control.beta == pytest.approx(0.5 * 1.005 * 1.01 * 0.98)
    control = KlControl(target=0.1, horizon=10, beta=0.5)
    control.observe(0.0, 1000)  # a hundred horizons at once count as one: 1 − .2·100 would turn the sign of the KL
    assert control.beta == pytest.approx(0.5 * 0.8)


@pytest.mark.parametrize(
    ("used", "fresh"),
    [
        (EntropyControl(target=1.0, value=0.3, below=True), EntropyControl(target=1.0)),
        (KlControl(target=1.0, horizon=10, beta=0.7), KlControl(target=1.0, horizon=10, beta=0.1)),
    ],
)
def test_a_controller_goes_on_from_its_state(used: Any, fresh: Any) -> None:
    fresh.load_state_dict(used.state_dict())
    assert dataclasses.asdict(fresh) == dataclasses.asdict(used)


# ---- in a run

CONTROLLED = {
    "entropy": ("objective=ppo_clip", "objective.entropy_target=9"),
    "kl": ("objective=grpo", "objective.kl_target=0.001", "objective.kl_horizon=100"),
    "kl in the reward": (
        *("objective=ppo_clip", "objective.beta=0.1", "objective.kl=k1", "objective.kl_in=reward"),
        *("objective.kl_target=0.001", "objective.kl_horizon=100"),
    ),
}


def test_the_entropy_coefficient_of_a_run_is_that_of_its_entropies(tmp_path: Path) -> None:
    """A target that no policy of 17 characters reaches: 0.005 more each step, from the second on."""
    given = (*PAID, *CONTROLLED["entropy"], "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*given) == 0
    used = [line["entropy_coef"] for line in all_metrics(tmp_path / "run")]
    assert used == pytest.approx([0, 0.005, 0.01, 0.015])


@pytest.mark.parametrize("name", ["kl", "kl in the reward"])
def test_the_kl_coefficient_of_a_run_is_that_of_its_kls(name: str, tmp_path: Path) -> None:
    given = (*PAID, *CONTROLLED[name], "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}")
    assert toolbox_train(*given) == 0
    lines = all_metrics(tmp_path / "run")
    control = KlControl(target=0.001, horizon=100, beta=lines[0]["beta"])
    for line in lines:
        assert line["beta"] == pytest.approx(control.beta)
        control.observe(line["kl"], 16)
    assert control.beta != lines[0]["beta"]


REFRESHED = {
    "mixed reference": ("objective=grpo", "trainer.reference_every=2", "trainer.reference_mix=0.6"),
    "reset adapter": ("objective=grpo", "trainer.reference_every=2", "model.lora.r=2"),
}
KEPT = CONTROLLED | REFRESHED


@pytest.mark.parametrize("given", KEPT.values(), ids=KEPT)
def test_three_and_two_steps_are_five(given: tuple[str, ...], tmp_path: Path) -> None:
    """The coefficients and the refreshed reference are in the checkpoint."""
    with one_thread():
        assert toolbox_train(*PAID, *given, "trainer.max_steps=5", f"run_dir={tmp_path / 'five'}") == 0
        assert toolbox_train(*PAID, *given, "trainer.max_steps=3", f"run_dir={tmp_path / 'three'}") == 0
        assert toolbox_train(f"resume={tmp_path / 'three'}", "trainer.max_steps=5") == 0
    assert metrics(tmp_path / "three") == metrics(tmp_path / "five")
    assert differences(state(tmp_path / "three"), state(tmp_path / "five")) == []


@pytest.mark.parametrize("given", ["objective.entropy_target=9", "trainer.reference_every=1"])
def test_a_control_may_be_switched_on_with_a_resume(given: str, tmp_path: Path) -> None:
    assert toolbox_train(*PAID, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}") == 0
    assert toolbox_train(f"resume={tmp_path / 'run'}", "trainer.max_steps=3", given) == 0
    assert len(all_metrics(tmp_path / "run")) == 3


# ---- the reference


def test_a_refresh_mixes_the_weights() -> None:
    """TR-DPO: π_ref ← α·π + (1 − α)·π_ref; 0.6·5 + 0.4·1 = 3.4, then 0.6·5 + 0.4·3.4 = 4.36."""
    policy = nn.Linear(2, 1)
    nn.init.constant_(policy.weight, 1.0)
    reference = Reference(policy)
    nn.init.constant_(policy.weight, 5.0)
    for expected in (3.4, 4.36):
        reference.refresh(policy, 0.6)
        assert reference.state_dict()["weight"].tolist() == [[pytest.approx(expected)] * 2]
    reference.refresh(policy, 1.0)
    assert torch.equal(reference.state_dict()["weight"], policy.weight)
    assert policy.weight.requires_grad
    assert not any(value.requires_grad for value in reference._net.parameters())


@pytest.mark.parametrize("rank", [0, 2])
def test_after_a_hard_reset_the_kl_starts_at_zero_again(rank: int, tmp_path: Path) -> None:
    """Every two steps: the KL of steps 1, 3 and 5 is 0, that of the others is not."""
    given = (*PAID, "objective=grpo", "trainer.reference_every=2", "trainer.max_steps=6", f"model.lora.r={rank}")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    kls = [line["kl"] for line in all_metrics(tmp_path / "run")]
    assert kls[::2] == pytest.approx([0, 0, 0], abs=1e-9)
    assert all(kl > 1e-6 for kl in kls[1::2])


@pytest.mark.parametrize("rank", [0, 2])
def test_with_a_hard_reset_the_optimizer_starts_anew(rank: int, tmp_path: Path) -> None:
    """Reset after step 2: the moments of steps 1 and 2 are gone, as they are when step 2 is resumed without them."""
    given = (*PAID, "objective=grpo", "trainer.reference_every=2", f"model.lora.r={rank}")
    resets = (*given, "trainer.reference_resets_optimizer=true")
    with one_thread():
        assert toolbox_train(*resets, "trainer.max_steps=3", f"run_dir={tmp_path / 'reset'}") == 0
        assert toolbox_train(*resets, "trainer.max_steps=2", f"run_dir={tmp_path / 'two'}") == 0
        assert state(tmp_path / "two")["optimizer"]["state"] == {}
        assert toolbox_train(f"resume={tmp_path / 'two'}", "trainer.max_steps=3") == 0
        assert toolbox_train(*given, "trainer.max_steps=2", f"run_dir={tmp_path / 'kept'}") == 0
        again = (f"resume={tmp_path / 'kept'}", "trainer.max_steps=3", "trainer.load_optimizer=false")
        assert toolbox_train(*again) == 0
    reset, resumed, kept = (state(tmp_path / name) for name in ("reset", "two", "kept"))
    assert differences(reset, resumed) == []
    assert differences(reset["parameters"], kept["parameters"]) == []
    assert all(one["step"] == 1 for one in reset["optimizer"]["state"].values())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_resume_without_refreshes_keeps_the_reference_as_it_is(rank: int, tmp_path: Path) -> None:
    """Reset after step 2; from there on it stays, through two resumes: the KL of step 3 is 0, and step 5's is not."""
    given = (*PAID, "objective=grpo", f"model.lora.r={rank}", f"run_dir={tmp_path / 'run'}")
    again = (f"resume={tmp_path / 'run'}", "trainer.reference_every=0")
    assert toolbox_train(*given, "trainer.reference_every=2", "trainer.max_steps=2") == 0
    for last in (3, 5):
        assert toolbox_train(*again, f"trainer.max_steps={last}") == 0
    kls = [line["kl"] for line in all_metrics(tmp_path / "run")]
    assert kls[2] == pytest.approx(0, abs=1e-9)
    assert kls[4] > 1e-6


def test_with_lora_a_mix_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_toolbox.config.build.load_model", None)
    message = refused("trainer.reference_every=5", "trainer.reference_mix=0.6", "model.lora.r=2", "callbacks=none")
    assert "trainer.reference_mix=0.6 cannot be done with LoRA" in message
    assert "Set trainer.reference_mix=1" in message
    assert [*tmp_path.glob("runs/*")] == []


@pytest.mark.parametrize("mix", ["0", "-1", "1.5", "nan"])
def test_a_mix_outside_its_range_is_refused(mix: str) -> None:
    assert "must be in (0, 1]" in refused("trainer.reference_every=5", f"trainer.reference_mix={mix}")


def test_without_a_kl_a_refresh_has_nothing_to_do(tmp_path: Path) -> None:
    given = ("objective=ppo_clip", "trainer.reference_every=1", "trainer.reference_mix=0.6", "model.lora.r=2")
    assert built_run(*PAID, *given, f"run_dir={tmp_path / 'run'}").reference is None
