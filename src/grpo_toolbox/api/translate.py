"""From TRL's fields to a `RunConfig`, with what is worth saying about the difference; torch-free."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_toolbox.api.configs import DEFAULT_FOLDER, Arguments
from grpo_toolbox.api.translate_model import model_keys
from grpo_toolbox.api.translate_rl import advantage_keys, objective_keys, vllm_keys
from grpo_toolbox.config.check import check_config
from grpo_toolbox.config.fields import direct_fields
from grpo_toolbox.config.keys import known_keys
from grpo_toolbox.config.options import check_named
from grpo_toolbox.config.schema import RunConfig, from_composed, schema_node
from grpo_toolbox.errors import ConfigError, suggest

LOGGERS = ("wandb", "tensorboard", "trackio")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
NEVER = 10**9
"""Steps between checkpoints where none is written by number."""


@dataclass(frozen=True)
class Pace:
    """How a run is cut into steps."""

    prompts: int
    """Prompts of an optimizer step."""
    steps_per_generation: int
    passes: int
    """Optimizer steps that one step of ours takes: the passes over a batch that serves no later step."""
    per_epoch: int
    """Optimizer steps until the data has been gone through."""
    steps: int
    """Optimizer steps of the run."""

    def own(self, optimizer_steps: float) -> int:
        """Return how many steps of ours hold so many optimizer steps, at least one."""
        return max(1, math.ceil(optimizer_steps / self.passes))


def translate(
    args: Arguments, *, model: Mapping[str, Any], rows: int | None, evaluates: bool
) -> tuple[RunConfig, dict[str, Any], Pace, list[str]]:
    """Return the run that `args` describe, as records and plain values, its pace, and what to warn of.

    `model` are keys of the model that the program gave, `rows` the size of the data (None: without end), `evaluates`
    whether there is data to evaluate on.
    """
    notes: list[str] = []
    keys: dict[str, Any] = {
        key: one.ours(_plain(getattr(args, one.name)))
        for key, one in direct_fields(args.algorithm).items()
        if key != "advantage.normalize"
    }
    pace = pace_of(args, rows, notes)
    keys |= {
        "rollout.prompts_per_step": pace.prompts,
        "rollout.steps_per_generation": pace.steps_per_generation,
        "trainer.max_steps": pace.own(pace.steps),
    }
    keys |= _schedule(args, pace) | _rhythm(args, pace, evaluates) | _callbacks(args, pace) | _data(args, notes)
    keys |= objective_keys(args, notes) | advantage_keys(args) | vllm_keys(args, notes) | model_keys(args) | dict(model)
    keys["run_dir"] = args.output_dir or DEFAULT_FOLDER  # a script may have emptied it since
    keys["name"] = _of(args, "run_name") or Path(keys["run_dir"]).expanduser().resolve().name
    config, plain = _typed(keys | _overrides(args))
    return config, plain, pace, notes


def pace_of(args: Arguments, rows: int | None, notes: list[str]) -> Pace:
    """Cut the run into steps as TRL does; a step that holds no whole group is raised to one."""
    size, each, accumulated = (
        _count(args, name) for name in ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    completions = each * accumulated
    prompts = math.ceil(completions / size)
    if completions % size:
        notes.append(
            f"per_device_train_batch_size={each} × gradient_accumulation_steps={accumulated} is {completions} "
            f"completions for a step, and groups are of num_generations={size}: a step takes {prompts} whole "
            f"{'group' if prompts == 1 else 'groups'}, {prompts * size} completions. (TRL refuses this. Memory is "
            "bounded by overrides={'trainer.micro_batch_tokens': …}.)"
        )
    micro_steps = _micro_steps(args, each, accumulated)
    shared = 1 if micro_steps <= accumulated else micro_steps // accumulated
    if micro_steps > accumulated and micro_steps % accumulated:
        raise ConfigError(
            f"steps_per_generation={micro_steps} must be a multiple of "
            f"gradient_accumulation_steps={accumulated}, so that a generation serves whole optimizer steps."
        )
    iterations = _count(args, "num_iterations")
    wanted = prompts * shared
    per_epoch = max(1, (rows or wanted) // wanted) * shared * iterations
    passes = iterations if shared == 1 else 1
    given = _of(args, "max_steps")
    if given is not None and given > 0:
        steps = int(given)
    elif rows is None:
        raise ConfigError("the data set has no end (an IterableDataset): set max_steps.")
    else:
        steps = math.ceil(_of(args, "num_train_epochs") * per_epoch)
    if steps < 1:
        raise ConfigError(f"max_steps={given} and num_train_epochs={_of(args, 'num_train_epochs')} leave no step.")
    return Pace(prompts, shared, passes, per_epoch, steps)


def _micro_steps(args: Arguments, each: int, accumulated: int) -> int:
    steps, completions = _of(args, "steps_per_generation"), _of(args, "generation_batch_size")
    if steps is not None and completions is not None:
        raise ConfigError("generation_batch_size and steps_per_generation say the same twice: set one of them.")
    if completions is None:
        return steps or accumulated
    if completions % each:
        raise ConfigError(
            f"generation_batch_size={completions} must be a multiple of per_device_train_batch_size={each}."
        )
    return completions // each


def _schedule(args: Arguments, pace: Pace) -> dict[str, Any]:
    name, options = _of(args, "lr_scheduler_type"), dict(_of(args, "lr_scheduler_kwargs") or {})
    if name not in SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type={name!r} is not one of {', '.join(SCHEDULES)}.{suggest(name, SCHEDULES)} For another "
            "one pass optimizers=(optimizer, scheduler) to the trainer."
        )
    least = options.pop("min_lr_rate", None)
    rate = _of(args, "learning_rate")
    least = options.pop("min_lr", 0.0) / rate if least is None and rate else least or 0.0
    if options:
        raise ConfigError(f"lr_scheduler_kwargs takes min_lr and min_lr_rate here, not {', '.join(options)}.")
    share, warmup = _of(args, "warmup_ratio"), _of(args, "warmup_steps")
    warmup = share if share is not None and not warmup else warmup
    warmup = math.ceil(warmup * pace.steps) if 0 < warmup < 1 else warmup
    return {
        "trainer.schedule": SCHEDULES[name],
        "trainer.min_lr_ratio": least,
        "trainer.warmup_steps": 0 if name == "constant" else math.ceil(warmup / pace.passes),
    }


def _rhythm(args: Arguments, pace: Pace, evaluates: bool) -> dict[str, Any]:
    """When the run evaluates and saves."""
    evaluating, saving = _of(args, "eval_strategy"), _of(args, "save_strategy")
    _check_choice("eval_strategy", evaluating, ("no", "steps", "epoch"))
    _check_choice("save_strategy", saving, ("no", "steps", "epoch", "best"))
    if evaluating != "no" and not evaluates:
        raise ConfigError(f"eval_strategy={evaluating!r} has nothing to evaluate on: pass eval_dataset to the trainer.")
    if _of(args, "load_best_model_at_end") and "no" in (evaluating, saving):
        raise ConfigError(
            f"load_best_model_at_end with eval_strategy={evaluating!r} and save_strategy={saving!r}: the best model is "
            "one that was evaluated and saved, so set both to steps or epoch."
        )
    every = {"no": 0, "epoch": pace.own(pace.per_epoch)}
    eval_steps = _of(args, "eval_steps") or _of(args, "logging_steps")
    return {
        "trainer.eval_every": every.get(evaluating, _steps(eval_steps, pace)),
        "trainer.eval_at_start": bool(_of(args, "eval_on_start")),
        "trainer.eval_completions": _of(args, "num_generations_eval") or _of(args, "num_generations"),
        "trainer.eval_temperature": None,
        "trainer.eval_loss": True,
        "trainer.best_is": "lowest" if _of(args, "greater_is_better") is False else "highest",
        "trainer.save_every": {**every, "best": NEVER}.get(saving, _steps(_of(args, "save_steps"), pace)),
        "trainer.precision": {None: "auto", True: "bfloat16", False: "float32"}[_of(args, "bf16")],
        "trainer.device": "cpu" if _of(args, "use_cpu") else "auto",
        "trainer.optimizer": _optimizer(_of(args, "optim")),
        "trainer.reference_every": pace.own(_of(args, "ref_model_sync_steps")) if _of(args, "sync_ref_model") else 0,
    }


def _steps(value: float, pace: Pace) -> int:
    return pace.own(value * pace.steps if 0 < value < 1 else value)


def _optimizer(name: str) -> str:
    if "8bit" in name and "adamw" in name:
        return "adamw_8bit"
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"):
        return "adamw"
    raise ConfigError(
        f"optim={name!r} is not AdamW (adamw_torch, adamw_torch_fused, adamw_8bit, paged_adamw_8bit): build another "
        "optimizer yourself and pass optimizers=(optimizer, scheduler) to the trainer."
    )


def _callbacks(args: Arguments, pace: Pace) -> dict[str, Any]:
    wanted = _of(args, "report_to") or "none"
    wanted = [wanted] if isinstance(wanted, str) else [_plain(one) for one in wanted]
    found: dict[str, Any] = dict.fromkeys(("trace_rollouts", "memory_writer", "sample_logger", *LOGGERS))
    found["display"] = None if _of(args, "disable_tqdm") else {"mode": "auto"}
    for name in LOGGERS if "all" in wanted else wanted:
        if name == "none":
            continue
        if name not in LOGGERS:
            raise ConfigError(
                f"report_to={name!r} is not one of {', '.join(LOGGERS)}, none, all: pass transformers' callback of it "
                "in callbacks=[…] of the trainer."
            )
        found[name] = {} if name == "tensorboard" else {"project": _of(args, "project")}
    if found["trackio"] is not None and _of(args, "trackio_space_id"):
        found["trackio"]["space_id"] = _of(args, "trackio_space_id")
    if _of(args, "log_completions"):
        shown = _of(args, "num_completions_to_print") or pace.prompts
        each = {"completions": int(_of(args, "num_generations"))}
        found["sample_logger"] = {"every": _steps(_of(args, "logging_steps"), pace), "prompts": shown, **each}
    return {"callbacks": found}


def _data(args: Arguments, notes: list[str]) -> dict[str, Any]:
    longest = _of(args, "max_prompt_length")
    keys: dict[str, Any] = {"data.path": "given", "data.columns.answer": None}
    if longest is not None:
        notes.append(
            f"max_prompt_length={longest}: longer prompts are left out. (Older versions of TRL cut them, which leaves "
            "questions without their beginning; TRL 1.16 has no such field.)"
        )
        keys |= {"data.max_prompt_tokens": longest, "data.on_long": "drop"}
    options = dict(_of(args, "generation_kwargs") or {})
    if options.get("do_sample"):
        del options["do_sample"]
    taken = ("min_new_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    for name in options:
        if name not in taken:
            raise ConfigError(f"generation_kwargs takes {', '.join(taken)} here, not {name}.{suggest(name, taken)}")
    return keys | {f"rollout.{name}": value for name, value in options.items()}


def _overrides(args: Arguments) -> dict[str, Any]:
    given = dict(args.overrides or {})
    known = known_keys()
    for key in given:
        if key not in known and not key.startswith(("objective.", "advantage.", "callbacks.")):
            raise ConfigError(f"overrides={{{key!r}: …}} is not a key.{suggest(key, known)} docs/config.md lists them.")
    return given


def _typed(keys: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Put dotted keys into a checked config."""
    try:
        composed = schema_node()
        OmegaConf.set_struct(composed, True)
        for key, value in keys.items():
            OmegaConf.update(composed, key, value, force_add=True)
        config = from_composed(composed)
        plain: Any = OmegaConf.to_container(composed)
    except OmegaConfBaseException as error:  # a value of another type than the key has
        raise ConfigError(f"{error.full_key or 'a field'}: {str(error).splitlines()[0]}.") from error
    for group in ("advantage", "objective"):
        check_named(group, getattr(config, group))
    checked = _without_evaluation(config)
    check_config(checked)
    return config, plain


def _without_evaluation(config: RunConfig) -> RunConfig:
    """Return the config as it is checked: what is evaluated on was given as an object and stands under no key."""
    checked = copy.deepcopy(config)
    checked.trainer.eval_every = 0
    return checked


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}.{suggest(str(value), choices)}")


def _count(args: Arguments, name: str) -> int:
    value = getattr(args, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    return value


def _of(args: Arguments, name: str) -> Any:
    return _plain(getattr(args, name, None))


def _plain(value: Any) -> Any:
    """An enum of transformers' is the text it stands for."""
    return getattr(value, "value", value)
