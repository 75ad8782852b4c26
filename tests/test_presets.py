"""`method=`: whole methods from the literature, with their papers' numbers, for any experiment."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from omegaconf import OmegaConf

from command_line import composed, refused
from grpo_toolbox.config.source import CONF, option_names
from toolbox_runs import all_metrics, metrics, toolbox_train

METHODS = option_names("method")

# ---- what is composed


NUMBERS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (2024), section 4.2: KL coefficient 0.04, one update after each exploration stage; ε and n are ours
    "grpo": {
        "advantage": {"name": "group_relative", "std": "population"},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "loss_agg": "seq_mean_token_mean"},
            **{"beta": 0.04, "kl": "k3", "kl_in": "loss"},
        },
        "trainer": {"ppo_epochs": 1},
    },
    # DeepSeek-R1 (2025), section 2.1: KL coefficient 0.001, temperature 1, the reference replaced every 400 steps, one
    # inner epoch; section 3.2.1: clip ratio 10
    "r1_zero": {
        "advantage": {"name": "group_relative", "std": "population"},
        "objective": {
            **{"name": "clipped", "clip_eps": 10.0, "clip_eps_high": None, "loss_agg": "seq_mean_token_mean"},
            **{"beta": 0.001, "kl": "k3", "kl_in": "loss"},
        },
        "rollout": {"temperature": 1.0},
        "trainer": {"ppo_epochs": 1, "reference_every": 400, "reference_mix": 1.0},
    },
    # Liu et al. (2025), examples/qwen2.5-math-7b.sh: beta 0, temperature 1, one epoch; a sum over generate_max_length
    "dr_grpo": {
        "advantage": {"name": "dr_grpo"},
        "objective": {"name": "clipped", "loss_agg": "constant", "length": None, "beta": 0.0},
        "rollout": {"temperature": 1.0},
        "trainer": {"ppo_epochs": 1},
    },
    # Yu et al. (2025), section 4.1: 0.2 and 0.28; 3.1 to 3.4: clip-higher, dynamic sampling, token level, overlong
    "dapo": {
        "advantage": {"name": "group_relative", "std": "sample", "eps": 1e-6},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "clip_eps_high": 0.28, "loss_agg": "token_mean", "beta": 0.0},
            "mask_truncated": True,
        },
        "rollout": {"temperature": 1.0, "dynamic_sampling": True},
    },
    # Ahmadian et al. (2024), appendix C: beta 0.03; the completion is one action, the KL part of its reward
    "rloo": {
        "advantage": {"name": "rloo"},
        "objective": {
            **{"name": "reinforce", "loss_agg": "seq_mean_token_sum", "beta": 0.03, "kl": "k1", "kl_in": "reward"}
        },
    },
    # Hu et al. (2025), v1, table 1: KL coefficient 0.001 for mathematics, clip 0.2; A = r − beta · Σ of later k1,
    # standardised over the batch
    "reinforce_pp": {
        "advantage": {"name": "reinforce_pp", "std": "population"},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "clip_eps_high": None, "loss_agg": "token_mean"},
            **{"beta": 0.001, "kl": "k1", "kl_in": "reward"},
        },
    },
    # Stiennon et al. (2020): γ 1, λ 0.95, 4 epochs, KL coefficient 0.05; Ziegler et al. (2019), train_policy.py: both
    # clips 0.2, advantages whitened
    "ppo": {
        "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "clip_eps_high": None, "loss_agg": "token_mean"},
            **{"beta": 0.05, "kl": "k1", "kl_in": "reward"},
        },
        "critic": {"clip": 0.2},
        "trainer": {"ppo_epochs": 4},
    },
    # Zheng et al. (2025), section 5.1: 3e-4 and 4e-4, four mini-batches per batch of rollouts
    "gspo": {
        "advantage": {"name": "group_relative", "std": "population"},
        "objective": {
            **{"name": "clipped", "clip_eps": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence"},
            **{"loss_agg": "seq_mean_token_mean", "beta": 0.0},
        },
        "rollout": {"steps_per_generation": 4},
    },
    # MiniMax-M1 (2025), section 3.1: no lower bound, token level, dynamic sampling, no KL; the cap is ScaleRL's
    "cispo": {
        "advantage": {"name": "group_relative", "std": "population"},
        "objective": {"name": "cispo", "clip_eps": None, "ratio_cap": 5.0, "loss_agg": "token_mean", "beta": 0.0},
        "rollout": {"dynamic_sampling": True},
    },
    # Khatri et al. (2025), section 4 and A.17: CISPO at 4, 5 or 8, a mean over prompts, the std of all advantages
    # of the batch, no prompts of zero variance
    "scalerl": {
        "advantage": {"name": "batch_normalized", "std_of": "advantages"},
        "objective": {
            **{"name": "cispo", "clip_eps": None, "ratio_cap": 5.0, "loss_agg": "prompt_mean", "beta": 0.0},
            **{"correction": "token_truncate", "correction_max": 5.0},
        },
        "rollout": {"dynamic_sampling": True, "max_oversampling": 1},
        "model": {"fp32_head": True},
    },
    # Gao et al. (2025): temperatures 1.0 and 1.05
    "sapo": {
        "advantage": {"name": "group_relative", "std": "population"},
        "objective": {
            **{"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg": "seq_mean_token_mean", "beta": 0.0}
        },
    },
    # Liu et al. (2026), table 7: clip_ratio 0.2 and 0.28, kl_loss 0.0005 of type mse, temperature 1, filter_groups, one
    # epoch; section 4.2: DAPO's mean over tokens
    "gdpo": {
        "advantage": {"name": "gdpo", "std": "sample", "eps": 1e-4},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "clip_eps_high": 0.28, "loss_agg": "token_mean"},
            **{"beta": 0.0005, "kl": "k2", "kl_in": "loss", "mask_truncated": False},
        },
        "rollout": {"temperature": 1.0, "dynamic_sampling": True},
        "trainer": {"ppo_epochs": 1},
    },
    # Liu et al. (2025), section 3.2: 0.2 and 0.4, temperature 1.2, dynamic sampling; the optimizer is reset with the
    # reference; beta, its kind and the interval are ours
    "prorl": {
        "advantage": {"name": "group_relative", "std": "sample", "eps": 1e-6},
        "objective": {
            **{"name": "clipped", "clip_eps": 0.2, "clip_eps_high": 0.4, "loss_agg": "seq_mean_token_mean"},
            **{"beta": 1e-3, "kl": "k3", "kl_in": "loss"},
        },
        "rollout": {"temperature": 1.2, "dynamic_sampling": True},
        "trainer": {"reference_every": 500, "reference_mix": 1.0, "reference_resets_optimizer": True},
    },
}
OF_OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_eps": 0.2, "beta": 0.04, "loss_agg": "seq_mean_token_mean"},
    "dapo": {"clip_eps": 0.2, "clip_eps_high": 0.28, "loss_agg": "token_mean"},
    "dr_grpo": {"clip_eps": 0.2, "loss_agg": "constant"},
    "ppo_clip": {"clip_eps": 0.2, "loss_agg": "token_mean"},
    # Ye et al. (2020), as verl has it
    "dual_clip": {"delta": 3.0},
    "gspo": {"clip_eps": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence"},
    "gspo_token": {"clip_eps": 3e-4, "clip_eps_high": 4e-4, "ratio_level": "sequence_token"},
    # Liu et al. (2026), section 5.1
    "luspo": {"clip_eps": 2e-3, "clip_eps_high": 2.5e-3, "ratio_level": "sequence", "loss_agg": "seq_mean_token_sum"},
    # Zhao et al. (2025), section 4: ρ within (e^−0.4, e^0.4)
    "gmpo": {"clip_eps": 0.4, "clip_eps_high": None},
    "cispo": {"clip_eps": None, "ratio_cap": 5.0, "loss_agg": "token_mean"},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    # Shen et al. (2026), section 4.1: (2, 3) for A > 0 and (3, 2) for A < 0
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "reinforce": {"loss_agg": "token_mean", "beta": 0.0},
    # Qi et al. (2026), run_qwen30b_dppo.sh
    "dppo_tv": {"divergence": "tv", "max_divergence": 0.15, "loss_agg": "constant"},
    "dppo_kl": {"divergence": "kl", "max_divergence": 0.05, "loss_agg": "constant"},
    # Cui et al. (2025), 7b_clip_cov.sh and 7b_kl_cov.sh
    "clip_cov": {
        **{"clip_eps": 1.0, "clip_eps_high": 1.0, "loss_agg": "token_mean"},
        **{"clip_cov": 2e-4, "clip_cov_min": 1.0, "clip_cov_max": 5.0},
    },
    "kl_cov": {"clip_eps_high": math.inf, "loss_agg": "token_mean", "kl_cov": 2e-3, "kl_cov_coef": 1.0},
}


@pytest.mark.parametrize("objective", [name for name in option_names("objective") if not name.startswith("_")])
def test_the_numbers_of_an_objective_are_its_papers(objective: str) -> None:
    _, plain = composed(f"objective={objective}")
    numbers = OF_OBJECTIVES[objective]
    assert {key: plain["objective"][key] for key in numbers} == numbers


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_of_a_method_are_its_papers(method: str) -> None:
    """Whatever the experiment has: grpo_qwen_gsm8k sets a beta of its own, for one."""
    for experiment in option_names("experiment"):
        config, plain = composed(f"experiment={experiment}", f"method={method}")
        assert config.name == experiment
        assert "method" not in plain
        for group, numbers in NUMBERS.get(method, {}).items():
            assert {key: plain[group][key] for key in numbers} == numbers


def test_every_method_has_its_numbers_in_the_table() -> None:
    assert {*NUMBERS, "trl_default"} == {*METHODS}


TRLS: dict[str, Callable[[Any], Any]] = {
    "model.gradient_checkpointing": lambda trl: trl.gradient_checkpointing,
    "data.shuffle": lambda trl: trl.shuffle_dataset,
    "rollout.group_size": lambda trl: trl.num_generations,
    "rollout.prompts_per_step": lambda trl: (
        trl.per_device_train_batch_size * trl.gradient_accumulation_steps // trl.num_generations
    ),
    "rollout.max_new_tokens": lambda trl: trl.max_completion_length,
    "rollout.temperature": lambda trl: trl.temperature,
    "rollout.top_k": lambda trl: trl.top_k,
    "rollout.top_p": lambda trl: trl.top_p,
    "rollout.min_p": lambda trl: trl.min_p or 0.0,
    "rollout.steps_per_generation": lambda trl: trl.steps_per_generation // trl.gradient_accumulation_steps,
    "advantage.name": lambda trl: {"group": "group_relative"}[trl.scale_rewards],
    "objective.name": lambda trl: {"dapo": "clipped"}[trl.loss_type],
    "objective.loss_agg": lambda trl: {"dapo": "token_mean"}[trl.loss_type],
    "objective.clip_eps": lambda trl: trl.epsilon,
    "objective.clip_eps_high": lambda trl: trl.epsilon_high,
    "objective.delta": lambda trl: trl.delta,
    "objective.ratio_level": lambda trl: trl.importance_sampling_level,
    "objective.beta": lambda trl: trl.beta,
    "objective.kl_unbiased": lambda trl: trl.use_bias_correction_kl,
    "objective.correction": lambda trl: trl.vllm_importance_sampling_mode if trl.use_vllm else "none",
    "objective.off_policy_threshold": lambda trl: trl.off_policy_mask_threshold,
    "objective.entropy_coef": lambda trl: trl.entropy_coef,
    "objective.entropy_target": lambda trl: trl.entropy_target if trl.use_adaptive_entropy else None,
    "objective.top_entropy_quantile": lambda trl: trl.top_entropy_quantile,
    "objective.mask_truncated": lambda trl: trl.mask_truncated_completions,
    "model.router_aux_loss_coef": lambda trl: trl.router_aux_loss_coef,
    "trainer.ppo_epochs": lambda trl: trl.num_iterations,
    "trainer.seed": lambda trl: trl.seed,
    "trainer.lr": lambda trl: trl.learning_rate,
    "trainer.schedule": lambda trl: str(trl.lr_scheduler_type.value),
    "trainer.warmup_steps": lambda trl: trl.warmup_steps,
    "trainer.weight_decay": lambda trl: trl.weight_decay,
    "trainer.adam_beta1": lambda trl: trl.adam_beta1,
    "trainer.adam_beta2": lambda trl: trl.adam_beta2,
    "trainer.adam_eps": lambda trl: trl.adam_epsilon,
    "trainer.max_grad_norm": lambda trl: trl.max_grad_norm,
    "trainer.reference_every": lambda trl: trl.ref_model_sync_steps if trl.sync_ref_model else 0,
    "trainer.reference_mix": lambda trl: trl.ref_model_mixup_alpha,
}
"""Our key, and its value in TRL's terms."""
OF_THE_FORMULA = {"advantage.std", "advantage.eps", "objective.kl", "objective.kl_in", "rollout.dynamic_sampling"}
"""Where TRL has no option but one way; tests/test_trl_parity.py holds our numbers against it."""


