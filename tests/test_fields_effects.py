"""Every supported field of TRL's configs has the effect that FIELD_MAP says; what is accepted or refused has none."""

from __future__ import annotations

import logging
import typing
from typing import Any

import pytest

from grpo_toolbox import GRPOConfig, RLOOConfig
from grpo_toolbox.api.translate import translate
from grpo_toolbox.config.fields import FIELD_MAP, default_of
from grpo_toolbox.errors import ConfigError

SERVER = {"use_vllm": True, "vllm_mode": "server"}
CALLBACK = {"callbacks.wandb.project": "theirs"}

# field -> its value, what is set beside it, and what keys of ours become
EFFECTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "output_dir": ("out", {}, {"run_dir": "out", "name": "out"}),
    "per_device_train_batch_size": (16, {}, {"rollout.prompts_per_step": 2}),
    "gradient_accumulation_steps": (3, {}, {"rollout.prompts_per_step": 3}),
    "num_train_epochs": (1.0, {}, {"trainer.max_steps": 100}),
    "max_steps": (7, {}, {"trainer.max_steps": 7}),
    "learning_rate": (2e-5, {}, {"trainer.lr": 2e-5}),
    "lr_scheduler_type": ("cosine", {}, {"trainer.schedule": "cosine"}),
    "lr_scheduler_kwargs": (
        {"min_lr_rate": 0.1},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"trainer.min_lr_ratio": 0.1},
    ),
    "warmup_steps": (5, {}, {"trainer.warmup_steps": 5}),
    "warmup_ratio": (0.1, {}, {"trainer.warmup_steps": 30}),
    "optim": ("adamw_8bit", {}, {"trainer.optimizer": "adamw_8bit"}),
    "weight_decay": (0.1, {}, {"trainer.weight_decay": 0.1}),
    "adam_beta1": (0.8, {}, {"trainer.adam_beta1": 0.8}),
    "adam_beta2": (0.95, {}, {"trainer.adam_beta2": 0.95}),
    "adam_epsilon": (1e-6, {}, {"trainer.adam_eps": 1e-6}),
    "max_grad_norm": (0.1, {}, {"trainer.max_grad_norm": 0.1}),
    "bf16": (True, {}, {"trainer.precision": "bfloat16"}),
    "activation_checkpointing": (False, {}, {"model.gradient_checkpointing": False}),
    "gradient_checkpointing": (False, {}, {"model.gradient_checkpointing": False}),
    "disable_tqdm": (True, {}, {"callbacks.display": None}),
    "report_to": ("wandb", {}, {"callbacks.wandb.project": "huggingface"}),
    "run_name": ("mine", {}, {"name": "mine"}),
    "project": ("theirs", {"report_to": ["wandb", "trackio"]}, {**CALLBACK, "callbacks.trackio.project": "theirs"}),
    "trackio_space_id": ("me/space", {"report_to": "trackio"}, {"callbacks.trackio.space_id": "me/space"}),
    "eval_strategy": ("epoch", {}, {"trainer.eval_every": 100}),
    "eval_steps": (20, {"eval_strategy": "steps"}, {"trainer.eval_every": 20}),
    "eval_on_start": (True, {}, {"trainer.eval_at_start": True}),
    "num_generations_eval": (2, {}, {"trainer.eval_completions": 2}),
    "save_strategy": ("epoch", {}, {"trainer.save_every": 100}),
    "save_steps": (50, {}, {"trainer.save_every": 50}),
    "save_total_limit": (3, {}, {"trainer.keep_checkpoints": 3}),
    "seed": (7, {}, {"trainer.seed": 7}),
    "use_cpu": (True, {}, {"trainer.device": "cpu"}),
    "model_init_kwargs": (
        {"dtype": "bfloat16", "attn_implementation": "eager", "device_map": "auto"},
        {},
        {"model.dtype": "bfloat16", "model.attn_implementation": "eager", "model.device_map": "auto"},
    ),
    "trust_remote_code": (True, {}, {"model.trust_remote_code": True}),
    "router_aux_loss_coef": (0.01, {}, {"model.router_aux_loss_coef": 0.01}),
    "cast_lm_head_to_fp32": (True, {}, {"model.fp32_head": True}),
    "num_generations": (4, {}, {"rollout.group_size": 4, "rollout.prompts_per_step": 2}),
    "max_completion_length": (64, {}, {"rollout.max_new_tokens": 64}),
    "shuffle_dataset": (False, {}, {"data.shuffle": False}),
    "generation_batch_size": (32, {}, {"rollout.steps_per_generation": 4}),
    "steps_per_generation": (2, {}, {"rollout.steps_per_generation": 2}),
    "temperature": (0.7, {}, {"rollout.temperature": 0.7}),
    "top_p": (0.9, {}, {"rollout.top_p": 0.9}),
    "top_k": (50, {}, {"rollout.top_k": 50}),
    "min_p": (0.1, {}, {"rollout.min_p": 0.1}),
    "generation_kwargs": ({"min_new_tokens": 2}, {}, {"rollout.min_new_tokens": 2}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}, {"data.chat_template_kwargs.enable_thinking": False}),
    "use_vllm": (True, {"vllm_mode": "server"}, {"rollout.engine": "vllm", "objective.correction": "sequence_mask"}),
    "vllm_mode": ("server", {"use_vllm": True}, {"rollout.engine": "vllm"}),
    "vllm_server_base_url": ("http://a:1", SERVER, {"rollout.server.urls": ["http://a:1"]}),
    "vllm_server_host": ("10.0.0.2", SERVER, {"rollout.server.urls": ["http://10.0.0.2:8000"]}),
    "vllm_server_port": (9000, SERVER, {"rollout.server.urls": ["http://127.0.0.1:9000"]}),
    "vllm_server_timeout": (9.0, SERVER, {"rollout.server.start_timeout_s": 9.0}),
    "beta": (0.2, {}, {"objective.beta": 0.2}),
    "num_iterations": (2, {"max_steps": 10}, {"trainer.ppo_epochs": 2, "trainer.max_steps": 5}),
    "epsilon": (0.1, {}, {"objective.clip_eps": 0.1}),
    "delta": (4.0, {}, {"objective.delta": 4.0}),
    "epsilon_high": (0.28, {}, {"objective.clip_eps_high": 0.28}),
    "sapo_temperature_neg": (2.0, {"loss_type": "sapo"}, {"objective.tau_neg": 2.0}),
    "sapo_temperature_pos": (2.0, {"loss_type": "sapo"}, {"objective.tau_pos": 2.0}),
    "vespo_k_pos": (1.0, {"loss_type": "vespo"}, {"objective.k_pos": 1.0}),
    "vespo_lambda_pos": (1.0, {"loss_type": "vespo"}, {"objective.lambda_pos": 1.0}),
    "vespo_k_neg": (1.0, {"loss_type": "vespo"}, {"objective.k_neg": 1.0}),
    "vespo_lambda_neg": (1.0, {"loss_type": "vespo"}, {"objective.lambda_neg": 1.0}),
    "importance_sampling_level": ("sequence", {}, {"objective.ratio_level": "sequence"}),
    "multi_objective_aggregation": ("normalize_then_sum", {}, {"advantage.name": "gdpo"}),
    "scale_rewards": ("batch", {}, {"advantage.name": "batch_normalized"}),
    "loss_type": ("cispo", {"epsilon_high": 5.0}, {"objective.name": "cispo", "objective.ratio_cap": 5.0}),
    "mask_truncated_completions": (True, {}, {"objective.mask_truncated": True}),
    "sync_ref_model": (True, {"beta": 0.1}, {"trainer.reference_every": 512}),
    "ref_model_mixup_alpha": (0.9, {}, {"trainer.reference_mix": 0.9}),
    "ref_model_sync_steps": (64, {"sync_ref_model": True, "beta": 0.1}, {"trainer.reference_every": 64}),
    "top_entropy_quantile": (0.2, {}, {"objective.top_entropy_quantile": 0.2}),
    "entropy_coef": (0.01, {}, {"objective.entropy_coef": 0.01}),
    "use_adaptive_entropy": (True, {}, {"objective.entropy_target": 0.2}),
    "entropy_target": (0.4, {"use_adaptive_entropy": True}, {"objective.entropy_target": 0.4}),
    "vllm_importance_sampling_correction": (False, SERVER, {"objective.correction": "none"}),
    "vllm_importance_sampling_mode": ("token_truncate", SERVER, {"objective.correction": "token_truncate"}),
    "vllm_importance_sampling_clip_max": (2.0, SERVER, {"objective.correction_max": 2.0}),
    "vllm_importance_sampling_clip_min": (0.5, SERVER, {"objective.correction_min": 0.5}),
    "vllm_importance_sampling_cap": (2.0, SERVER, {"objective.correction_max": 2.0}),
    "off_policy_mask_threshold": (0.5, {}, {"objective.off_policy_threshold": 0.5}),
    "use_bias_correction_kl": (False, {"beta": 0.1}, {"objective.kl_unbiased": False}),
    "log_completions": (True, {}, {"callbacks.sample_logger.every": 10}),
    "num_completions_to_print": (3, {"log_completions": True}, {"callbacks.sample_logger.prompts": 3}),
    "max_prompt_length": (256, {}, {"data.max_prompt_tokens": 256, "data.on_long": "drop"}),
    "normalize_advantages": (True, {}, {"advantage.normalize": True}),
    "reward_clip_range": ((-1.0, 2.0), {}, {"advantage.reward_min": -1.0, "advantage.reward_max": 2.0}),
}
ELSEWHERE = {
    *("reward_weights", "logging_strategy", "logging_steps", "logging_first_step", "push_to_hub", "hub_token"),
    *("hub_private_repo", "hub_model_id", "hub_revision", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
    "vllm_tensor_parallel_size",
}
"""The library's own business, or only where vLLM is installed: test_library.py and test_hub.py say what they do."""

OTHER_VALUES: dict[Any, Any] = {bool: True, int: 3, float: 0.5, str: "mine"}


def keys_of(fields: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """The keys of a run under these fields, flat."""
    made = (GRPOConfig if algorithm == "grpo" else RLOOConfig)(**fields)
    _, plain, _, _ = translate(made, model={"model.path": "builtin:tiny"}, rows=100, evaluates=True)
    return flat(plain)


def flat(plain: Any, name: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    if not isinstance(plain, dict) or not plain:
        return {name: plain}
    return {
        key: value for part, inner in plain.items() for key, value in flat(inner, f"{name}.{part}".strip(".")).items()
    }


def test_every_supported_field_is_tried() -> None:
    supported = {name for name, one in FIELD_MAP.items() if one.status == "supported"}
    assert supported == {*EFFECTS, *ELSEWHERE}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_supported_field_sets_its_keys(name: str) -> None:
    value, beside, expected = EFFECTS[name]
    algorithm = FIELD_MAP[name].algorithms[0]
    before, after = keys_of(beside, algorithm), keys_of(beside | {name: value}, algorithm)
    assert {key: after.get(key, "none") for key in expected} == expected
    changed = {key for key in {*before, *after} if before.get(key, "none") != after.get(key, "none")}
    assert changed >= set(expected)
    ours = {key for key in FIELD_MAP[name].keys if key != "reward.components"}
    assert any(one.startswith(key) or key.startswith(one) for key in ours for one in changed)


@pytest.mark.parametrize("name", [name for name, one in FIELD_MAP.items() if one.status == "accepted"])
def test_an_accepted_field_changes_nothing_and_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    one = FIELD_MAP[name]
    algorithm = one.algorithms[0]
    with caplog.at_level(logging.WARNING):
        assert keys_of({name: _other(name)}, algorithm) == keys_of({}, algorithm)
    assert f"{name}=" in caplog.text
    assert one.note in caplog.text


@pytest.mark.parametrize("name", [name for name, one in FIELD_MAP.items() if one.status == "refused"])
def test_a_refused_field_names_what_to_use(name: str) -> None:
    one = FIELD_MAP[name]
    with pytest.raises(ConfigError) as raised:
        (GRPOConfig if "grpo" in one.algorithms else RLOOConfig)(**{name: _other(name)})
    assert f"What to use: {one.note}" in str(raised.value)


def _other(name: str) -> Any:
    """Return a value of the field's kind that is not TRL's default."""
    one = FIELD_MAP[name]
    default = default_of(one, one.algorithms[0])
    if isinstance(default, bool):
        return not default
    for kind in typing.get_args(one.kind) or (one.kind,):
        if kind in OTHER_VALUES:
            return OTHER_VALUES[kind] if OTHER_VALUES[kind] != default else default + 1
        if typing.get_origin(kind) in (dict, list):
            return {"some": 1} if typing.get_origin(kind) is dict else ["some"]
    return "mine"
