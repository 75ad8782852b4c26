"""What TRL makes of each of our keys: four tables, torch-free.

A key is a field of TRL's (alone by FIELD_MAP, or by a rule of `trl_config.py`: JOINT, PLAIN), done by the toolbox
around TRL's trainer (OURS), without effect there (IDLE), or refused (REFUSED, ONLY_GRPO, FOREIGN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS: Mapping[str, str] = {
    "name": "the run folder",
    "run_dir": "the run folder",
    "resume": "the run folder",
    "data": "prompts are read, encoded and ordered as ever; TRL sees their token ids",
    "reward": "the reward itself scores TRL's completions, held-out verifier and error budget included",
    "callbacks": "they see TRL's steps",
    "model.path": "the model is loaded and handed over",
    "model.loader": "the model is loaded and handed over",
    "model.load_in_4bit": "the model is loaded and handed over",
    "model.dtype": "the model is loaded and handed over",
    "model.attn_implementation": "the model is loaded and handed over",
    "model.device_map": "the model is loaded and handed over",
    "model.lora": "the adapter is added before the model is handed over",
    "trainer.name": "chooses the backend",
    "trainer.algorithm": "chooses TRL's trainer",
    "trainer.stages": "each stage is a run of its own",
    "trainer.optimizer": "the optimizer and its schedule are handed over",
    "trainer.schedule": "the optimizer and its schedule are handed over",
    "trainer.warmup_steps": "the optimizer and its schedule are handed over",
    "trainer.min_lr_ratio": "the optimizer and its schedule are handed over",
    "trainer.reference_every": "TRL's reference is refreshed between steps",
    "trainer.reference_resets_optimizer": "TRL's reference is refreshed between steps",
    "trainer.eval_every": "evaluations are the toolbox's",
    "trainer.eval_at_start": "evaluations are the toolbox's",
    "trainer.eval_completions": "evaluations are the toolbox's",
    "trainer.eval_temperature": "evaluations are the toolbox's",
    "trainer.best_metric": "checkpoints are the toolbox's",
    "trainer.best_is": "checkpoints are the toolbox's",
    "trainer.save_every": "checkpoints are the toolbox's",
    "trainer.keep_checkpoints": "checkpoints are the toolbox's",
    "trainer.resume": "checkpoints are the toolbox's",
    "trainer.load_optimizer": "checkpoints are the toolbox's",
}
"""Keys, or groups of keys, that the toolbox acts on itself, and how."""

JOINT: Mapping[str, str] = {
    "rollout.prompts_per_step": "per_device_train_batch_size × gradient_accumulation_steps",
    "rollout.steps_per_generation": "steps_per_generation",
    "rollout.min_new_tokens": "generation_kwargs",
    "rollout.engine": "use_vllm, vllm_mode=server; local and hf are transformers' generate",
    "rollout.server.urls": "vllm_server_base_url",
    "rollout.vllm.mode": "vllm_mode",
    "rollout.vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.vllm.max_model_len": "vllm_max_model_length",
    "rollout.vllm.sleep": "vllm_enable_sleep_mode",
    "rollout.server.start_timeout_s": "vllm_server_timeout",
    "trainer.max_steps": "max_steps",
    "trainer.micro_batch_tokens": "per_device_train_batch_size",
    "trainer.precision": "bf16",
    "trainer.device": "use_cpu",
    "advantage.name": "scale_rewards, multi_objective_aggregation",
    "advantage.std": "scale_rewards: TRL's is the sample's",
    "advantage.eps": "scale_rewards: TRL's is 1e-4",
    "advantage.std_of": "scale_rewards: TRL's is of the rewards",
    "advantage.reward_min": "reward_clip_range",
    "advantage.reward_max": "reward_clip_range",
    "advantage.normalize": "normalize_advantages",
    "objective.name": "loss_type",
    "objective.loss_agg": "loss_type",
    "objective.length": "loss_type: TRL's is max_completion_length",
    "objective.ratio_level": "importance_sampling_level",
    "objective.kl": "beta: k3 in GRPO's loss, k1 in RLOO's reward",
    "objective.kl_in": "beta: GRPO's loss, RLOO's reward",
    "objective.clip_eps_high": "epsilon_high",
    "objective.ratio_cap": "epsilon_high",
    "objective.correction": "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
    "objective.correction_min": "vllm_importance_sampling_clip_min",
    "objective.correction_max": "vllm_importance_sampling_clip_max",
    "objective.entropy_target": "use_adaptive_entropy, entropy_target",
}
"""Keys that a rule below turns into fields of TRL's."""

