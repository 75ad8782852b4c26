"""Our keys as TRL's arguments: what each becomes there, and what TRL cannot do; torch-free.

Keys that stand for exactly one field of TRL's are those of FIELD_MAP; here are the rules for all others. The tables of
`trl_keys.py` say of every key what becomes of it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import logging
import os
from dataclasses import is_dataclass
from typing import Any

from grpo_toolbox.backends.trl_keys import IDLE, LOSSES, ONLY_GRPO, PLAIN, REFUSED, SCALES
from grpo_toolbox.config.fields import FIELD_MAP, direct_fields, fields_of
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.config.source import SCHEMA_GROUPS, registry
from grpo_toolbox.errors import ConfigError, unknown_option

log = logging.getLogger(__name__)

ALGORITHMS = ("grpo", "rloo")
VERSIONS = ("1.15", "1.16")
"""Of TRL, that the backend is tested with; the extra [trl] asks for them."""

_ELSEWHERE = "or trainer.name=toolbox"


def algorithm_of(config: RunConfig) -> str:
    """Return which of TRL's trainers runs: trainer.algorithm, or the one that the advantage asks for."""
    return config.trainer.algorithm or ("rloo" if config.advantage.get("name") == "rloo" else "grpo")


def check_trl(config: RunConfig) -> None:
    """Raise ConfigError where TRL is not there or cannot do a key; warn of keys without effect and of differences."""
    trl_arguments(config)
    _check_installed(config)
    idle = [f"{key}={value} ({why})" for key, value, why in _idle(config)]
    if idle:
        log.warning("without effect on TRL: %s.", "; ".join(idle))
    for difference in _differences(config):
        log.warning("%s", difference)


def trl_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the fields of TRL's GRPOConfig or RLOOConfig that the run's method and sampling set.

    Raises ConfigError for the first key that TRL cannot do. Batch sizes, steps and folders are not among them.
    """
    algorithm = algorithm_of(config)
    if algorithm not in ALGORITHMS:
        raise unknown_option("trainer.algorithm", algorithm, ALGORITHMS)
    for key, (neutral, instead) in REFUSED.items():
        _only(config, key, (neutral,), instead)
    _check_model(config)
    method = _rloo(config) if algorithm == "rloo" else _grpo(config)
    fields = direct_fields(algorithm)
    handled = {"data.shuffle", "data.chat_template_kwargs", "trainer.keep_checkpoints", *method}
    values = {one.name: one.theirs(value_of(config, key)) for key, one in fields.items() if key not in handled}
    for name in PLAIN:
        key = FIELD_MAP[name].keys[0]
        if name in fields_of(algorithm) and value_of(config, key) is not None:
            values[name] = value_of(config, key)
    if config.rollout.min_new_tokens:
        values["generation_kwargs"] = {"min_new_tokens": config.rollout.min_new_tokens}
    return {name: value for name, value in values.items() if value is not None} | method | _sampler(config, algorithm)


def value_of(config: RunConfig, key: str) -> Any:
    """Return what a dotted key is set to; None for an option that the run's advantage or objective does not have."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, {"async": "async_"}.get(part, part))
    return value


def _grpo(config: RunConfig) -> dict[str, Any]:
    advantage, objective = config.advantage, config.objective
    _only(config, "advantage.name", tuple(SCALES), "TRL's GRPO has no other estimator")
    _only(config, "advantage.std", ("sample", None), "TRL divides by the sample's standard deviation")
    _only(config, "advantage.std_of", ("rewards", None), "TRL divides by the standard deviation of rewards")
    _only(config, "advantage.eps", (1e-4, None), "TRL adds 1e-4 to the standard deviation")
    _only(config, "objective.name", tuple(LOSSES), "TRL's GRPO has no other surrogate")
    losses = LOSSES[objective["name"]]
    _only(config, "objective.loss_agg", tuple(losses), f"TRL's {objective['name']} loss is averaged so")
    _only(config, "objective.ratio_level", ("token", "sequence"), "TRL's ratios are of tokens or sequences")
    if objective["loss_agg"] == "constant":
        allowed = (None, config.rollout.max_new_tokens)
        _only(config, "objective.length", allowed, "TRL divides by max_completion_length, rollout.max_new_tokens")
    if objective["beta"]:
        _only(config, "objective.kl", ("k3",), "TRL's GRPO estimates the KL so")
        _only(config, "objective.kl_in", ("loss",), "TRL's GRPO has its KL in the loss")
        if objective["ratio_level"] == "sequence":
            _only(
                config, "objective.kl_unbiased", (False,), "TRL weighs the KL with the sequence's ratio, not a token's"
            )
    fields = {"loss_type": losses[objective["loss_agg"]], **SCALES[advantage["name"]]}
    if objective["name"] == "cispo":
        _only(config, "objective.clip_eps", (None,), "TRL's CISPO has no lower bound")
        cap = objective.get("ratio_cap")
        fields["epsilon_high"] = 1 + objective["clip_eps_high"] if cap is None else cap
    elif objective.get("clip_eps_high") is not None:
        fields["epsilon_high"] = objective["clip_eps_high"]
    if objective.get("entropy_target") is not None:
        fields |= {"use_adaptive_entropy": True, "entropy_target": objective["entropy_target"]}
    return fields


