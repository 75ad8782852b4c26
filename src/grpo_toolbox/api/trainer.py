"""GRPOTrainer and RLOOTrainer: TRL's names, arguments and methods over the parts of a run."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_toolbox.api.card import model_card, push_folder
from grpo_toolbox.api.circumstances import (
    OneProcess,
    in_fields,
    not_there,
    refuse_later,
    refuse_overridden,
    refuse_processes,
    refuse_unknown,
    without_bars,
)
from grpo_toolbox.api.configs import GRPOConfig
from grpo_toolbox.api.evaluations import evaluate_policy
from grpo_toolbox.api.events import Events, made_callback
from grpo_toolbox.api.folders import claimed, drop_links, free_folder, link_checkpoint, resumed_from
from grpo_toolbox.api.given import (
    described_reward,
    eval_parts,
    listed,
    model_named,
    reward_of,
    rows_of,
    size_of,
)
from grpo_toolbox.api.metrics import own_name
from grpo_toolbox.api.optimizers import Schedule, given_optimizer
from grpo_toolbox.api.reports import TrainOutput, metrics_table, write_metrics
from grpo_toolbox.api.translate import translate
from grpo_toolbox.api.translate_model import four_bit_keys
from grpo_toolbox.callbacks import build_callbacks
from grpo_toolbox.checkpoint import load_checkpoint
from grpo_toolbox.config.build import build_run, encoded
from grpo_toolbox.config.inputs import Given, Inputs, check_size
from grpo_toolbox.config.policy import described
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.interrupts import GracefulStop, Interrupted
from grpo_toolbox.models.load import save_pretrained
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import restore, train
from grpo_toolbox.types import RunInfo

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""transformers' name of what `trainer.state` is written into."""