def test_trl_default_is_trls_default(tmp_path: Path) -> None:
    trls = pytest.importorskip("trl").GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    _, plain = composed("method=trl_default")
    ours = {key: plain[key.partition(".")[0]][key.partition(".")[2]] for key in TRLS}
    assert ours == {key: value(trls) for key, value in TRLS.items()}


def test_every_key_of_trl_default_is_compared_with_trls() -> None:
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / "method" / "trl_default.yaml"))
    del values["defaults"]
    written = {f"{group}.{key}" for group, keys in values.items() for key in keys}
    assert written - {*TRLS} == OF_THE_FORMULA


# ---- what gives way to what


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_an_experiments_numbers_give_way_to_the_method_and_the_methods_to_the_command_line() -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /objective: cispo\nname: mine\n"
        "objective:\n  ratio_cap: 3.0\n  beta: 0.5\nrollout:\n  group_size: 6\n  max_new_tokens: 3\n"
    )
    given = ("--config-dir", "conf", "experiment=mine", "callbacks=none", "trainer.max_steps=1", "run_dir=run")
    assert toolbox_train(*given, "method=gspo", "rollout.prompts_per_step=4", "objective.loss_agg=token_mean") == 0
    text = Path("run/config.yaml").read_text()
    assert "ratio_cap" not in text  # an option of the surrogate that the method has replaced
    assert "clip_eps: 0.0003" in text
    assert "beta: 0.0\n" in text
    assert "loss_agg: token_mean" in text
    assert "group_size: 6" in text


