"""FIELD_MAP's second part: the fields that are TRL's own."""

from __future__ import annotations

from grpo_toolbox.config.field import Field, accepted, direct, joint, refused
from grpo_toolbox.config.fields_training import Number, Options, Text

GRPO = ("grpo",)
RLOO = ("rloo",)
NO_PADDING = "nothing is padded"
BATCHES_CONTINUOUSLY = "the engine in this process decodes so by itself"
TOOLS_LATER = "nothing yet: tools and environments come later"
PICTURES_LATER = "pictures come later"
SERVER = "how weights travel is the engine's own business"
COLOCATED = "colocated; a server is told where it is started"


def _zero(value: float | None) -> float:
    return value or 0.0


RL_FIELDS: tuple[Field, ...] = (
    joint(
        "model_init_kwargs",
        Options,
        None,
        "model.dtype model.attn_implementation model.device_map model.load_in_4bit",
        "dtype (or torch_dtype), attn_implementation, device_map, trust_remote_code, quantization_config (4 bits); for "
        "anything else load the model yourself and pass it",
    ),
    direct("trust_remote_code", bool, False, "model.trust_remote_code"),
    direct("router_aux_loss_coef", Number, None, "model.router_aux_loss_coef"),
    accepted(
        "disable_dropout",
        bool,
        False,
        "dropout is always off, but for an adapter's: rollouts are sampled without, and trained as sampled",
    ),
    direct("cast_lm_head_to_fp32", bool, False, "model.fp32_head", algorithms=GRPO),
    direct("num_generations", int, 8, "rollout.group_size", rloo_default=2),
    joint("num_generations_eval", int | None, None, "trainer.eval_completions", "None: num_generations"),
    direct("max_completion_length", int | None, 512, "rollout.max_new_tokens"),
    accepted("ds3_gather_for_generation", bool, True, "there is no ZeRO-3"),
    direct("shuffle_dataset", bool | None, True, "data.shuffle", ours=lambda on: on is not False),
    accepted("pad_to_multiple_of", int | str | None, "auto", NO_PADDING),
    joint("generation_batch_size", int | None, None, "rollout.steps_per_generation", "completions of one generation"),
    joint(
        "steps_per_generation",
        int | None,
        None,
        "rollout.steps_per_generation",
        "counted in micro-batches; ours in optimizer steps, so it must be a multiple of gradient_accumulation_steps",
    ),
    direct("temperature", float, 1.0, "rollout.temperature"),
    direct("top_p", float, 1.0, "rollout.top_p"),
    direct("top_k", int | None, 0, "rollout.top_k", ours=lambda k: k or 0),
    direct("min_p", Number, None, "rollout.min_p", ours=_zero, theirs=lambda p: p or None),
    joint(
        "generation_kwargs",
        Options,
        None,
        "rollout.min_new_tokens",
        "min_new_tokens, max_new_tokens, temperature, top_p, top_k, min_p",
    ),
    direct("chat_template_kwargs", Options, None, "data.chat_template_kwargs"),
    refused(
        "repetition_penalty",
        float,
        1.0,
        "get_repetition_penalty_reward: tokens drawn with a penalty are not the policy's own",
    ),
    accepted("cache_implementation", Text, None, "the engine has a cache of its own"),
    joint("use_vllm", bool, False, "rollout.engine", "with vllm_mode"),
    joint(
        "vllm_mode",
        str,
        "colocate",
        "rollout.engine rollout.vllm.mode",
        "colocated without vLLM in this environment: local, which samples in this process",
    ),
    accepted("vllm_model_impl", str, "vllm", "vLLM chooses its own implementation of a model, or transformers'"),
    joint("vllm_enable_sleep_mode", bool, False, "rollout.vllm.sleep", COLOCATED),
    refused(
        "vllm_structured_outputs_regex",
        Text,
        None,
        "a format reward: tokens drawn under a constraint are not the policy's own",
    ),
    joint("vllm_server_base_url", Text, None, "rollout.server.urls"),
    joint("vllm_server_host", str, "0.0.0.0", "rollout.server.urls"),
    joint("vllm_server_port", int, 8000, "rollout.server.urls"),
    joint("vllm_server_timeout", float, 240.0, "rollout.server.start_timeout_s"),
    accepted("vllm_group_port", int, 51216, SERVER),
    joint("vllm_gpu_memory_utilization", float, 0.3, "rollout.vllm.gpu_memory_utilization", COLOCATED),
    joint("vllm_max_model_length", int | None, None, "rollout.vllm.max_model_len", COLOCATED),
    joint("vllm_tensor_parallel_size", int, 1, "rollout.vllm.tensor_parallel_size", COLOCATED),
    direct("beta", float, 0.0, "objective.beta", "GRPO's in the loss, RLOO's in the reward", rloo_default=0.05),
    direct("num_iterations", int, 1, "trainer.ppo_epochs"),
    joint("epsilon", float, 0.2, "objective.clip_eps"),
    joint("delta", Number, None, "objective.delta", algorithms=GRPO),
    joint(
        "epsilon_high",
        Number,
        None,
        "objective.clip_eps_high objective.ratio_cap",
        "with loss_type='cispo' the cap of the ratio itself, by default 5: TRL's 0.2 scales gradients to a fifth",
    ),
    joint("sapo_temperature_neg", float, 1.05, "objective.tau_neg", algorithms=GRPO),
    joint("sapo_temperature_pos", float, 1.0, "objective.tau_pos", algorithms=GRPO),
    joint("vespo_k_pos", float, 2.0, "objective.k_pos", algorithms=GRPO),
    joint("vespo_lambda_pos", float, 3.0, "objective.lambda_pos", algorithms=GRPO),
    joint("vespo_k_neg", float, 3.0, "objective.k_neg", algorithms=GRPO),
    joint("vespo_lambda_neg", float, 2.0, "objective.lambda_neg", algorithms=GRPO),
    direct("importance_sampling_level", str, "token", "objective.ratio_level", algorithms=GRPO),
    joint("reward_weights", list[float] | None, None, "reward.components"),
    joint(
        "multi_objective_aggregation",
        str,
        "sum_then_normalize",
        "advantage.name",
        "normalize_then_sum is advantage=gdpo",
        algorithms=GRPO,
    ),
    joint(
        "scale_rewards",
        str,
        "group",
        "advantage.name",
        "group or True: group_relative; batch: batch_normalized; none or False: dr_grpo",
        algorithms=GRPO,
    ),
    joint(
        "loss_type",
        str,
        "dapo",
        "objective.name objective.loss_agg",
        "bnpo is dapo here: its mean over the tokens of a micro-batch depends on how a step is split",
        algorithms=GRPO,
    ),
    direct("mask_truncated_completions", bool, False, "objective.mask_truncated"),
    joint("sync_ref_model", bool, False, "trainer.reference_every"),
    direct("ref_model_mixup_alpha", float, 0.6, "trainer.reference_mix"),
    joint("ref_model_sync_steps", int, 512, "trainer.reference_every"),
    direct(
        "top_entropy_quantile",
        float,
        1.0,
        "objective.top_entropy_quantile",
        "over the tokens of the step; TRL's of a micro-batch",
        algorithms=GRPO,
    ),
    direct("entropy_coef", float, 0.0, "objective.entropy_coef", algorithms=GRPO),
    joint("use_adaptive_entropy", bool, False, "objective.entropy_target", algorithms=GRPO),
    refused("entropy_coef_min", float, 0.0, "use_adaptive_entropy with its bounds of 0 and 1", algorithms=GRPO),
    refused("entropy_coef_max", float, 1.0, "use_adaptive_entropy with its bounds of 0 and 1", algorithms=GRPO),
    refused("entropy_coef_delta", float, 0.005, "use_adaptive_entropy with its step of 0.005", algorithms=GRPO),
    joint("entropy_target", float, 0.2, "objective.entropy_target", "with use_adaptive_entropy", algorithms=GRPO),
    refused("max_tool_calling_iterations", int | None, None, TOOLS_LATER, algorithms=GRPO),
    joint("vllm_importance_sampling_correction", bool, True, "objective.correction", "with use_vllm", algorithms=GRPO),
    joint(
        "vllm_importance_sampling_mode", str, "sequence_mask", "objective.correction", "with use_vllm", algorithms=GRPO
    ),
    joint(
        "vllm_importance_sampling_clip_max",
        Number,
        3.0,
        "objective.correction_max",
        "with use_vllm; None is no bound",
        algorithms=GRPO,
    ),
    joint(
        "vllm_importance_sampling_clip_min",
        Number,
        None,
        "objective.correction_min",
        "with use_vllm; None is no bound",
        algorithms=GRPO,
    ),
    direct("off_policy_mask_threshold", Number, None, "objective.off_policy_threshold", algorithms=GRPO),
    direct("use_bias_correction_kl", bool, True, "objective.kl_unbiased", algorithms=GRPO),
    joint(
        "log_completions",
        bool,
        False,
        "callbacks.sample_logger",
        "samples.jsonl in the run folder, every logging_steps",
    ),
    accepted("log_multimodal", bool, True, PICTURES_LATER),
    joint("num_completions_to_print", int | None, None, "callbacks.sample_logger.prompts", "how many are written"),
    accepted("log_unique_prompts", bool, False, "samples.jsonl has each prompt of a step once, with its completions"),
    refused("log_completions_hub_repo", Text, None, "log_completions, and upload samples.jsonl", algorithms=GRPO),
    accepted("use_transformers_continuous_batching", bool, False, BATCHES_CONTINUOUSLY),
    accepted("transformers_continuous_batching_config", Options, None, BATCHES_CONTINUOUSLY),
    accepted("use_transformers_paged", bool, False, BATCHES_CONTINUOUSLY),
    joint(
        "vllm_importance_sampling_cap",
        Number,
        None,
        "objective.correction_max",
        "older name of vllm_importance_sampling_clip_max",
        algorithms=GRPO,
    ),
    direct("normalize_advantages", bool, False, "advantage.normalize", algorithms=RLOO),
    joint(
        "reward_clip_range",
        tuple[float, float] | None,
        None,
        "advantage.reward_min advantage.reward_max",
        algorithms=RLOO,
    ),
    joint(
        "max_prompt_length",
        int | None,
        None,
        "data.max_prompt_tokens",
        "longer prompts are left out, and never cut",
        since="TRL before 0.28",
    ),
)
