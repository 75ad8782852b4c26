"""The same config on the installed TRL: its trainer samples, estimates and updates; everything around is the toolbox's.

Prompts (their token ids), reward, model, adapter, optimizer, schedule, evaluations, checkpoints, callbacks and the run
folder are those of `toolbox train`; `trl_config.py` says what each key becomes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_toolbox.backends.trl_config import algorithm_of, trl_arguments
from grpo_toolbox.backends.trl_steps import Generation, Steps, key_of
from grpo_toolbox.checkpoint import capture_rng, copy_parameters, latest_checkpoint, load_checkpoint
from grpo_toolbox.config.build import build_run
from grpo_toolbox.config.inputs import Inputs
from grpo_toolbox.config.schema import RunConfig
from grpo_toolbox.data import decode_completion
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.interrupts import GracefulStop
from grpo_toolbox.models.load import Reference, has_adapter, load_model, load_tokenizer, stop_token_ids
from grpo_toolbox.models.paths import resolve_model_path
from grpo_toolbox.run import Run
from grpo_toolbox.source import Synchronous
from grpo_toolbox.trainer import conduct
from grpo_toolbox.types import Prompt, RunInfo

log = logging.getLogger(__name__)


def train_on_trl(config: RunConfig, run: Run) -> dict[str, float]:
    """Train a run of `build_trl_run` with TRL's trainer until `max_steps`, a stop signal, or an error.

    A stop signal lets the step finish, or the steps that share its generation. The last finished step is saved.
    """
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        # what transformers is giving up and TRL still uses
        warnings.filterwarnings("ignore", message=".*will be removed in v6", category=FutureWarning)
        trainer, generation, rng = build_trainer(config, run, Path(scratch))
        return conduct(run, functools.partial(_steps, run, trainer, generation, rng))


def build_trl_run(config: RunConfig, inputs: Inputs, info: RunInfo) -> Run:
    """Build the run as ever, but for what TRL brings itself: the reference, the float32 head, the sampling."""
    theirs = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, fp32_head=False, gradient_checkpointing=False),
        rollout=dataclasses.replace(config.rollout, engine="hf"),
        trainer=dataclasses.replace(config.trainer, packing=False),
        objective={**config.objective, "beta": 0.0, "correction": "none"},
    )
    run = build_run(theirs, inputs, info)
    if run.pending:
        log.warning("resume: the rollouts that were left of a generation are dropped; TRL samples new ones.")
        run.pending.clear()
    run.source = Synchronous()  # what a run had made in the background is dropped, too
    return run


def build_trainer(config: RunConfig, run: Run, scratch: Path) -> tuple[Any, Generation, dict[str, Any]]:
    """Return TRL's trainer of the run, what it samples into, and the random states that the first step begins with.

    `scratch` is a folder for what TRL writes. Raises ConfigError where TRL refuses the run.
    """
    rng = capture_rng()
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    order = _order(run)
    decode = functools.partial(_decode, tokenizer)
    generation = Generation(run, order, decode, stop_token_ids(run.policy, tokenizer))
    _find_reference(config, run, scratch)
    try:
        trainer = _make(config, run, generation, tokenizer, order, scratch)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise ConfigError(f"TRL refuses this run: {str(error).partition('. ')[0]}.") from error
    generation.trainer = trainer
    if has_adapter(run.policy) and "ref" in trainer.model.peft_config:
        # a copy of the adapter as it is now, which a resumed run has trained; without it TRL takes the plain model
        trainer.model.delete_adapter("ref")
    if run.reference_every and config.objective["beta"]:
        run.reference = Reference(run.policy, net=trainer.ref_model)
        if run.finished:
            _restore_reference(run)
    if run.entropy_control:
        trainer.entropy_coef = run.entropy_control.value
        trainer._last_world_entropy = -math.inf if run.entropy_control.below else math.inf
    return trainer, generation, rng


def _steps(run: Run, trainer: Any, generation: Generation, rng: dict[str, Any], stop: GracefulStop) -> None:
    if run.finished >= run.info.max_steps:  # resumed for an evaluation that was owed
        return
    trainer.add_callback(Steps(run, generation, stop, rng))
    with stop.shield():
        trainer.train()


def _make(
    config: RunConfig, run: Run, generation: Generation, tokenizer: Any, order: Sequence[Prompt], scratch: Path
) -> Any:
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # else TRL tells the hub of every trainer
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    names = {"grpo": ("GRPOTrainer", "GRPOConfig"), "rloo": ("RLOOTrainer", "RLOOConfig")}[algorithm_of(config)]
    trainer_class, config_class = (getattr(trl, name) for name in names)
    longest = max(len(prompt.ids) for prompt in order) + config.rollout.max_new_tokens if order else 1
    args = config_class(**_batches(run, longest), **_surroundings(config, run, scratch), **trl_arguments(config))
    args._n_gpu = min(args.n_gpu, 1)  # else a second GPU is taken for a wish to copy the model onto it
    trainer = _hooked(trainer_class, generation)(
        model=run.policy,
        reward_funcs=generation.reward_functions(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [key_of(prompt) for prompt in order] or ["-"]}),
        processing_class=tokenizer,
        optimizers=(run.optimizer, _schedule(config, run)),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _hooked(trainer_class: Any, generation: Generation) -> Any:
    """Return TRL's class with three openings: prompts come encoded, sampling is timed, advantages are seen."""

    class Hooked(trainer_class):
        def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            return generation.prompt_ids(prompts), None, {}

        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            with generation.clock("rollout"):
                sampled = super()._generate_single_turn(*args, **options)
            generation.logps = sampled[1] if isinstance(sampled, tuple) else None
            return sampled

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            generation.deal(batch["advantages"])
            return batch

    return Hooked