def test_an_option_of_the_command_line_is_taken_as_it_stands() -> None:
    """Beside method=dapo the objective gspo keeps its own clip range, or it would never clip."""
    _, alone = composed("objective=gspo", "objective.beta=0.1")
    _, beside = composed("method=dapo", "objective=gspo", "objective.beta=0.1")
    assert beside["objective"] == alone["objective"]
    assert beside["rollout"]["dynamic_sampling"]
    _, plain = composed("method=dapo", "advantage=dr_grpo")
    assert plain["advantage"] == {"name": "dr_grpo"}


def test_a_method_that_there_is_not_is_told_the_nearest() -> None:
    assert refused("method=dap").endswith("Did you mean dapo?")


def test_a_kl_in_the_reward_that_an_estimator_does_not_see_is_refused() -> None:
    """GDPO normalises the components of the reward, and the KL is taken off their sum."""
    refusal = refused("advantage=gdpo", "objective.kl_in=reward", "objective.beta=0.1", "objective.kl=k1")
    assert refusal == (
        "objective.kl_in=reward takes the KL off the total reward, which advantage=gdpo does not look at: set "
        "objective.kl_in=loss."
    )


# ---- what trains


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, tmp_path: Path) -> None:
    """Digits are paid, so that the untrained policy earns different rewards."""
    paid = ("reward=custom", "reward.name=plugs:digits", "callbacks=none", "trainer.max_steps=2")
    small = ("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=12")
    assert toolbox_train(f"method={method}", *paid, *small, f"run_dir={tmp_path / 'run'}") == 0
    for line in metrics(tmp_path / "run"):
        assert all(math.isfinite(value) for value in line.values())
        assert line["grad_norm"] > 0