def _rloo(config: RunConfig) -> dict[str, Any]:
    advantage, objective = config.advantage, config.objective
    if advantage["name"] != "rloo":
        raise ConfigError(
            f"advantage.name={advantage['name']} cannot run on TRL's RLOO, which leaves one out. Set method=rloo, or "
            "trainer.algorithm=grpo."
        )
    for key, neutral in ONLY_GRPO.items():
        allowed = (neutral, None) if key.startswith("objective.") else (neutral,)
        _only(config, key, allowed, "TRL's RLOO has no such thing")
    _only(config, "objective.name", ("reinforce", "clipped"), "TRL's RLOO clips the ratio of whole completions")
    if objective["name"] == "reinforce":  # a ratio of 1 has REINFORCE's gradient
        _only(config, "objective.loss_agg", ("seq_mean_token_sum",), "TRL's RLOO adds up a completion's tokens")
        why = "TRL's RLOO clips ratios where the policy has moved: with more than 1, objective.name=clipped is that"
        _only(config, "trainer.ppo_epochs", (1,), why)
        _only(config, "rollout.steps_per_generation", (1,), why)
    else:
        _only(config, "objective.ratio_level", ("product",), "TRL's RLOO has the ratio of whole completions")
        _only(config, "objective.loss_agg", ("seq_mean_token_mean",), "TRL's RLOO weighs completions alike")
    if objective["beta"]:
        _only(config, "objective.kl", ("k1",), "TRL's RLOO estimates the KL so")
        _only(config, "objective.kl_in", ("reward",), "TRL's RLOO takes its KL off the reward")
    low, high = advantage.get("reward_min"), advantage.get("reward_max")
    bounds = (float("-inf") if low is None else low, float("inf") if high is None else high)
    fields: dict[str, Any] = {"normalize_advantages": bool(advantage.get("normalize"))}
    if (low, high) != (None, None):
        fields["reward_clip_range"] = bounds
    if objective.get("clip_eps_high") is not None:
        fields["epsilon_high"] = objective["clip_eps_high"]
    return fields


def _sampler(config: RunConfig, algorithm: str) -> dict[str, Any]:
    """Return TRL's fields of the engine: transformers' generate, or a server of vLLM's."""
    engine, server = config.rollout.engine, config.rollout.server
    _only(config, "rollout.engine", ("local", "hf", "vllm"), "TRL samples with transformers or vLLM")
    if engine != "vllm":
        _only(config, "objective.correction", ("none", None), "TRL has no log-probs of this sampler to correct with")
        return {}
    urls = [server.urls] if isinstance(server.urls, str) else list(server.urls)
    vllm = config.rollout.vllm
    fields: dict[str, Any] = {"use_vllm": True, "vllm_mode": vllm.mode}
    if vllm.mode == "colocate":
        fields |= {
            "vllm_tensor_parallel_size": vllm.tensor_parallel_size,
            "vllm_gpu_memory_utilization": 0.3 if vllm.gpu_memory_utilization is None else vllm.gpu_memory_utilization,
            "vllm_max_model_length": vllm.max_model_len,
            "vllm_enable_sleep_mode": vllm.sleep,
        }
    elif len(urls) == 1:
        fields |= {"vllm_server_base_url": urls[0], "vllm_server_timeout": server.start_timeout_s}
    else:
        raise ConfigError(
            f"rollout.server.urls={urls}: TRL samples on one server. Give one address, or set trainer.name=toolbox."
        )
    if config.rollout.min_new_tokens:
        fields["generation_kwargs"] = {"min_tokens": config.rollout.min_new_tokens}  # vLLM's name
    if algorithm == "rloo":
        _only(config, "objective.correction", ("none", None), "TRL's RLOO corrects nothing")
        return fields
    return fields | _correction(config)


