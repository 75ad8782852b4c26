"""TRL's side, in a process of its own: `GRPOTrainer` as its users run it, on a given workload.

Chosen in its favour: no gradient checkpointing (its default computes every forward pass twice), beta=0 (no reference
model), one generation per optimizer step with the whole batch in it (no pass for old log-probs), no logging to disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from forcing import EndRows
from probe import Stages, answer, count_backward, finish, forget_peak, job_of, peak_gib, resident_gib
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from weights import plain_model, warm_optimizer, warm_up
from workloads import Workload, exact_prompts, fixed_reward, prompt_rows, reached

from grpo_toolbox.data.builtin import additions
from grpo_toolbox.models.tiny import build_tiny
from grpo_toolbox.rewards.exact import exact_match


class Recorder(TrainerCallback):
    """Writes down every optimizer step."""

    def __init__(self, stages: Stages, device: str) -> None:
        self._stages, self._device = stages, device
        self._started = self._cpu = 0.0
        self.steps: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the step's clock."""
        self._stages.taken()
        finish(self._device)
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the step's times."""
        finish(self._device)
        self.steps.append(
            {
                "seconds": time.perf_counter() - self._started,
                "cpu_seconds": time.process_time() - self._cpu,
                "stages": self._stages.taken(),
                "peak_gib": peak_gib(self._device),
                "completion_tokens": sum(self.lengths),
            }
        )

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep what shows that the step had a gradient."""
        if "grad_norm" in logs:
            self.steps[-1]["grad_norm"] = logs["grad_norm"]


def measure_steps(job: dict[str, Any]) -> dict[str, Any]:
    """Train `job["steps"]` steps and return what each took."""
    load, device = Workload(**job["workload"]), job["device"]
    stages = Stages(device)
    recorder = Recorder(stages, device)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(load, job, recorder, scratch)
        warm_up(trainer.model, device)
        count_backward(stages)
        _count(trainer, load, stages)
        if not job.get("generate", True):
            trainer.model.generate = partial(_random_completions, load)
        loaded = resident_gib(device)
        trainer.train()
    if sorted(recorder.lengths) != sorted(load.lengths()):
        raise SystemExit(f"completions of {sorted(recorder.lengths)} tokens, not {sorted(load.lengths())}")
    return {"steps": recorder.steps, "loaded_gib": loaded}


def _trainer(load: Workload, job: dict[str, Any], recorder: Recorder, scratch: str) -> GRPOTrainer:
    model, tokenizer = plain_model(job["model"], job["device"])

    def reward(prompts: list[str], completion_ids: list[list[int]], kind: list[str], **_: Any) -> list[float]:
        recorder.lengths = [len(ids) for ids in completion_ids]
        return fixed_reward(prompts, kind)

    cuda = job["device"] == "cuda"
    settings = GRPOConfig(
        output_dir=scratch,
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=job.get("gradient_checkpointing", False),
        loss_type="grpo",
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=job["steps"],
        num_generations=load.group_size,
        max_completion_length=load.max_new_tokens,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=load.rows // job["micro_batch"],
        generation_kwargs={} if load.mean_new_tokens else {"min_new_tokens": load.max_new_tokens},
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(prompt_rows(load, tokenizer)),
        processing_class=tokenizer,
        peft_config=_adapter(load.lora_rank) if load.lora_rank else None,
        callbacks=[recorder],
    )


def _adapter(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _count(trainer: GRPOTrainer, load: Workload, stages: Stages) -> None:
    """Count the trainer's stages; where lengths are uneven, pass `generate` what ends the rows."""
    model = trainer.model
    options: dict[str, Any] = {}
    if load.mean_new_tokens:
        options["logits_processor"] = [EndRows(load.lengths(), load.prompt_tokens, trainer.eos_token_ids)]
    generate = stages.timed("rollout", model.generate)
    model.generate = lambda *args, **others: generate(*args, **others, **options)
    trainer._compute_loss = stages.timed("forward", trainer._compute_loss)
    create = trainer.create_optimizer

    def create_optimizer(*args: Any, **others: Any) -> Any:
        optimizer = create(*args, **others)
        warm_optimizer(optimizer)
        optimizer.step = stages.timed("optimizer", optimizer.step)
        return optimizer

    trainer.create_optimizer = create_optimizer


