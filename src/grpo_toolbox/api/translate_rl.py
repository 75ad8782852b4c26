"""The part of the translation that is mathematics: objective, advantage, and vLLM with its correction."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from grpo_toolbox.errors import unknown_option

CLIPPED = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "constant",
    "luspo": "seq_mean_token_sum",
}
"""Losses of the clipped ratio, and how each adds up its tokens."""
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
RATIO_CAP = 5.0
"""CISPO's cap in ScaleRL (Khatri et al., 2025)."""
SCALES = {"group": "group_relative", "batch": "batch_normalized", "none": "dr_grpo"}


def objective_keys(args: Any, notes: list[str]) -> dict[str, Any]:
    """Return the keys of the objective that are not direct."""
    clip = {"clip_eps": args.epsilon, "clip_eps_high": args.epsilon_high}
    if args.algorithm == "rloo":
        fixed = {"ratio_level": "product", "loss_agg": "seq_mean_token_mean", "kl": "k1", "kl_in": "reward"}
        return _under("objective", {"name": "clipped", **clip, **fixed})
    loss = args.loss_type
    if loss not in LOSSES:
        raise unknown_option("loss_type", loss, LOSSES)
    if loss == "bnpo":
        notes.append(
            "loss_type='bnpo': the mean is taken over the tokens of the whole step, as loss_type='dapo' does. TRL's "
            "over those of a micro-batch depends on how the step is split."
        )
    own: dict[str, Any] = {"loss_agg": CLIPPED.get(loss, "token_mean")}
    if loss in CLIPPED:
        own |= {"name": "clipped", **clip, "delta": args.delta}
    elif loss == "cispo":
        own |= {"name": "cispo", "clip_eps": None, "ratio_cap": args.epsilon_high or _default_cap(notes)}
    elif loss == "sapo":
        temperatures = {"tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
        own = {"name": "sapo", **temperatures, "loss_agg": "seq_mean_token_mean"}
    else:
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        own |= {"name": "vespo", **{name: getattr(args, f"vespo_{name}") for name in names}}
    if args.use_adaptive_entropy:
        own["entropy_target"] = args.entropy_target
    if args.beta == 0:
        own["kl_unbiased"] = False
    elif args.use_bias_correction_kl and args.importance_sampling_level == "sequence":
        notes.append(
            "importance_sampling_level='sequence' with use_bias_correction_kl=True: the KL of a token is multiplied by "
            "that token's ratio, which alone makes its gradient the KL's (DeepSeek-V3.2). TRL takes the sequence's."
        )
    return _under("objective", own)


def _default_cap(notes: list[str]) -> float:
    notes.append(
        f"loss_type='cispo' without epsilon_high: the ratio is capped at {RATIO_CAP:g} (ScaleRL). TRL takes epsilon, "
        "0.2, for the cap, which scales every gradient down to a fifth."
    )
    return RATIO_CAP


def advantage_keys(args: Any) -> dict[str, Any]:
    """Return the estimator and its options."""
    if args.algorithm == "rloo":
        low, high = args.reward_clip_range or (None, None)
        bounds = {"reward_min": low, "reward_max": high}
        return _under("advantage", {"name": "rloo", "normalize": args.normalize_advantages, **bounds})
    if args.multi_objective_aggregation == "normalize_then_sum":
        return _under("advantage", {"name": "gdpo", "std": "sample", "eps": 1e-4})
    if args.multi_objective_aggregation != "sum_then_normalize":
        choices = ("sum_then_normalize", "normalize_then_sum")
        raise unknown_option("multi_objective_aggregation", args.multi_objective_aggregation, choices)
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    if scale not in SCALES:
        raise unknown_option("scale_rewards", scale, SCALES)
    options = {} if scale == "none" else {"std": "sample", "eps": 1e-4}
    return _under("advantage", {"name": SCALES[scale], **options})


def vllm_keys(args: Any, notes: list[str]) -> dict[str, Any]:
    """Return the engine, and the correction for a sampler that rounds otherwise than the trainer."""
    if not args.use_vllm:
        return {}
    if args.vllm_mode == "colocate":
        return _colocated_keys(args, notes)
    if args.vllm_mode != "server":
        raise unknown_option("vllm_mode", args.vllm_mode, ("colocate", "server"))
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
    return {
        "rollout.engine": "vllm",
        "rollout.server.urls": [args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"],
        "rollout.server.start_timeout_s": args.vllm_server_timeout,
        **_correction_keys(args),
    }


def _colocated_keys(args: Any, notes: list[str]) -> dict[str, Any]:
    """Return vLLM in the trainer's process, or the process's own engine where there is no vLLM beside it."""
    if importlib.util.find_spec("vllm") is None:
        notes.append(
            "use_vllm=True with vllm_mode='colocate', and vllm is not installed here: completions are sampled in the "
            "trainer's process by rollout.engine=local, on the trainer's own weights, each prompt prefilled once for "
            "its group; vLLM's settings have no effect on it. vllm_mode='server' samples by a vLLM of its own."
        )
        return {"rollout.engine": "local"}
    return {
        "rollout.engine": "vllm",
        "rollout.vllm.mode": "colocate",
        "rollout.vllm.gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "rollout.vllm.max_model_len": args.vllm_max_model_length,
        "rollout.vllm.tensor_parallel_size": args.vllm_tensor_parallel_size,
        "rollout.vllm.sleep": args.vllm_enable_sleep_mode,
        **_correction_keys(args),
    }


def _correction_keys(args: Any) -> dict[str, Any]:
    """Return the correction of the ratio between trainer and sampler; None as a bound is none."""
    if args.algorithm == "rloo" or not args.vllm_importance_sampling_correction:
        return {"objective.correction": "none"}
    high = args.vllm_importance_sampling_cap or args.vllm_importance_sampling_clip_max
    low = args.vllm_importance_sampling_clip_min
    return {
        "objective.correction": args.vllm_importance_sampling_mode,
        "objective.correction_min": 0.0 if low is None else low,
        "objective.correction_max": math.inf if high is None else high,
    }


def _under(group: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{group}.{name}": value for name, value in options.items()}
