"""The trainers of the library: TRL's arguments become a run, its callbacks are called, its names are logged."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from grpo_toolbox import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from grpo_toolbox.api.translate import translate
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.models.tiny import build_tiny, build_tokenizer
from small_models import build

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SMALL: dict[str, Any] = {
    "max_completion_length": 3,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of digits, which a random policy varies in."""
    return [sum(map(str.isdigit, one)) / 3 for one in completions]


def config(folder: Path, **more: Any) -> Any:
    return GRPOConfig(output_dir=str(folder / "run"), **SMALL | {"max_steps": 2} | more)


def trained(folder: Path, *, args: Any = None, **more: Any) -> GRPOTrainer:
    given = {"model": "builtin:tiny", "reward_funcs": digits, "train_dataset": ROWS} | more
    trainer = GRPOTrainer(args=args or config(folder), **given)
    trainer.train()
    return trainer


def run_config(args: Any, rows: int | None = 100, **more: Any) -> RunConfig:
    return translate(args, model={"model.path": "builtin:tiny"}, rows=rows, evaluates=True, **more)[0]


# ---- fields


def test_defaults_are_those_of_the_preset_of_trl() -> None:
    """method=trl_default writes TRL's defaults down in our keys; the two say the same."""
    from command_line import composed

    preset, _ = composed("method=trl_default", "trainer.max_steps=300")
    ours = run_config(GRPOConfig())
    for group in ("rollout", "trainer", "model"):
        mine, theirs = (vars(getattr(one, group)) for one in (ours, preset))
        evaluations = {"eval_temperature", "eval_completions", "eval_loss", "eval_at_start"}
        own = {*evaluations, "save_every", "keep_checkpoints", "path", "lora"}
        assert {key for key in mine if mine[key] != theirs[key]} - own == set(), group
    assert ours.advantage == preset.advantage
    shared = set(ours.objective) & set(preset.objective)
    differing = {key for key in shared if ours.objective[key] != preset.objective[key]}
    assert differing == {"kl_unbiased"}  # without a KL it says nothing, and is left off


@pytest.mark.parametrize(
    ("fields", "prompts", "shared", "steps"),
    [
        ({}, 1, 1, 300),  # 8 completions a step: 100 prompts, 3 epochs
        ({"gradient_accumulation_steps": 4}, 4, 1, 75),
        ({"per_device_train_batch_size": 16, "num_train_epochs": 1}, 2, 1, 50),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_train_epochs": 1}, 2, 2, 50),
        ({"generation_batch_size": 32, "num_train_epochs": 1}, 1, 4, 100),
        ({"max_steps": 7, "num_iterations": 2}, 1, 1, 4),  # two optimizer steps in each of ours
        ({"max_steps": None, "num_train_epochs": 0.5}, 1, 1, 50),
    ],
)
def test_batches_are_cut_as_trl_cuts_them(fields: dict[str, Any], prompts: int, shared: int, steps: int) -> None:
    made = run_config(GRPOConfig(**fields))
    assert (made.rollout.prompts_per_step, made.rollout.steps_per_generation) == (prompts, shared)
    assert made.trainer.max_steps == steps


def test_a_step_that_holds_no_whole_group_is_raised_to_one_and_says_so() -> None:
    args = GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=4, num_generations=8)
    made, _, _, notes = translate(args, model={"model.path": "builtin:tiny"}, rows=10, evaluates=False)
    assert made.rollout.prompts_per_step == 1
    assert "a step takes 1 whole group, 8 completions" in notes[0]


