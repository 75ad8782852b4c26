"""FIELD_MAP's first part: the fields that TRL's configs take over from transformers' TrainingArguments."""

from __future__ import annotations

import math
from typing import Any

from grpo_toolbox.config.field import Field, accepted, direct, joint, refused

Options = dict[str, Any] | str | None
Text = str | None
Number = float | None
Flag = bool | None

ONE_PROCESS = "one process trains; multi-process launches come later"
NO_LOADER = "prompts are tokenised once, before training; there is no data loader"
NOTHING_GATHERED = "evaluation scores completions and gathers no predictions"
ALL_KEPT = 1_000_000
"""Our `keep_checkpoints` for TRL's None, which keeps every checkpoint."""


def _norm(value: float | None) -> float:
    return value or math.inf


def _their_norm(value: float) -> float:
    return 0.0 if math.isinf(value) else value


TRAINING_FIELDS: tuple[Field, ...] = (
    joint(
        "output_dir",
        Text,
        None,
        "run_dir",
        "the run folder, by default trainer_output; where one holds a run already, the new one gets a number",
    ),
    joint(
        "per_device_train_batch_size",
        int,
        8,
        "rollout.prompts_per_step rollout.steps_per_generation",
        "completions; × gradient_accumulation_steps it is a step's batch, in whole groups; no bound of memory",
    ),
    joint("num_train_epochs", float, 3.0, "trainer.max_steps", "counted in whole batches, as TRL counts them"),
    joint(
        "max_steps", int | None, -1, "trainer.max_steps", "optimizer steps; None, as -1, leaves it to num_train_epochs"
    ),
    direct("learning_rate", float, 1e-6, "trainer.lr"),
    joint(
        "lr_scheduler_type",
        str,
        "linear",
        "trainer.schedule",
        "linear, cosine, constant, constant_with_warmup, cosine_with_min_lr; others in GRPOTrainer(optimizers=…). In a "
        "warm-up the first step already trains; TRL's has a rate of 0",
    ),
    joint("lr_scheduler_kwargs", Options, None, "trainer.min_lr_ratio", "min_lr or min_lr_rate"),
    joint("warmup_steps", float, 0, "trainer.warmup_steps", "below 1 a share of the steps"),
    joint(
        "optim",
        str,
        "adamw_torch_fused",
        "trainer.optimizer",
        "AdamW in each of its forms; the 8-bit ones are plain AdamW without a GPU or bitsandbytes; others in "
        "GRPOTrainer(optimizers=…)",
    ),
    refused("optim_args", Text, None, "build the optimizer yourself: GRPOTrainer(optimizers=(optimizer, scheduler))"),
    direct(
        "weight_decay", float, 0.0, "trainer.weight_decay", "of all trained weights; TRL leaves out biases and norms"
    ),
    direct("adam_beta1", float, 0.9, "trainer.adam_beta1"),
    direct("adam_beta2", float, 0.999, "trainer.adam_beta2"),
    direct("adam_epsilon", float, 1e-8, "trainer.adam_eps"),
    refused(
        "optim_target_modules",
        Any,
        None,
        "build the optimizer yourself: GRPOTrainer(optimizers=(optimizer, scheduler))",
    ),
    joint(
        "gradient_accumulation_steps",
        int,
        1,
        "rollout.prompts_per_step rollout.steps_per_generation",
        "see per_device_train_batch_size",
    ),
    accepted("average_tokens_across_devices", bool, True, "denominators are counted over the whole step"),
    direct(
        "max_grad_norm", float, 1.0, "trainer.max_grad_norm", "0 or None never clips", ours=_norm, theirs=_their_norm
    ),
    accepted("label_smoothing_factor", float, 0.0, "the loss has no labels to smooth"),
    joint("bf16", Flag, None, "trainer.precision", "None is bfloat16 on a GPU and float32 elsewhere, where TRL stops"),
    refused("fp16", bool, False, "bf16=True, or load the model in float32: there is no loss scaling"),
    accepted("bf16_full_eval", bool, False, "evaluations sample at trainer.precision"),
    accepted("fp16_full_eval", bool, False, "evaluations sample at trainer.precision"),
    accepted("tf32", Flag, None, "call torch.set_float32_matmul_precision('high')"),
    joint(
        "activation_checkpointing",
        Flag,
        None,
        "model.gradient_checkpointing",
        "transformers' newer name of gradient_checkpointing",
    ),
    accepted("activation_checkpointing_kwargs", Options, None, "it is always the kind without reentry"),
    direct("gradient_checkpointing", bool, True, "model.gradient_checkpointing"),
    accepted("gradient_checkpointing_kwargs", Options, None, "it is always the kind without reentry"),
    accepted("torch_compile", bool, False, "packed batches differ in length from step to step"),
    accepted("torch_compile_backend", Text, None, "packed batches differ in length from step to step"),
    accepted("torch_compile_mode", Text, None, "packed batches differ in length from step to step"),
    accepted("use_liger_kernel", bool, False, "logits are never held as a whole"),
    accepted("liger_kernel_config", Options, None, "logits are never held as a whole"),
    accepted("use_cache", bool, False, "the engine has a cache of its own"),
    refused("neftune_noise_alpha", Number, None, "nothing: rollouts are trained as they were sampled, without noise"),
    accepted("torch_empty_cache_steps", int | None, None, "memory is bounded by trainer.micro_batch_tokens"),
    refused(
        "auto_find_batch_size",
        bool,
        False,
        "overrides={'trainer.micro_batch_tokens': …}, which bounds memory and changes no number",
    ),
    joint("logging_strategy", str, "steps", "", "of trainer.state.log_history; metrics.jsonl has every step"),
    joint(
        "logging_steps",
        float,
        10,
        "",
        "of trainer.state.log_history, means since the last entry; what is left at the end is logged, too",
    ),
    joint("logging_first_step", bool, False, "", "of trainer.state.log_history"),
    accepted("log_on_each_node", bool, True, ONE_PROCESS),
    accepted("logging_nan_inf_filter", bool, True, "a loss that is not finite stops the run"),
    accepted("include_num_input_tokens_seen", str, "no", "num_tokens is always logged"),
    accepted("log_level", str, "passive", "use logging.getLogger('grpo_toolbox')"),
    accepted("log_level_replica", str, "warning", ONE_PROCESS),
    joint("disable_tqdm", Flag, None, "callbacks.display", "True switches the display off"),
    joint(
        "report_to",
        None | str | list[str],
        "none",
        "callbacks.wandb callbacks.tensorboard callbacks.trackio",
        "these three; others as transformers' callback in GRPOTrainer(callbacks=[…])",
    ),
    joint("run_name", Text, None, "name"),
    joint("project", str, "huggingface", "callbacks.wandb.project callbacks.trackio.project"),
    joint("trackio_space_id", Text, None, "callbacks.trackio.space_id"),
    refused("trackio_bucket_id", Text, None, "trackio_space_id"),
    refused("trackio_static_space_id", Any, None, "trackio_space_id"),
    joint(
        "eval_strategy",
        str,
        "no",
        "trainer.eval_every",
        "epoch: each time the data has been gone through. The last step is always evaluated",
    ),
    joint("eval_steps", Number, None, "trainer.eval_every", "None: logging_steps; below 1 a share of the steps"),
    refused("eval_delay", float, 0, "trainer.evaluate() when it is time"),
    accepted("per_device_eval_batch_size", int, 8, "the engine decodes rollout.max_rows at a time"),
    accepted("prediction_loss_only", bool, False, NOTHING_GATHERED),
    joint("eval_on_start", bool, False, "trainer.eval_at_start"),
    accepted("eval_do_concat_batches", bool, True, NOTHING_GATHERED),
    accepted("eval_use_gather_object", bool, False, NOTHING_GATHERED),
    accepted("eval_accumulation_steps", int | None, None, NOTHING_GATHERED),
    accepted("include_for_metrics", list[str], [], NOTHING_GATHERED),
    accepted("batch_eval_metrics", bool, False, NOTHING_GATHERED),
    accepted("save_only_model", bool, False, "a checkpoint is always whole, so that it can be resumed from"),
    joint(
        "save_strategy",
        str,
        "steps",
        "trainer.save_every",
        "no: at the end alone; best: with every evaluation that is the best so far",
    ),
    joint(
        "save_steps", float, 500, "trainer.save_every", "below 1 a share of the steps. The last step is always saved"
    ),
    accepted("save_on_each_node", bool, False, ONE_PROCESS),
    direct(
        "save_total_limit",
        int | None,
        None,
        "trainer.keep_checkpoints",
        "beside the best; None keeps all",
        ours=lambda limit: limit or ALL_KEPT,
        theirs=lambda kept: None if kept >= ALL_KEPT else kept,
    ),
    accepted("enable_jit_checkpoint", bool, False, "a run that is told to stop saves its last finished step"),
    joint("push_to_hub", bool, False, "", "when training has ended"),
    joint("hub_token", Text, None, ""),
    joint("hub_private_repo", Flag, None, ""),
    joint("hub_model_id", Text, None, "", "None: the name of output_dir"),
    accepted("hub_strategy", str, "every_save", "the model is pushed when training has ended"),
    accepted("hub_always_push", bool, False, "the model is pushed when training has ended"),
    joint("hub_revision", Text, None, ""),
    joint("load_best_model_at_end", bool, False, "", "needs eval_strategy and save_strategy; the best is always saved"),
    joint(
        "metric_for_best_model",
        Text,
        None,
        "trainer.best_metric",
        "any of an evaluation, with eval_ or without. None: eval_loss with load_best_model_at_end, as in transformers, "
        "and else eval_reward",
    ),
    joint("greater_is_better", Flag, None, "trainer.best_is", "None: unless the metric ends in loss"),
    refused("ignore_data_skip", bool, False, "train() without resume_from_checkpoint, from a saved model"),
    accepted(
        "restore_callback_states_from_checkpoint", bool, False, "callbacks are told at which step a resumed run begins"
    ),
    accepted("full_determinism", bool, False, "runs on a processor repeat bit by bit"),
    direct("seed", int, 42, "trainer.seed"),
    refused("data_seed", int | None, None, "seed, which orders the data, too"),
    joint("use_cpu", bool, False, "trainer.device"),
    accepted("accelerator_config", Options, None, ONE_PROCESS),
    refused("parallelism_config", Any, None, f"nothing yet: {ONE_PROCESS}"),
    accepted("dataloader_drop_last", bool, False, NO_LOADER),
    accepted("dataloader_num_workers", int, 0, NO_LOADER),
    accepted("dataloader_pin_memory", bool, True, NO_LOADER),
    accepted("dataloader_persistent_workers", bool, False, NO_LOADER),
    accepted("dataloader_prefetch_factor", int | None, None, NO_LOADER),
    accepted("dataloader_multiprocessing_context", Text, None, NO_LOADER),
    accepted("dataloader_in_order", bool, True, NO_LOADER),
    accepted("remove_unused_columns", Flag, False, "rewards receive the columns that they ask for"),
    accepted("label_names", list[str] | None, None, NOTHING_GATHERED),
    accepted("train_sampling_strategy", str, "random", "shuffle_dataset says whether the order is drawn"),
    accepted("length_column_name", str, "length", NO_LOADER),
    accepted("ddp_find_unused_parameters", Flag, None, ONE_PROCESS),
    accepted("ddp_bucket_cap_mb", int | None, None, ONE_PROCESS),
    accepted("ddp_broadcast_buffers", Flag, None, ONE_PROCESS),
    accepted("ddp_static_graph", Flag, None, ONE_PROCESS),
    accepted("ddp_backend", Text, None, ONE_PROCESS),
    accepted("ddp_timeout", int, 1800, ONE_PROCESS),
    refused("fsdp", Any, None, f"model_init_kwargs={{'device_map': 'auto'}} spreads a model over GPUs: {ONE_PROCESS}"),
    refused(
        "fsdp_config",
        Options,
        None,
        f"model_init_kwargs={{'device_map': 'auto'}} spreads a model over GPUs: {ONE_PROCESS}",
    ),
    refused(
        "deepspeed",
        Options,
        None,
        f"model_init_kwargs={{'device_map': 'auto'}} spreads a model over GPUs: {ONE_PROCESS}",
    ),
    accepted("debug", str, "", "a loss or gradient that is not finite is named with its step"),
    accepted("skip_memory_metrics", bool, True, "memory is not measured by the trainer"),
    accepted("do_train", bool, False, "call train()"),
    accepted("do_eval", bool, False, "call evaluate()"),
    accepted("do_predict", bool, False, "there is no predict()"),
    accepted("resume_from_checkpoint", Text, None, "call train(resume_from_checkpoint=…)"),
    accepted("local_rank", int, -1, ONE_PROCESS),
    joint("warmup_ratio", Number, None, "trainer.warmup_steps", "a share of the steps", since="transformers before 5"),
    accepted("logging_dir", Text, None, "TensorBoard writes into the run folder", since="transformers before 5"),
    accepted("overwrite_output_dir", bool, False, "no run overwrites another", since="transformers before 5"),
    accepted("save_safetensors", bool, True, "models are always saved so", since="transformers before 5"),
    accepted("group_by_length", bool, False, "nothing is padded", since="transformers before 5"),
)
