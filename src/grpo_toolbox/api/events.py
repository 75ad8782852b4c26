"""transformers' callbacks beside our loop: its events as `on_*` calls with state and control, its log history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_toolbox.api.metrics import evaluation_metrics, logged_metrics
from grpo_toolbox.callbacks import Callback, Due
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.run import Run
from grpo_toolbox.types import RunInfo, Step


def made_callback(given: Any) -> Any:
    """Return a transformers callback, made if it is a class; ConfigError for anything else."""
    from transformers import TrainerCallback

    made = given() if isinstance(given, type) else given
    if not isinstance(made, TrainerCallback):
        raise ConfigError(f"callbacks: {given!r:.60} is no transformers.TrainerCallback: derive it from that.")
    return made


class Events(Callback):
    """Calls transformers callbacks as its Trainer does, and keeps `state.log_history` with TRL's metric names.

    Steps are optimizer steps: one of ours counts `passes` of them. An entry of the history holds the means since the
    entry before.
    """

    def __init__(self, args: Any, callbacks: Sequence[Any], passes: int) -> None:
        from transformers import TrainerControl

        self.args = args
        self.callbacks = [made_callback(one) for one in callbacks]
        self.begin_anew()
        self.control = TrainerControl()
        self.entry: Callable[[dict[str, float]], None] = self.log
        """What is asked to write an entry of the history."""
        self.link: Callable[[int, Path], Path] = lambda step, checkpoint: checkpoint
        """Gives a checkpoint its name of transformers'."""
        self.eval_prefix = "eval"
        """Of what the loop evaluates on."""
        self.evaluate_others: Callable[[], Any] = lambda: None
        """Evaluates on the other data sets, where there are several."""
        self._passes = passes
        self._run: Run | None = None
        self._shown: dict[str, Any] = {}
        self._window: list[Mapping[str, float]] = []
        self._epoch = 0
        self._in_epoch = False

    def attach(self, run: Run, tokenizer: Any) -> None:
        """Take the run whose events these are; the optimizer's own steps become events, too."""
        self._run = run
        self._shown = {"model": run.policy, "processing_class": tokenizer, "optimizer": run.optimizer}
        self._shown |= {"lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None}
        run.optimizer.register_step_pre_hook(lambda *_: self.fire("on_pre_optimizer_step"))
        run.optimizer.register_step_post_hook(lambda *_: self.fire("on_optimizer_step"))

    def begin_anew(self) -> None:
        """Begin with an empty history."""
        from transformers import TrainerState

        self.state = TrainerState(is_local_process_zero=True, is_world_process_zero=True)
        self.tokens = 0.0
        self._losses: list[float] = []

    def restore(self, saved: Path) -> None:
        """Go on with the state that a checkpoint was written with: its history, its best, its tokens."""
        from transformers import TrainerState

        if saved.is_file():  # not in checkpoints of `toolbox train`
            self.state = TrainerState.load_from_json(str(saved))
            self.tokens = float(self.state.num_input_tokens_seen)

    def fire(self, event: str, **more: Any) -> None:
        """Call every callback's `event`."""
        for callback in self.callbacks:
            control = getattr(callback, event)(self.args, self.state, self.control, **self._shown, **more)
            self.control = control or self.control

    def log(self, logs: Mapping[str, float]) -> None:
        """Write an entry of the history and show it to the callbacks."""
        entry = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control.should_log = False
        self.fire("on_log", logs=entry)

    # ---- our loop's side

    def on_start(self, run: RunInfo) -> None:
        assert self._run is not None
        self._started = time.perf_counter()
        self._first = run.first_step
        self._tell(run.first_step - 1)
        self.state.max_steps = run.max_steps * self._passes
        self.state.logging_steps, self.state.eval_steps = self.args.logging_steps, self._run.evaluation.every
        self.state.save_steps = self._run.save_every
        self.state.num_train_epochs = math.ceil(self._run.prompts_per_step * run.max_steps / max(1, self._rows()))
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.control.should_training_stop = False
        self.fire("on_train_begin")

    def on_begin(self, number: int) -> None:
        if self._in_epoch and self._epoch_ends():
            self._end_epoch()
        if not self._in_epoch:
            self._in_epoch, self._epoch = True, math.floor(self._data_epoch())
            self.control.should_epoch_stop = False
            self.fire("on_epoch_begin")
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.fire("on_step_begin")

    def on_update(self, step: Step, due: Due) -> None:
        metrics = logged_metrics(step, getattr(self.args, "loss_type", None))
        self.tokens += metrics.pop("num_tokens")
        self._window.append({**metrics, "num_tokens": self.tokens})
        self._losses.append(step.metrics.get("loss", math.nan))
        self._tell(step.number)
        self.control.should_log = self._is_logged(step.number)
        self.control.should_evaluate, self.control.should_save = due.evaluate, due.save
        self.fire("on_step_end")
        due.evaluate, due.save = self.control.should_evaluate, self.control.should_save
        self._due = due

    def on_step(self, step: Step) -> None:
        if self.control.should_log and self._window:
            self._log_window()
        evaluated = {name: step.metrics[name] for name in step.metrics if name.startswith(("eval/", "time/eval"))}
        if evaluated:
            assert self._run is not None
            self.evaluated(evaluated, len(self._run.eval_prompts), self.eval_prefix)
            self._remember_best(step.number)
            self.evaluate_others()
        if step.number:
            self._due.save = self._due.save or self.control.should_save
            self._due.stop = self.control.should_training_stop or self.control.should_epoch_stop

    def on_save(self, number: int, folder: Path) -> None:
        self.control.should_save = False
        link = self.link(number * self._passes, folder)
        if self._run is not None and self._run.best is not None and self._run.best[1] == number:
            self.state.best_model_checkpoint = str(link)
        self.fire("on_save")

    def on_end(self, summary: Mapping[str, float]) -> None:
        if self._window:
            self._log_window()
        if self._in_epoch:
            self._end_epoch()
        seconds = time.perf_counter() - self._started
        done = self.state.global_step - (self._first - 1) * self._passes
        losses = [one for one in self._losses if math.isfinite(one)]
        self.summary = {
            "train_runtime": seconds,
            "train_steps_per_second": done / seconds,
            "train_samples_per_second": done / self._passes * self._samples() / seconds,
            "train_loss": sum(losses) / len(losses) if losses else 0.0,
            "total_flos": self.state.total_flos,
        }
        self.entry(dict(self.summary))
        self.fire("on_train_end")

    # ----

    def evaluated(self, found: Mapping[str, float], prompts: int, prefix: str = "eval") -> dict[str, float]:
        """Log an evaluation in TRL's words, tell the callbacks, and return it."""
        size, loss = self.args.per_device_eval_batch_size, getattr(self.args, "loss_type", None)
        metrics = evaluation_metrics(found, loss, prompts=prompts, batch=size, tokens=self.tokens, prefix=prefix)
        metrics["epoch"] = self.state.epoch
        self.entry(metrics)
        self.control.should_evaluate = False
        self.fire("on_evaluate", metrics=dict(metrics))
        return metrics

    def _remember_best(self, number: int) -> None:
        """Note the best evaluation; callbacks that hear of one compare it with the best before."""
        best = self._run.best if self._run is not None else None
        if best is not None and best[1] == number and self.args.metric_for_best_model is not None:
            self.state.best_metric, self.state.best_global_step = best[0], self.state.global_step

    def _log_window(self) -> None:
        names = dict.fromkeys(name for metrics in self._window for name in metrics)
        columns = {name: [metrics[name] for metrics in self._window if name in metrics] for name in names}
        means = {name: sum(values) / len(values) for name, values in columns.items()}
        latest = {name: columns[name][-1] for name in ("learning_rate", "num_tokens") if name in columns}
        self._window = []
        self.entry(means | latest)

    def _tell(self, number: int) -> None:
        self.state.global_step = number * self._passes
        self.state.epoch = self._run.data.epoch if self._run is not None else 0.0
        self.state.num_input_tokens_seen = int(self.tokens)

    def _is_logged(self, number: int) -> bool:
        strategy, step = str(getattr(self.args.logging_strategy, "value", self.args.logging_strategy)), number
        if self.args.logging_first_step and step == self._first:
            return True
        if strategy == "epoch":
            return self._epoch_ends()
        wanted = self.args.logging_steps
        every = math.ceil(wanted * self.state.max_steps) if 0 < wanted < 1 else wanted
        before, now = (step - 1) * self._passes, step * self._passes
        return strategy == "steps" and every > 0 and now // every > before // every

    def _epoch_ends(self) -> bool:
        """Whether the data has been gone through once more since the epoch began."""
        return math.floor(self._data_epoch()) > self._epoch

    def _end_epoch(self) -> None:
        self._in_epoch = False
        self.fire("on_epoch_end")

    def _data_epoch(self) -> float:
        assert self._run is not None
        return self._run.data.epoch + 1e-9  # a sum of shares of an epoch may fall short of it by rounding

    def _rows(self) -> int:
        assert self._run is not None
        return len(self._run.data)

    def _samples(self) -> int:
        assert self._run is not None
        return self._run.prompts_per_step * self._run.group_size