BOUNDED = ("rollout.max_oversampling=2", "trainer.max_steps=250")
BESIDE: dict[str, tuple[str, ...]] = {
    "scalerl": ("rollout.max_empty_steps=500",),  # a solved task has no group with spread, which stops a run
    # a truncated completion that is left out is never told to stop, and three tokens are soon too few
    "dapo": (*BOUNDED, "objective.mask_truncated=false"),
    "cispo": BOUNDED,
    "gdpo": BOUNDED,
    "prorl": BOUNDED,
    # four batches of prompts at once, of 55
    "gspo": ("rollout.prompts_per_step=8",),
    # as its critic and its exploration want it: one completion of each of many prompts
    "ppo": (
        *("critic.lr=1e-3", "objective.entropy_coef=0.02", "trainer.schedule=linear", "trainer.max_steps=300"),
        *("rollout.group_size=4", "rollout.prompts_per_step=48"),
    ),
    # its own batch, length and learning rate are for other models
    "trl_default": (
        *("trainer.lr=1e-3", "rollout.prompts_per_step=16", "rollout.group_size=16", "rollout.max_new_tokens=3"),
        "model.gradient_checkpointing=false",
    ),
}
"""What grpo_tiny wants beside a method. Where solved prompts are sampled in vain, fewer of them and half the steps."""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str, tmp_path: Path) -> None:
    given = (f"method={method}", "callbacks=none", *BESIDE.get(method, ()))
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    assert fmean(line["reward_mean"] for line in all_metrics(tmp_path / "run")[-20:]) >= 0.85