class GRPOTrainer:
    """Trains a model by GRPO and its relatives on a data set and reward functions, with TRL's arguments.

    `model`: a hub name, folder, run folder or checkpoint of ours, a loaded model (with or without an adapter), or a
    trainer that has been trained. `reward_funcs`: functions, names of our rewards, reward models; a function is called
    with keyword arguments (`prompts`, `completions`, `completion_ids` and every column, each a list of one entry per
    completion; `trainer_state`, `log_extra`, `log_metric`) and returns a number or None for each. `train_dataset` has a
    column `prompt`, text or messages. Everything is checked, and the model loaded, before this returns; ConfigError,
    DataError or RewardError say what was given, what is allowed and what to do. What differs from TRL stands in
    docs/library.md, and is warned of where it matters.
    """

    config_class: Any = GRPOConfig
    is_in_train = False
    """Whether `train` is under way."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse to override what TRL's trainer calls and ours does not."""
        super().__init_subclass__(**more)
        refuse_overridden(cls)

    def __new__(cls, *given: Any, **named: Any) -> GRPOTrainer:
        """Refuse an argument that is not there, such as one of an older TRL, by the name of the one that is meant."""
        refuse_unknown(cls, named)
        return super().__new__(cls)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        refuse_later(tools=tools, environment_factory=environment_factory, rollout_func=rollout_func)
        refuse_processes()
        self.args = self.config_class() if args is None else args
        if not isinstance(self.args, self.config_class):
            raise ConfigError(
                f"args={type(self.args).__name__} must be a {self.config_class.__name__} of grpo_toolbox: import it "
                "from there, its fields are TRL's."
            )
        if train_dataset is None:
            raise ConfigError("train_dataset is missing: pass a datasets.Dataset or a list of dicts with a prompt.")
        model = model.model if isinstance(model, GRPOTrainer) else model
        reward = reward_of(reward_funcs, self.args.reward_weights, reward_processing_classes, self.args.overrides)
        keys = {
            "model.path": model_named(model),
            "reward": described_reward(reward),
            **four_bit_keys(quantization_config),
        }
        size = size_of(train_dataset)
        self._eval_parts, best = eval_parts(eval_dataset, self.args.metric_for_best_model)
        keys |= {"trainer.best_metric": own_name(best)}
        with in_fields(self.args):
            config, plain, pace, notes = translate(self.args, model=keys, rows=size, evaluates=bool(self._eval_parts))
        for note in notes:
            log.warning("%s: %s", type(self).__name__, note)
        most = None if size is not None else config.trainer.max_steps * config.rollout.prompts_per_step
        rows = rows_of(train_dataset, "train_dataset", most)
        first, *others = self._eval_parts or ["eval"]
        eval_rows = rows_of(self._eval_parts[first], "eval_dataset") if self._eval_parts else []
        check_size(config.rollout, len(rows))
        reward.check_columns([*rows[0]])
        reward.check_rows(rows)
        self._config, self._plain, self._optimizers = config, plain, optimizers
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._events = Events(self.args, callbacks or (), pace.passes)
        self._events.entry = self.log  # which a subclass may override
        self._events.eval_prefix = first
        self._events.evaluate_others = lambda: [self.evaluate(self._eval_parts[one], None, one) for one in others]
        self._given = Given(None if isinstance(model, str) else model, processing_class, peft_config)
        self._inputs = Inputs(rows, eval_rows, (), reward)
        with in_fields(self.args):
            self._run = self._built()
        self.reward_funcs, self.reward_func_names = listed(reward_funcs), [part.name for part in reward.components]
        self._events.fire("on_init_end")

    def _built(self) -> Run:
        """Build the run; a program's own optimizer and schedule come in when there is a model to look at."""
        optimizer, schedule = given_optimizer(self._optimizers)
        given = dataclasses.replace(self._given, optimizer=optimizer, lr_at=schedule)
        listeners = [*build_callbacks(self._config.callbacks), self._events]
        inputs = dataclasses.replace(self._inputs, callbacks=listeners, given=given)
        info = RunInfo(self._config.name, Path(str(self._config.run_dir)), self._config.trainer.max_steps, 1, {})
        run = build_run(self._config, inputs, info)
        _, self.processing_class = described(self._config.model, self._given)
        self._events.attach(run, self.processing_class)
        run.export = partial(self._export, run.export)
        self.lr_scheduler = schedule or Schedule.of(run)
        return run

    def _export(self, model_files: Callable[[Path], None], folder: Path) -> None:
        """Write what a checkpoint has beside the state of a run: the model, and the history so far."""
        model_files(folder)
        self.state.save_to_json(str(folder / STATE_FILE))

    # ---- what scripts read

    @property
    def model(self) -> Any:
        """The policy, as it is now."""
        return self._run.policy

    @property
    def optimizer(self) -> Any:
        """The optimizer of the policy."""
        return self._run.optimizer

    @property
    def state(self) -> Any:
        """transformers' TrainerState: `global_step`, `epoch`, `log_history`, …"""
        return self._events.state

    @property
    def control(self) -> Any:
        """transformers' TrainerControl."""
        return self._events.control

    @property
    def run_dir(self) -> Path:
        """The folder of the run: metrics.jsonl, config.yaml, checkpoints."""
        return self._run.info.run_dir

    @property
    def ref_model(self) -> Any:
        """The reference, where it is a model of its own: None without a KL, and beside an adapter."""
        return self._run.reference.net if self._run.reference is not None else None

    @property
    def accelerator(self) -> OneProcess:
        """What scripts ask of accelerate's Accelerator: the one process that trains, and its device."""
        return OneProcess(self._run.device)

    def __getattr__(self, name: str) -> Any:
        """Read what stands in `args`, such as `num_generations` and `beta`, at the trainer, as in TRL."""
        args = self.__dict__.get("args")
        if args is None or not hasattr(args, name):
            raise not_there(type(self), name)
        return getattr(args, name)

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes: always, one process trains."""
        return True

    is_local_process_zero = is_world_process_zero

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train to the end, and return steps, mean loss and times.

        `resume_from_checkpoint`: True goes on from the newest checkpoint of output_dir; a path names a run folder or a
        checkpoint. The last finished step is saved in any case, also on Ctrl-C, which is raised again afterwards.
        Called again, it trains the model further, in a new run folder.
        """
        if trial is not None:
            raise ConfigError(
                "train(trial=…) is transformers' search of hyper-parameters: use toolbox train --multirun."
            )
        if self._run.finished:
            self._given = dataclasses.replace(self._given, model=self._run.policy, adapter=None)
            self._events.begin_anew()
            self._run = self._built()
        output_dir = Path(str(self._config.run_dir)).expanduser()
        checkpoint = resumed_from(resume_from_checkpoint, str(output_dir))
        run_dir = checkpoint.parents[1] if checkpoint else free_folder(output_dir)
        self._events.link = partial(link_checkpoint, output_dir)
        config = dataclasses.replace(self._config, run_dir=str(run_dir))
        with (
            GracefulStop(),
            without_bars(),
            claimed(config, self._plain | {"run_dir": str(run_dir)}, checkpoint) as info,
        ):
            self._run.info = info
            if checkpoint is not None:
                restore(self._run, load_checkpoint(checkpoint, map_location="cpu"))
                self._run.engine.sync(info.first_step - 1)
                self._events.restore(checkpoint / "model" / STATE_FILE)
            else:
                drop_links(output_dir)
            self.is_in_train = True
            try:
                summary = train(self._run)
            finally:
                self.is_in_train = False
        if summary["interrupted"]:
            raise Interrupted(signal.Signals(int(summary["interrupted"])))
        self._after_training()
        metrics = dict(self._events.summary)
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _after_training(self) -> None:
        if self.args.load_best_model_at_end and self._run.best is not None:
            best = self.run_dir / "checkpoints" / f"step-{self._run.best[1]:08d}"
            if best.is_dir() and self._run.best[1] != self._run.finished:
                weights = load_checkpoint(best, map_location="cpu")["parameters"]
                self._run.policy.load_state_dict(weights, strict=False)
        if self.args.push_to_hub:
            self.push_to_hub()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the policy as it is now, as training would sample and score it; several data sets by name in a dict.

        Takes `num_generations_eval` completions for each prompt. Returns and logs TRL's names: `eval_reward`,
        `eval_loss`, `eval_entropy`, `eval_kl` with a beta, clipping, lengths, times; and `eval_pass@1`. All are over
        the whole evaluation, where TRL's are means over batches of `per_device_eval_batch_size`.
        """
        if eval_dataset is None and len(self._eval_parts) > 1:
            eval_dataset = {name.removeprefix("eval_"): part for name, part in self._eval_parts.items()}
        if isinstance(eval_dataset, Mapping):
            parts = [
                self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in eval_dataset.items()
            ]
            return {name: value for part in parts for name, value in part.items()}
        run = self._run
        prompts = run.eval_prompts
        if eval_dataset is not None:
            rows = rows_of(eval_dataset, "eval_dataset")
            run.reward.check_columns([*rows[0]])
            prompts = encoded(self._config, rows, self.processing_class, run.policy.config)
        if not prompts:
            raise ConfigError("evaluate() has no data: pass eval_dataset here or to the trainer.")
        found = evaluate_policy(self._config, run, self.processing_class, prompts, training=self.is_in_train)
        return self._events.evaluated(found, len(prompts), metric_key_prefix)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and show it to the callbacks."""
        self._events.log(logs)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a split, `train` or `eval`."""
        print(metrics_table(split, metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` into output_dir, and with `combined` add them to `all_results.json`."""
        write_metrics(Path(str(self._config.run_dir)).expanduser(), split, metrics, combined)

    def add_callback(self, callback: Any) -> None:
        """Add a transformers TrainerCallback, an object or its class."""
        self._events.callbacks.append(made_callback(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by the object or its class, and return it; None where there is none."""
        found = [one for one in self._events.callbacks if one is callback or type(one) is callback]
        if not found:
            return None
        self._events.callbacks.remove(found[0])
        return found[0]

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by the object or its class."""
        self.pop_callback(callback)

    def end(self) -> None:
        """Nothing is open after training: dashboards have been told of its end."""

    # ---- what is left of it

    def save_model(self, output_dir: str | None = None, *, merged: bool = False) -> None:
        """Write model, tokenizer and model card into a folder, by default output_dir; an adapter alone, or `merged`."""
        folder = Path(output_dir or str(self._config.run_dir)).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        save_pretrained(self._run.policy, self.processing_class, folder, merged=merged)
        self._write_card(folder)

    def save_state(self) -> None:
        """Write `trainer_state.json` into output_dir; checkpoints have all that resuming needs."""
        Path(str(self._config.run_dir)).mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(Path(str(self._config.run_dir)) / STATE_FILE))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write README.md, the model card, into output_dir."""
        folder = Path(str(self._config.run_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self._write_card(folder, model_name=model_name, dataset_name=dataset_name, tags=tags)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write the model into output_dir and upload it to `hub_model_id`; returns the commit, or a future of it."""
        args = self.args
        folder = Path(str(self._config.run_dir)).expanduser()
        self.save_model(str(folder))
        if kwargs:
            self._write_card(folder, **kwargs)
        return push_folder(
            folder,
            args.hub_model_id or folder.resolve().name,
            message=commit_message,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            private=private if private is not None else args.hub_private_repo,
            blocking=blocking,
        )

    def _write_card(self, folder: Path, **given: Any) -> None:
        tags = given.get("tags")
        card = model_card(
            self.config_class.algorithm,
            name=given.get("model_name") or self._config.name,
            base=self._config.model.path,
            dataset=given.get("dataset_name"),
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
            metrics=[entry for entry in self.state.log_history if "reward" in entry],
            settings=self.args.changed(),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