@pytest.mark.parametrize(
    ("fields", "objective"),
    [
        ({}, {"name": "clipped", "loss_agg": "token_mean", "clip_eps": 0.2, "clip_eps_high": None}),
        ({"loss_type": "grpo", "beta": 0.1}, {"loss_agg": "seq_mean_token_mean", "beta": 0.1, "kl_unbiased": True}),
        ({"loss_type": "dr_grpo"}, {"loss_agg": "constant"}),
        ({"loss_type": "cispo", "epsilon_high": 3.0}, {"name": "cispo", "ratio_cap": 3.0, "clip_eps": None}),
        ({"loss_type": "cispo"}, {"ratio_cap": 5.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, {"name": "sapo", "tau_neg": 2.0, "tau_pos": 1.0}),
        ({"loss_type": "vespo", "vespo_k_neg": 4.0}, {"name": "vespo", "k_neg": 4.0, "lambda_pos": 3.0}),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"loss_agg": "seq_mean_token_sum"}),
        ({"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
        ({"delta": 4.0, "mask_truncated_completions": True}, {"delta": 4.0, "mask_truncated": True}),
        ({"use_adaptive_entropy": True, "entropy_target": 0.3}, {"entropy_target": 0.3}),
    ],
)
def test_losses_are_objectives(fields: dict[str, Any], objective: dict[str, Any]) -> None:
    made = run_config(GRPOConfig(**fields)).objective
    assert {key: made[key] for key in objective} == objective


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "group_relative"),
        ({"scale_rewards": True}, "group_relative"),
        ({"scale_rewards": "batch"}, "batch_normalized"),
        ({"scale_rewards": False}, "dr_grpo"),
        ({"scale_rewards": "none"}, "dr_grpo"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "gdpo"),
    ],
)
def test_scalings_are_advantages(fields: dict[str, Any], name: str) -> None:
    assert run_config(GRPOConfig(**fields)).advantage["name"] == name


def test_rloo_is_its_own_product_of_choices() -> None:
    made = run_config(RLOOConfig(normalize_advantages=True, reward_clip_range=(-1.0, 2.0)))
    assert made.rollout.group_size == 2
    chosen = {key: made.objective[key] for key in ("name", "ratio_level", "kl", "kl_in", "beta")}
    assert chosen == {"name": "clipped", "ratio_level": "product", "kl": "k1", "kl_in": "reward", "beta": 0.05}
    assert made.advantage == {"name": "rloo", "normalize": True, "reward_min": -1.0, "reward_max": 2.0}


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        ({"warmup_ratio": 0.1, "max_steps": 50}, "warmup_steps", 5),
        ({"warmup_steps": 0.1, "max_steps": 50}, "warmup_steps", 5),
        ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, "warmup_steps", 0),
        ({"lr_scheduler_type": "cosine"}, "schedule", "cosine"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "min_lr_ratio", 0.1),
        ({"save_strategy": "no"}, "save_every", 0),
        ({"save_steps": 0.5, "max_steps": 10}, "save_every", 5),
        ({"eval_strategy": "epoch"}, "eval_every", 100),
        ({"eval_strategy": "steps"}, "eval_every", 10),  # logging_steps
        ({"bf16": True}, "precision", "bfloat16"),
        ({"use_cpu": True}, "device", "cpu"),
        ({"optim": "paged_adamw_8bit"}, "optimizer", "adamw_8bit"),
        ({"sync_ref_model": True, "ref_model_sync_steps": 64}, "reference_every", 64),
        ({"max_grad_norm": 0}, "max_grad_norm", float("inf")),
    ],
)
def test_the_trainer_s_own_fields(fields: dict[str, Any], key: str, value: Any) -> None:
    assert getattr(run_config(GRPOConfig(**fields)).trainer, key) == value


def test_older_and_other_fields_reach_their_keys() -> None:
    args = GRPOConfig(
        max_prompt_length=256,
        generation_kwargs={"min_new_tokens": 2},
        model_init_kwargs={"torch_dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": "auto"},
        overrides={"rollout.dynamic_sampling": True, "trainer.micro_batch_tokens": 2048},
    )
    made = run_config(args)
    assert (made.data.max_prompt_tokens, made.data.on_long) == (256, "drop")
    assert made.rollout.min_new_tokens == 2
    assert (made.model.dtype, made.model.attn_implementation, made.model.device_map) == ("bfloat16", "eager", "auto")
    assert made.rollout.dynamic_sampling
    assert made.trainer.micro_batch_tokens == 2048


def test_vllm_is_a_server_or_the_engine_of_this_process() -> None:
    args = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_port=9000, vllm_server_timeout=5.0)
    made = run_config(args)
    assert (made.rollout.engine, made.rollout.server.urls) == ("vllm", ["http://127.0.0.1:9000"])
    assert made.rollout.server.start_timeout_s == 5.0
    correction = {key: made.objective[key] for key in ("correction", "correction_min", "correction_max")}
    assert correction == {"correction": "sequence_mask", "correction_min": 0.0, "correction_max": 3.0}
    plain = run_config(GRPOConfig(use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False))
    assert plain.objective["correction"] == "none"