def _random_completions(load: Workload, input_ids: Tensor, **_: Any) -> Tensor:
    """Stand for `generate` where only training is looked at."""
    drawn = torch.randint(1000, 40000, (len(input_ids), load.max_new_tokens), device=input_ids.device)
    return torch.cat([input_ids, drawn], dim=1)


def measure_generate(job: dict[str, Any]) -> dict[str, Any]:
    """Generate the workload's completions `job["steps"]` times with plain `model.generate`."""
    load, device = Workload(**job["workload"]), job["device"]
    model, tokenizer = plain_model(job["model"], device)
    model.eval()
    prompts = exact_prompts(load.prompts, load.prompt_tokens, tokenizer)
    ids = torch.tensor([tokenizer(text).input_ids for text in prompts for _ in range(load.group_size)], device=device)
    warm_up(model, device)
    if job["cache"] == "continuous" and device == "cuda":
        model.to(torch.bfloat16)  # its own thread knows no autocast
    sampled = partial(_continuous if job["cache"] == "continuous" else _generated, model, ids, load, job["cache"])
    forget_peak(device)
    steps = []
    for turn in range(job["steps"]):
        torch.manual_seed(turn)
        finish(device)
        started = time.perf_counter()
        tokens = sampled()
        finish(device)
        seconds = time.perf_counter() - started
        steps.append({"seconds": seconds, "completion_tokens": tokens, "peak_gib": peak_gib(device)})
    return {"steps": steps}


@torch.inference_mode()
def _generated(model: Any, ids: Tensor, load: Workload, cache: str) -> int:
    """Sample with a cache of `generate` and return the number of new tokens."""
    options = {} if cache == "dynamic" else {"cache_implementation": cache, "disable_compile": True}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=load.max_new_tokens,
        min_new_tokens=load.max_new_tokens,
        **options,
    )
    return output[:, ids.shape[1] :].numel()


def _continuous(model: Any, ids: Tensor, load: Workload, _: str) -> int:
    """The same by transformers' continuous batching, with log-probs; nothing ends a row before its time."""
    settings = GenerationConfig(
        max_new_tokens=load.max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1
    )
    # its own choice is all memory that is free, which on a processor has to be cleared first
    blocks = len(ids) * (2 + (ids.shape[1] + load.max_new_tokens) // 64)
    sizes = {} if ids.is_cuda else {"page_size": 64, "num_blocks": blocks, "max_batch_tokens": 1024}
    batching = ContinuousBatchingConfig(return_logprobs=True, **sizes)
    found = model.generate_batch(ids.tolist(), settings, continuous_batching_config=batching, progress_bar=False)
    return sum(len(one.generated_tokens) for one in found.values())


class UntilReward(TrainerCallback):
    """Ends a run when the mean reward of ten steps reaches a goal; counts the seconds from the first step on."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self._started = 0.0
        self.rewards: list[float] = []
        self.seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock: everything is built."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self.seconds = time.perf_counter() - self._started
        control.should_training_stop = reached(self.rewards, self._goal)


def measure_learning(job: dict[str, Any]) -> dict[str, Any]:
    """Train the model, data and settings of `experiment=grpo_tiny` with a seed until its reward is reached."""
    goal = UntilReward(job["goal"])
    right = exact_match(extract="whole")

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        values = [value or 0.0 for value in right(completions=completions, answer=answer)]
        goal.rewards.append(sum(values) / len(values))
        return values

    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = build_tiny()
        model.save_pretrained(scratch)
        model.config._name_or_path = scratch  # where TRL loads its reference from
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=_tiny_settings(job, scratch),
            train_dataset=Dataset.from_list(additions()),
            processing_class=tokenizer,
            callbacks=[goal],
        )
        trainer.train()
    return {"seconds": goal.seconds, "optimizer_steps": len(goal.rewards), "rewards": goal.rewards}


def _tiny_settings(job: dict[str, Any], scratch: str) -> GRPOConfig:
    """Return TRL's names for what `experiment=grpo_tiny` sets; all 256 rows are one micro-batch, which is fastest."""
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=job["seed"],
        loss_type="grpo",
        beta=0.04,
        use_bias_correction_kl=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.2,
        max_steps=job["max_steps"],
        num_generations=16,
        max_completion_length=3,
        per_device_train_batch_size=256,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    given = job_of(sys.argv[1:])
    answer({"steps": measure_steps, "rollouts": measure_generate, "learning": measure_learning}[given["what"]](given))