def _batches(run: Run, longest: int) -> dict[str, int]:
    """Return how a step is split: TRL pads, so a micro-batch takes whole rows of the longest length."""
    rows = run.prompts_per_step * run.group_size
    most = max(1, run.settings.micro_batch_tokens // longest)
    size = next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)
    steps = run.generation.steps_per_generation
    passes = run.settings.ppo_epochs if steps == 1 else 1
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": rows // size,
        "steps_per_generation": rows // size * steps,
        "max_steps": max(run.info.max_steps - run.finished, 1) * passes,
    }


def _surroundings(config: RunConfig, run: Run, scratch: Path) -> dict[str, Any]:
    """Return what TRL leaves to the toolbox, and where it computes."""
    return {
        "output_dir": str(scratch),
        "use_cpu": run.device.type == "cpu",
        "bf16": run.settings.autocast is torch.bfloat16,
        "shuffle_dataset": False,  # the data comes in the order of the toolbox's own stream
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _schedule(config: RunConfig, run: Run) -> Any:
    """Return the toolbox's learning rates as a schedule of torch's, from the step that comes next."""
    peak, first = config.trainer.lr, run.finished
    passes = run.settings.ppo_epochs if run.generation.steps_per_generation == 1 else 1
    for group in run.optimizer.param_groups:  # a resumed optimizer has the rate of its last step
        group["lr"] = peak
        group.pop("initial_lr", None)

    def factor(taken: int) -> float:
        number = min(first + taken // passes + 1, run.info.max_steps)
        return run.lr_at(number) / peak if peak else 0.0

    return torch.optim.lr_scheduler.LambdaLR(run.optimizer, factor)


def _order(run: Run) -> list[Prompt]:
    """Return the prompts of all generations to come, in the order in which the toolbox's own trainer takes them."""
    steps = run.generation.steps_per_generation
    per_generation = steps * run.settings.ppo_epochs if steps > 1 else 1
    before = run.data.state_dict()
    remaining = math.ceil((run.info.max_steps - run.finished) / per_generation)
    order = [prompt for _ in range(remaining) for prompt in run.data.next()]
    run.data.load_state_dict(before)
    return order


def _find_reference(config: RunConfig, run: Run, scratch: Path) -> None:
    """Make the model's name lead to its weights, from which TRL loads its reference."""
    if not config.objective["beta"] or has_adapter(run.policy):
        return
    path, trusted = config.model.path, config.model.trust_remote_code
    resolved = resolve_model_path(path)
    folder = Path(resolved)
    if resolved.startswith("builtin:") or (folder.is_dir() and not (folder / "config.json").is_file()):
        resolved = str(scratch / "reference")  # made on the spot, or merged from an adapter
        original: Any = load_model(path, dtype=config.model.dtype, trust_remote_code=trusted)
        original.save_pretrained(resolved)
    policy: Any = run.policy
    policy.config._name_or_path = resolved


def _restore_reference(run: Run) -> None:
    newest = latest_checkpoint(run.info.run_dir / "checkpoints", warn=False)
    saved = load_checkpoint(newest, "cpu")["reference"] if newest else None
    if saved is not None and run.reference is not None:
        copy_parameters(run.reference.own_weights(), saved, "reference", "model.* settings")


def _decode(tokenizer: Any, ids: Sequence[int], finish_reason: str) -> str:
    return decode_completion(ids, tokenizer, finish_reason)
