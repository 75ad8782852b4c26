"""What programs may rely on: names and signatures. What changes here goes into the changelog."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import grpo_toolbox
from grpo_toolbox import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, rewards
from grpo_toolbox.config.fields import fields_of

MADE_OF = (
    "model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, processing_class=None, "
    "reward_processing_classes=None, callbacks=None, optimizers=(None, None), quantization_config=None, "
    "peft_config=None"
)
GRPO_ONLY = ", tools=None, rollout_func=None, environment_factory=None"
METHODS = {
    "add_callback": "self, callback",
    "end": "self",
    "create_model_card": "self, model_name=None, dataset_name=None, tags=None",
    "evaluate": "self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval'",
    "is_local_process_zero": "self",
    "is_world_process_zero": "self",
    "log": "self, logs, start_time=None",
    "log_metrics": "self, split, metrics",
    "pop_callback": "self, callback",
    "push_to_hub": (
        "self, commit_message='End of training', blocking=True, token=None, revision=None, private=None, **kwargs"
    ),
    "remove_callback": "self, callback",
    "save_metrics": "self, split, metrics, combined=True",
    "save_model": "self, output_dir=None, *, merged=False",
    "save_state": "self",
    "train": "self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
}
ATTRIBUTES = {
    *("accelerator", "config_class", "control", "is_in_train", "model", "optimizer", "ref_model", "run_dir", "state"),
}
REWARDS = {
    "accuracy_reward": "completions, solution, log_extra=None, **kwargs",
    "get_cosine_scaled_reward": (
        "max_len, min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0"
    ),
    "get_repetition_penalty_reward": "ngram_size=3, max_penalty=-1.0",
    "get_soft_overlong_punishment": "max_completion_len, soft_punish_cache",
    "reasoning_accuracy_reward": "completions, solution, reasoning_delimiters=None, log_extra=None, **kwargs",
    "think_format_reward": "completions, prompts=None, **kwargs",
}


def signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(bare))[1:-1]


def test_the_package_exports() -> None:
    assert grpo_toolbox.__all__ == ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "__version__"]
    assert all(getattr(grpo_toolbox, name) is not None for name in grpo_toolbox.__all__)
    with pytest.raises(AttributeError, match="SFTTrainer"):
        _ = grpo_toolbox.SFTTrainer


def test_trainers_are_made_of() -> None:
    assert signature(GRPOTrainer.__init__) == f"self, {MADE_OF}{GRPO_ONLY}"
    assert signature(RLOOTrainer.__init__) == f"self, {MADE_OF}"


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_trainers_have(trainer: type) -> None:
    public = {name for name in dir(trainer) if not name.startswith("_")}
    assert public == {*METHODS, *ATTRIBUTES}
    assert {name: signature(getattr(trainer, name)) for name in METHODS} == METHODS


@pytest.mark.parametrize(("made", "algorithm"), [(GRPOConfig, "grpo"), (RLOOConfig, "rloo")])
def test_configs_have_trls_fields_and_overrides(made: Any, algorithm: str) -> None:
    assert [*inspect.signature(made.__init__).parameters][1:] == [*fields_of(algorithm), "overrides"]


def test_rewards_are_called() -> None:
    assert {name: signature(getattr(rewards, name)) for name in REWARDS} == REWARDS
    assert set(REWARDS) <= set(rewards.__all__)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainers_take_what_trls_take() -> None:
    """By name and in order, so that arguments by position arrive, too; RLOO's reward_funcs has no default there."""
    trl = pytest.importorskip("trl")
    assert signature(trl.GRPOTrainer.__init__) == f"self, {MADE_OF}{GRPO_ONLY}"
    assert signature(trl.RLOOTrainer.__init__).replace("reward_funcs,", "reward_funcs=None,") == f"self, {MADE_OF}"
    for name in (
        "train",
        "evaluate",
        "log",
        "log_metrics",
        "save_metrics",
        "add_callback",
        "push_to_hub",
        "create_model_card",
    ):
        assert signature(getattr(trl.GRPOTrainer, name)) == METHODS[name], name