def _correction(config: RunConfig) -> dict[str, Any]:
    objective = config.objective
    name = objective["correction"]
    if name in (None, "none"):
        return {"vllm_importance_sampling_correction": False}
    _only(config, "objective.correction", ("none", *registry("ratios.py", "CORRECTIONS")), "TRL measures no mismatch")
    call = ast.parse(registry("ratios.py", "CORRECTIONS")[name], mode="eval").body
    assert isinstance(call, ast.Call)
    level = ast.literal_eval(call.args[0])
    bounds = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    if level == "geometric":
        allowed = tuple(other for other in registry("ratios.py", "CORRECTIONS") if not other.startswith("geometric"))
        _only(config, "objective.correction", ("none", *allowed), "TRL has no geometric mean here")
    low, high = objective.get("correction_min"), objective.get("correction_max")
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{level}_{'mask' if bounds['drops'] else 'truncate'}",
        "vllm_importance_sampling_clip_min": (bounds["low"] or None) if low is None else low,
        "vllm_importance_sampling_clip_max": bounds["high"] if high is None else high,
    }


def _check_installed(config: RunConfig) -> None:
    advice = 'Run pip install "grpo-toolbox[trl]", or set trainer.name=toolbox.'
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"trainer.name=trl needs the package trl, which is not installed. {advice}") from error
    if not version.startswith(tuple(f"{one}." for one in VERSIONS)):
        raise ConfigError(f"trainer.name=trl works with trl {' and '.join(VERSIONS)}, not {version}. {advice}")
    if version.startswith("1.15."):
        _check_triton(config, version)


def _check_triton(config: RunConfig, version: str) -> None:
    """Raise ConfigError where a TRL whose loss is a Triton kernel cannot compute it."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"trl {version} computes its loss with Triton, which is not there. Install trl 1.16, or set "
            "trainer.name=toolbox."
        )
    from grpo_toolbox.config.policy import pick_device  # brings torch, which the check of other versions needs not

    kind = pick_device(config.trainer.device).type
    if kind not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET", "") in ("", "0"):
        raise ConfigError(
            f"trl {version} computes its loss with Triton on a GPU, and this run is on {kind}. Install trl 1.16, or "
            "set trainer.name=toolbox; with TRITON_INTERPRET=1 it runs here, slowly."
        )


def _check_model(config: RunConfig) -> None:
    if config.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={config.rollout.group_size}: TRL compares completions of a prompt. Set 2 or more, "
            f"{_ELSEWHERE}."
        )
    if config.model.lora.r:
        _only(config, "trainer.reference_every", (0,), "TRL's reference of an adapter is the model without it")
    if ":" in config.trainer.device:
        raise ConfigError(
            f"trainer.device={config.trainer.device}: TRL takes the first GPU that it sees. Set trainer.device=cuda, "
            "and CUDA_VISIBLE_DEVICES to the GPU's number."
        )


def _only(config: RunConfig, key: str, allowed: tuple[Any, ...], instead: str) -> None:
    value = value_of(config, key)
    if value not in allowed:
        shown = [_yaml(one) for one in allowed if one is not None] or ["null"]
        choice = f"{key}={shown[0]}" if len(shown) == 1 else f"{key} to one of {', '.join(shown)}"
        raise ConfigError(f"{key}={_yaml(value)} cannot run on TRL: {instead}. Set {choice}, {_ELSEWHERE}.")


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _idle(config: RunConfig) -> list[tuple[str, Any, str]]:
    """Return what was set to other than its default and changes nothing on TRL."""
    plain = RunConfig()
    found = []
    for key, why in IDLE.items():
        group = key.partition(".")[0]
        if group in SCHEMA_GROUPS and group != "critic" and value_of(config, key) != value_of(plain, key):
            value = value_of(config, key)
            found.append((key, "…" if is_dataclass(value) else _yaml(value), why))
    return found


def _differences(config: RunConfig) -> list[str]:
    """Return in words where TRL's numbers differ from the toolbox's under this config."""
    found = []
    objective, several = config.objective, config.rollout.steps_per_generation > 1
    if algorithm_of(config) == "grpo" and objective["loss_agg"] == "token_mean" and several:
        found.append(
            "TRL divides each step's loss by the mean number of tokens of the generation's steps, not its own."
        )
    if (objective.get("top_entropy_quantile") or 1.0) < 1:
        found.append("TRL chooses tokens of high entropy within a micro-batch, not within the step.")
    return found