@pytest.mark.parametrize("installed", [False, True])
def test_colocated_vllm_is_vllm_where_it_is_and_the_engine_of_this_process_elsewhere(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    sizes = {"vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 900, "vllm_tensor_parallel_size": 2}
    args = GRPOConfig(use_vllm=True, **sizes)
    made, _, _, notes = translate(args, model={"model.path": "builtin:tiny"}, rows=10, evaluates=False)
    vllm = made.rollout.vllm
    given = (vllm.mode, vllm.gpu_memory_utilization, vllm.max_model_len, vllm.tensor_parallel_size, vllm.sleep)
    if installed:
        assert (made.rollout.engine, *given) == ("vllm", "colocate", 0.5, 900, 2, False)
        assert (made.objective["correction"], notes) == ("sequence_mask", [])
    else:
        assert made.rollout.engine == "local"
        assert "in the trainer's process by rollout.engine=local" in notes[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_generation": 4}, "Did you mean num_generations?"),
        ({"normalize_advantages": True}, "It is one of RLOOConfig's"),
        ({"fp16": True}, "bf16=True"),
        ({"deepspeed": "zero3.json"}, "multi-process launches come later"),
        ({"max_tool_calling_iterations": 3}, "tools and environments come later"),
        ({"repetition_penalty": 1.1}, "get_repetition_penalty_reward"),
        ({"data_seed": 3}, "seed, which orders the data"),
        ({"max_steps": "3"}, "max_steps='3') is not a whole number"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3') is not a number"),
        ({"num_generations": 2.5}, "is not a whole number"),
        ({"use_vllm": 1}, "is not True or False"),
        ({"model_init_kwargs": "{dtype"}, "is no JSON"),
    ],
)
def test_what_cannot_be_had_names_what_to_use(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        GRPOConfig(**fields)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_type": "gspo"}, "loss_type='gspo' is not an option"),
        ({"scale_rewards": "groups"}, "Did you mean group?"),
        ({"optim": "adafactor"}, "optimizers=(optimizer, scheduler)"),
        ({"lr_scheduler_type": "polynomial"}, "optimizers=(optimizer, scheduler)"),
        ({"report_to": "mlflow"}, "callbacks=[…]"),
        ({"model_init_kwargs": {"subfolder": "main"}}, "Load the model yourself"),
        ({"generation_kwargs": {"num_beams": 2}}, "min_new_tokens"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "set one of them"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "must be a multiple"),
        ({"overrides": {"rollout.dynamic": True}}, "Did you mean rollout.dynamic_sampling?"),
        ({"num_generations": 0}, "whole number of at least 1"),
        ({"temperature": 0.0}, "greedy"),
        ({"use_vllm": True, "vllm_mode": "servers"}, "Did you mean server?"),
    ],
)
def test_values_that_cannot_work_name_what_to_use(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run_config(GRPOConfig(**fields))
    assert words in str(raised.value)


def test_fields_without_effect_say_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        GRPOConfig(torch_compile=True, dataloader_num_workers=4)
    assert "torch_compile=True) has no effect here: packed batches" in caplog.text
    assert "there is no data loader" in caplog.text


def test_a_config_can_be_copied_and_read_by_transformers_parser() -> None:
    import copy

    from transformers import HfArgumentParser

    args = GRPOConfig(learning_rate=2e-5, overrides={"rollout.max_rows": 8})
    assert copy.deepcopy(args).to_dict() == args.to_dict()
    assert json.loads(args.to_json_string())["learning_rate"] == 2e-5
    assert "hub_token" not in args.to_sanitized_dict()
    words = ["--learning_rate", "2e-5", "--model_init_kwargs", '{"dtype": "float32"}']
    (read,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    assert (read.learning_rate, read.model_init_kwargs) == (2e-5, {"dtype": "float32"})
    assert set(read.changed()) == {"learning_rate", "model_init_kwargs"}


def test_importing_the_package_and_making_a_config_loads_no_torch() -> None:
    program = (
        "import sys; from grpo_toolbox import GRPOConfig; from grpo_toolbox.rewards import accuracy_reward;"
        "GRPOConfig(learning_rate=1e-5); heavy = ('torch', 'transformers', 'trl');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- data and rewards


def test_pictures_tools_and_environments_come_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pictures.*come later"):
        trained(tmp_path, train_dataset=[{"prompt": "1+1=", "image": "cat.png"}] * 4)
    for name in ("tools", "environment_factory", "rollout_func"):
        with pytest.raises(ConfigError, match="come later"):
            trained(tmp_path, **{name: [digits]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_dataset": "trl-lib/DeepMath-103K"}, "load_dataset"),
        ({"train_dataset": {"train": ROWS}}, "train_dataset=data['train']"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"reward_funcs": None}, "reward_funcs is missing"),
        ({"reward_funcs": "exact_matches"}, "exact_matches"),
        ({"train_dataset": ROWS[:1]}, "the data has 1 rows"),
        ({"args": RLOOConfig()}, "must be a GRPOConfig"),
        ({"model": None}, "model=None must be a hub name"),
        ({"callbacks": ["tensorboard"]}, "is no transformers.TrainerCallback"),
        ({"train_dataset": [{"question": "1+1="}] * 4}, "rename_column('question', 'prompt')"),
        ({"args": GRPOConfig(load_best_model_at_end=True)}, "load_best_model_at_end"),
    ],
)
def test_what_is_given_wrongly_is_named(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError)) as raised:
        trained(tmp_path, **given)
    assert words in str(raised.value)


def test_rewards_of_every_kind_and_their_weights(tmp_path: Path) -> None:
    from reward_checkpoints import checkpoint

    async def later(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None if one.startswith("1") else 0.5 for one in completions]

    args = config(tmp_path, reward_weights=[1.0, 2.0, 0.5, 0.25], max_steps=1)
    judge = checkpoint(tmp_path / "judge")
    trainer = trained(tmp_path, args=args, reward_funcs=[digits, later, "length_penalty", str(judge)])
    entry = trainer.state.log_history[0]
    means = {name: entry[f"rewards/{name}/mean"] for name in ("digits", "later", "length_penalty", "judge")}
    assert means["later"] == 0.5
    weights = dict(zip(means, args.reward_weights, strict=True))
    if entry["rewards/later/not_applicable"] == 0:
        assert entry["reward"] == pytest.approx(sum(weights[name] * means[name] for name in means), abs=1e-5)


def test_failures_of_a_function_are_left_out_on_request(tmp_path: Path) -> None:
    def breaks(completions: list[str], **kwargs: Any) -> list[float]:
        if any(one.startswith("1") for one in completions):
            raise KeyError("gold")
        return [1.0] * len(completions)

    skip = {"reward.on_error": "skip", "reward.max_error_rate": 1.0}
    trainer = trained(tmp_path, args=config(tmp_path, overrides=skip), reward_funcs=[digits, breaks])
    assert trainer.state.global_step == 2


# ---- training


def test_a_run_learns_and_logs_by_trls_names(tmp_path: Path) -> None:
    trainer = trained(tmp_path, args=config(tmp_path, max_steps=30, per_device_train_batch_size=32))
    history = trainer.state.log_history
    assert [entry["step"] for entry in history] == [*range(1, 31), 30]
    assert history[29]["reward"] > history[0]["reward"] + 0.2
    names = {"loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "num_tokens"}
    names |= {"rewards/digits/mean", "rewards/digits/std", "entropy", "step_time", "completions/clipped_ratio"}
    names |= {f"completions/{kind}_length" for kind in ("mean", "min", "max", "mean_terminated", "max_terminated")}
    assert names <= set(history[0])
    assert history[-1].keys() >= {"train_runtime", "train_loss", "epoch"}
    assert (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch) == (30, 30, 15.0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[29])["reward_mean"] == history[29]["reward"]
    assert (tmp_path / "run" / "checkpoints" / "step-00000030" / "model" / "config.json").is_file()


def test_an_entry_holds_the_means_since_the_last_one(tmp_path: Path) -> None:
    every = trained(tmp_path / "a", args=config(tmp_path / "a", max_steps=5)).state.log_history
    thinned = trained(tmp_path / "b", args=config(tmp_path / "b", max_steps=5, logging_steps=2)).state.log_history
    assert [entry["step"] for entry in thinned] == [2, 4, 5, 5]  # what is left at the end, and the summary
    assert thinned[1]["reward"] == pytest.approx((every[2]["reward"] + every[3]["reward"]) / 2)
    assert thinned[1]["learning_rate"] == every[3]["learning_rate"]
    assert thinned[1]["num_tokens"] == every[3]["num_tokens"]


class Recorder(TrainerCallback):
    """Writes down what it is called with, and asks for what it was told to."""

    def __init__(self, **wishes: dict[int, bool]) -> None:
        self.wishes, self.called = wishes, []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.called.append((name, state.global_step))
            assert kwargs["model"] is not None
            assert args.output_dir is not None
            if name == "on_step_end":
                for wish, steps in self.wishes.items():
                    setattr(control, wish, steps.get(state.global_step, getattr(control, wish)))

        return event


def test_callbacks_are_called_as_transformers_calls_them(tmp_path: Path) -> None:
    recorder = Recorder(should_save={1: True}, should_evaluate={2: True}, should_training_stop={3: True})
    args = config(tmp_path, max_steps=8, logging_steps=2, save_strategy="no", per_device_train_batch_size=32)
    trained(tmp_path, args=args, callbacks=[recorder], eval_dataset=ROWS[:4])
    step = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    expected = ["on_init_end", "on_train_begin", "on_epoch_begin", *step, "on_save"]
    expected += [*step, "on_log", "on_log", "on_evaluate", "on_epoch_end"]  # two steps of eight prompts are an epoch
    expected += ["on_epoch_begin", *step, "on_save", "on_log", "on_epoch_end", "on_log", "on_train_end"]
    assert [name for name, _ in recorder.called] == expected
    assert dict(recorder.called)["on_step_end"] == 3


def test_early_stopping_stops(tmp_path: Path) -> None:
    args = config(
        tmp_path, max_steps=20, eval_strategy="steps", eval_steps=1, metric_for_best_model="reward", learning_rate=0.0
    )
    trainer = trained(tmp_path, args=args, eval_dataset=ROWS[:4], callbacks=[EarlyStoppingCallback(2)])
    assert trainer.state.global_step < 20
    assert trainer.state.best_metric is not None


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The reward on the evaluation rises and falls with the steps; the weights are those of its highest step."""
    seen: list[torch.Tensor] = []

    class Keeps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["model"].lm_head.weight.detach().clone())

    def best_second(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.evaluating:
            return [float(trainer_state.global_step == 2)] * len(completions)
        return digits(completions)

    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "num_generations_eval": 1}
    args = config(tmp_path, max_steps=3, metric_for_best_model="eval_reward", **evaluated)
    given = {"reward_funcs": best_second, "eval_dataset": ROWS[:2], "callbacks": [Keeps]}
    trainer = trained(tmp_path, args=args, **given)
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")
    assert torch.equal(trainer.model.lm_head.weight, seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize(
    ("fields", "lowest"),
    [
        ({}, True),  # transformers' default: the loss
        ({"metric_for_best_model": "reward"}, False),
        ({"metric_for_best_model": "eval_rewards/digits/mean", "greater_is_better": False}, True),
        ({"metric_for_best_model": "entropy"}, False),
        ({"metric_for_best_model": "eval_completions/mean_length", "greater_is_better": True}, False),
    ],
)
def test_any_metric_of_an_evaluation_chooses_the_best(fields: dict[str, Any], lowest: bool, tmp_path: Path) -> None:
    args = config(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, **fields
    )
    trainer = trained(tmp_path, args=args, eval_dataset=ROWS[:8])
    name = "eval_" + (args.metric_for_best_model or "loss").removeprefix("eval_")
    seen = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    best = (min if lowest else max)(seen.values())
    assert list(seen) == [1, 2, 3]
    assert trainer.state.best_metric == best
    assert seen[trainer.state.best_global_step] == best
    assert trainer.evaluate()[name] == best  # the same completions are drawn, by the weights of that step


def test_several_evaluations_are_told_apart_by_name(tmp_path: Path) -> None:
    """As in TRL: each data set's metrics have its name, and by its name one of them says which checkpoint is best."""
    parts = {"easy": ROWS[:2], "hard": ROWS[2:6]}
    args = config(tmp_path, eval_strategy="steps", eval_steps=2, metric_for_best_model="eval_hard_reward")
    trainer = trained(tmp_path, args=args, eval_dataset=parts)
    rewards = [[name for name in entry if name.endswith("_reward")] for entry in trainer.state.log_history]
    assert [names for names in rewards if names] == [["eval_hard_reward"], ["eval_easy_reward"]]
    assert trainer.state.best_metric == next(
        e["eval_hard_reward"] for e in trainer.state.log_history if "eval_hard_reward" in e
    )
    assert {"eval_easy_reward", "eval_hard_reward", "eval_hard_rewards/digits/mean"} <= set(trainer.evaluate())


def test_what_scripts_ask_of_a_trainer_beside_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained(tmp_path)
    assert trainer.accelerator.is_main_process
    assert (trainer.accelerator.num_processes, trainer.accelerator.device) == (1, trainer.args.device)
    assert len(trainer.train_dataset) == 16
    trainer.log_metrics("train", {"train_loss": 0.12345, "train_samples": 16})
    assert "train_loss    = 0.1235\n  train_samples = 16" in capsys.readouterr().out
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_metrics("eval", {"eval_reward": 1.0})
    folder = tmp_path / "run"
    assert json.loads((folder / "train_results.json").read_text()) == {"train_loss": 0.5}
    assert json.loads((folder / "all_results.json").read_text()) == {"train_loss": 0.5, "eval_reward": 1.0}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("tokenizer", "GRPOTrainer(tokenizer=…) is not an argument. Use processing_class."),
        ("ref_model", "Use beta in args: the reference is the model as training begins."),
        ("reward_fns", "Did you mean reward_funcs?"),
        ("learning_rate", "Settings go into args=GRPOConfig(…)."),
    ],
)
def test_an_argument_that_is_not_there_names_the_one_that_is_meant(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        GRPOTrainer("builtin:tiny", digits, train_dataset=ROWS, **{argument: None})
    assert words in str(raised.value)


def test_scripts_may_pass_what_changes_nothing() -> None:
    """`data_seed` of the same number, a revision that is the only one, `do_sample` where samples are drawn anyway."""
    kwargs = {"revision": "main", "use_cache": False, "torch_dtype": "bfloat16", "attn_implementation": None}
    made = run_config(GRPOConfig(data_seed=42, generation_kwargs={"do_sample": True}, model_init_kwargs=kwargs))
    assert made.model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="Load the model yourself"):
        run_config(GRPOConfig(model_init_kwargs={"revision": "v2"}))


def test_callbacks_come_and_go(tmp_path: Path) -> None:
    trainer = GRPOTrainer("builtin:tiny", digits, config(tmp_path), ROWS)
    trainer.add_callback(Recorder)
    recorder = trainer.pop_callback(Recorder)
    assert isinstance(recorder, Recorder)
    assert trainer.pop_callback(Recorder) is None
    trainer.log({"mine": 1.0})
    assert trainer.state.log_history[-1]["mine"] == 1.0


def test_a_resumed_run_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", args=config(tmp_path / "whole", max_steps=4))
    stop = Recorder(should_training_stop={2: True})
    stopped = trained(tmp_path, args=config(tmp_path, max_steps=4), callbacks=[stop])
    resumed = GRPOTrainer("builtin:tiny", digits, config(tmp_path, max_steps=4), ROWS)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run_dir == stopped.run_dir
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = [[entry["step"] for entry in one.state.log_history] for one in (whole, resumed)]
    assert steps == [[1, 2, 3, 4, 4]] * 2
    tokens = [[entry.get("num_tokens") for entry in one.state.log_history] for one in (whole, resumed)]
    assert tokens[0] == tokens[1]


def test_a_finished_run_that_is_resumed_trains_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in TRL, where a job that is started once more comes to its end with the weights of the last checkpoint."""
    first = trained(tmp_path)
    again = GRPOTrainer("builtin:tiny", digits, config(tmp_path), ROWS)
    assert again.train(resume_from_checkpoint=True).global_step == 2
    assert "has already finished step 2 of 2" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))


def test_checkpoints_have_transformers_names_too(tmp_path: Path) -> None:
    """`get_last_checkpoint` finds the last one of the last run, which `from_pretrained` and a resumed run read."""
    args = config(tmp_path, max_steps=3, save_steps=1, save_total_limit=2)
    trainer = trained(tmp_path, args=args)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    last = get_last_checkpoint(args.output_dir)
    assert last == str(tmp_path / "run" / "checkpoint-3")
    loaded = AutoModelForCausalLM.from_pretrained(last)
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)
    history = json.loads(Path(last, "trainer_state.json").read_text())["log_history"]
    assert history == [entry for entry in trainer.state.log_history if "train_runtime" not in entry]

    longer = GRPOTrainer("builtin:tiny", digits, config(tmp_path, max_steps=4), ROWS)
    longer.train(resume_from_checkpoint=last)
    assert longer.run_dir == tmp_path / "run"
    assert get_last_checkpoint(args.output_dir) == str(tmp_path / "run" / "checkpoint-4")

    another = trained(tmp_path, args=config(tmp_path, max_steps=1))
    assert another.run_dir == tmp_path / "run-2"
    assert get_last_checkpoint(args.output_dir) == str(tmp_path / "run" / "checkpoint-1")
    assert (
        tmp_path / "run" / "checkpoint-1"
    ).resolve() == tmp_path / "run-2" / "checkpoints" / "step-00000001" / "model"


def test_a_checkpoint_of_transformers_own_trainer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-7"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    trainer = GRPOTrainer("builtin:tiny", digits, config(tmp_path), ROWS)
    with pytest.raises(ConfigError, match=r"start a new run from its weights, model='.*checkpoint-7'"):
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(tmp_path / "run")))
    with pytest.raises(ConfigError, match="has no whole checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    first, second = trained(tmp_path), trained(tmp_path)
    assert first.run_dir == tmp_path / "run"
    assert second.run_dir == tmp_path / "run-2"
    second.train()  # further
    assert second.run_dir == tmp_path / "run-3"


def test_stage_two_starts_from_stage_one(tmp_path: Path) -> None:
    """From its trainer, its model, its run folder, a checkpoint of it: the same weights every time."""
    one = trained(tmp_path)
    starts = [one.run_dir, one.run_dir / "checkpoints" / "step-00000002", one, one.model]
    weights = [value.clone() for value in one.model.parameters()]
    for start in starts:
        two = GRPOTrainer(str(start) if isinstance(start, Path) else start, digits, config(tmp_path), ROWS)
        assert all(torch.equal(a, b) for a, b in zip(weights, two.model.parameters(), strict=True))


def test_models_are_saved_with_a_card_and_an_adapter_may_be_merged(tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    adapter = LoraConfig(r=2, target_modules="all-linear")
    trainer = trained(tmp_path, peft_config=adapter, processing_class=build_tiny()[1])
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    trainer.save_model(str(tmp_path / "merged"), merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(merged(ids).logits, trainer.model(ids).logits, atol=1e-5)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "GRPO (Shao et al., 2024" in card
    assert "| `num_generations` | `4` |" in card


def test_an_optimizer_and_a_scheduler_of_the_program_s_are_used(tmp_path: Path) -> None:
    model, tokenizer = build_tiny()
    head = model.lm_head.weight
    body = [value for value in model.parameters() if value is not head]
    optimizer = torch.optim.SGD([{"params": [head], "lr": 0.2}, {"params": body}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = trained(tmp_path, model=model, processing_class=tokenizer, optimizers=(optimizer, scheduler))
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:2]] == [0.2, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_rloo_trains(tmp_path: Path) -> None:
    args = RLOOConfig(output_dir=str(tmp_path / "run"), **SMALL | {"max_steps": 2})
    trainer = RLOOTrainer("builtin:tiny", digits, args, ROWS)
    assert trainer.train().global_step == 2
    assert "kl" in trainer.state.log_history[0]


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--num_processes 1"):
        trained(tmp_path)


def test_settings_are_read_at_the_trainer(tmp_path: Path) -> None:
    trainer = GRPOTrainer("builtin:tiny", [digits], config(tmp_path, beta=0.1), ROWS)
    assert (trainer.num_generations, trainer.beta, trainer.reward_func_names) == (4, 0.1, ["digits"])
    assert trainer.reward_funcs == [digits]
    assert torch.equal(trainer.ref_model.lm_head.weight, trainer.model.lm_head.weight)
    trainer.end()
    with pytest.raises(AttributeError, match=r"has no 'tokenizer'\. Use processing_class"):
        _ = trainer.tokenizer
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        _ = trainer.nonsense


def test_a_subclass_may_override_what_is_called_and_nothing_else(tmp_path: Path) -> None:
    class Mine(GRPOTrainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0})

    trainer = Mine("builtin:tiny", digits, config(tmp_path), ROWS)
    trainer.train()
    assert [entry["mine"] for entry in trainer.state.log_history] == [1.0] * 3
    with pytest.raises(ConfigError, match=r"Other.compute_loss\(\) would never be called here. Use overrides="):
        type("Other", (GRPOTrainer,), {"compute_loss": lambda self: None})


def test_training_again_begins_a_history_of_its_own(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 2]
    assert trainer.state.log_history[0]["num_tokens"] < 100


def test_a_config_says_what_scripts_ask_of_it() -> None:
    args = GRPOConfig(per_device_eval_batch_size=4)
    assert (args.output_dir, args.train_batch_size, args.eval_batch_size) == ("trainer_output", 8, 4)
    assert args.parallel_mode.value == "not_parallel" or args.parallel_mode.name == "NOT_DISTRIBUTED"
    with args.main_process_first(desc="tokenise"):
        pass


def test_errors_name_the_field_beside_our_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"In GRPOConfig rollout.group_size is num_generations"):
        GRPOTrainer("builtin:tiny", digits, config(tmp_path, num_generations=1), ROWS)


def test_an_evaluation_is_of_the_policy_as_it_is_where_a_copy_samples_ahead(tmp_path: Path) -> None:
    """While it trains, asked for by a callback, and after it, with the weights of the best step loaded."""

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            asked.append((trainer.evaluate()["eval_reward"], fresh(trainer)))

    def fresh(trainer: GRPOTrainer) -> float:
        one = GRPOTrainer("builtin:tiny", digits, config(tmp_path / "fresh"), ROWS, ROWS[:6])
        one.model.load_state_dict(trainer.model.state_dict())
        return one.evaluate()["eval_reward"]

    asked: list[tuple[float, float]] = []
    ahead = {"rollout.async.enabled": True, "rollout.async.max_staleness": 2}
    trainer = GRPOTrainer(
        "builtin:tiny", digits, config(tmp_path, max_steps=4, overrides=ahead), ROWS, ROWS[:6], callbacks=[Asks]
    )
    trainer.train()
    asked.append((trainer.evaluate()["eval_reward"], fresh(trainer)))
    assert [one for one, _ in asked] == [other for _, other in asked]
    assert len({one for one, _ in asked}) > 1


def test_checkpoints_are_written_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert trained(tmp_path).state.global_step == 2
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "model").is_dir()
    assert "checkpoint-2 cannot be made (Operation not permitted)" in caplog.text


def test_prompts_longer_than_a_window_that_training_stays_within_are_evaluated_with_padding(tmp_path: Path) -> None:
    """To the same numbers as by a trainer whose training has such prompts and pads from the beginning."""
    tokenizer = build_tokenizer()
    build("mistral, window 16", vocab_size=len(tokenizer), sliding_window=24).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    long = [{"prompt": f"{number}+012345678901234567890123456789=", "answer": "1"} for number in range(4)]

    def evaluated(rows: Any, name: str) -> dict[str, float]:
        args = config(tmp_path / name, eval_strategy="steps", eval_steps=1)
        trainer = GRPOTrainer(str(tmp_path / "model"), digits, args, train_dataset=rows, eval_dataset=rows)
        found = trainer.evaluate(long)
        return {key: value for key, value in found.items() if "time" not in key and "second" not in key}

    packs = evaluated([{"prompt": "1+2=", "answer": "3"}] * 4, "short")
    assert "eval_loss" in packs
    assert packs == pytest.approx(evaluated(long, "long"), abs=1e-5)