PLAIN = (
    *("epsilon", "delta", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""Fields of surrogates that take our option's value as it is."""

IDLE: Mapping[str, str] = {
    "critic": "only advantage=gae has a critic",
    "rollout.vllm.python": "it is for toolbox serve",
    "rollout.vllm.extra_args": "it is for toolbox serve",
    "rollout.sync": "TRL brings the weights to vLLM itself",
    "rollout.probe": "TRL brings the weights to vLLM itself",
    "rollout.async.max_staleness": "it belongs to rollout.async.enabled",
    "rollout.async.in_flight": "it belongs to rollout.async.enabled",
    "rollout.async.on_stale": "it belongs to rollout.async.enabled",
    "rollout.server.outage_timeout_s": "TRL does not wait for a server that has gone",
    "rollout.server.request_timeout_s": "TRL waits for a completion as long as it takes",
    "rollout.server.retries": "TRL asks five times",
    "rollout.quantize": "TRL samples with the weights as they are",
    "rollout.cuda_graphs": "TRL samples with generate",
    "rollout.max_rows": "TRL decodes all rows at once",
    "rollout.max_oversampling": "it belongs to rollout.dynamic_sampling",
    "rollout.max_empty_steps": "it belongs to rollout.dynamic_sampling",
    "rollout.reuse_logps": "TRL computes the log-probs of π_old itself",
    "trainer.packing": "TRL pads",
    "trainer.recompute_mlp": "it belongs to trainer.packing",
    "trainer.skip_zero_advantage": "TRL trains every row",
    "trainer.recompute_old_logps": "TRL takes those of the first pass, too",
    "objective.kl_horizon": "it belongs to objective.kl_target",
    "objective.clip_cov_min": "it belongs to objective.clip_cov",
    "objective.clip_cov_max": "it belongs to objective.clip_cov",
    "objective.kl_cov_coef": "it belongs to objective.kl_cov",
}
"""Keys, or groups of keys, that change nothing on TRL, and why."""

REFUSED: Mapping[str, tuple[Any, str]] = {
    "rollout.dynamic_sampling": (False, "TRL samples every prompt once"),
    "rollout.async.enabled": (False, "TRL samples and trains by turns"),
    "trainer.eval_loss": (False, "the loss is TRL's own, and evaluations are the toolbox's"),
    "rollout.server.model": (None, "TRL takes the one model that the server has"),
    "rollout.server.api_key_env": (None, "TRL sends no key"),
    "objective.kl_target": (None, "TRL's beta does not move"),
    "objective.clip_cov": (0.0, "TRL does not choose tokens by covariance"),
    "objective.kl_cov": (0.0, "TRL does not choose tokens by covariance"),
}
"""Keys that TRL has nothing for: the one value that they may have, and what TRL does instead."""

ONLY_GRPO: Mapping[str, Any] = {
    "model.fp32_head": False,
    "objective.top_entropy_quantile": 1.0,
    "objective.entropy_coef": 0.0,
    "objective.entropy_target": None,
    "objective.off_policy_threshold": None,
    "objective.kl_unbiased": False,
    "objective.delta": None,
}
"""Keys that TRL's GRPO has and its RLOO has not, with the value that they may have there."""

FOREIGN = ("gamma", "lam", "whiten", "divergence", "max_divergence")
"""Options of advantages and surrogates whose name TRL has not, so that it is refused before they are read."""

LOSSES: Mapping[str, Mapping[str, str]] = {
    "clipped": {
        "seq_mean_token_mean": "grpo",
        "token_mean": "dapo",
        "constant": "dr_grpo",
        "seq_mean_token_sum": "luspo",
    },
    "cispo": {"token_mean": "cispo"},
    "sapo": {"seq_mean_token_mean": "sapo"},
    "vespo": {"token_mean": "vespo"},
}
"""objective.name -> objective.loss_agg -> TRL's loss_type."""

SCALES: Mapping[str, Mapping[str, Any]] = {
    "group_relative": {"scale_rewards": "group"},
    "batch_normalized": {"scale_rewards": "batch"},
    "dr_grpo": {"scale_rewards": "none"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}
"""advantage.name -> TRL's fields."""
