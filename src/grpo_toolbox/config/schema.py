"""Everything that can be set, with its type and default; torch-free.

The groups `reward`, `advantage`, `objective` and `callbacks` are open mappings: their options are the keyword arguments
of the function that `name` chooses, and stand with their defaults in `conf/<group>/<option>.yaml`. What every reward
takes stands in `RewardConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict


@dataclass
class LoraConfig:
    """Low-rank adapters (PEFT)."""

    r: int = 0
    """Rank; 0 trains all weights."""
    alpha: float | None = None
    """Scale is alpha / r; null means 2·r."""
    dropout: float = 0.0
    """Of the adapter's input, while training."""
    target_modules: Any = "all-linear"
    """PEFT's name for a set of layers, or a list of layer names."""


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """A hub name, a local folder, builtin:tiny or builtin:smollm2."""
    dtype: str = "auto"
    """Of the weights: auto (float32), float32, bfloat16, float16."""
    attn_implementation: str | None = None
    """transformers' attention (sdpa, eager, …) for what is not packed; null lets it choose."""
    device_map: Any = None
    """auto spreads the model over the GPUs; null puts it on trainer.device."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    fp32_head: bool = False
    """Multiply the output head out in float32 where the rest runs in bfloat16 (ScaleRL)."""
    router_aux_loss_coef: float | None = 0.0
    """Mixture of experts: weight of the load-balancing loss; null takes the checkpoint's own."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    loader: str = "transformers"
    """Who loads the model: transformers, or unsloth where it is installed (one GPU)."""
    load_in_4bit: bool = False
    """Load the weights in 4 bits (bitsandbytes, on a GPU) and train an adapter on them: needs model.lora.r."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ColumnsConfig:
    """Which columns of the data hold what."""

    prompt: str = "prompt"
    """Text, or a list of messages {role, content}."""
    answer: str | None = "answer"
    """Null when the data has no gold answers."""


@dataclass
class DataConfig:
    """The prompts."""

    path: str = MISSING
    """A jsonl, csv or parquet file, a Hugging Face folder or hub name, builtin:additions, builtin:word_problems."""
    subset: str | None = None
    """Configuration name on the hub."""
    split: str = "train"
    """Split of a folder or hub name that is trained on."""
    eval_path: str | None = None
    """Other data to evaluate on."""
    eval_split: str | None = None
    """Split of data.path (or eval_path) to evaluate on."""
    eval_size: int = 0
    """Rows held out of training for evaluation, or the cap on eval_path or eval_split."""
    size: int | None = None
    """Cap on training rows; for built-in tasks the number made."""
    seed: int = 0
    """Of held-out rows and of built-in tasks; trainer.seed shuffles."""
    task: str | None = None
    """Task of builtin:word_problems."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    system_prompt: str | None = None
    """First message of every conversation that has none; needs chat prompts."""
    chat: bool = False
    """Send a text prompt as a user message through the chat template."""
    chat_template_kwargs: Any = None
    """Passed to the tokenizer's chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: int | None = None
    """Longest prompt taken; null: what the model's positions leave beside max_new_tokens."""
    on_long: str = "error"
    """A prompt that is too long: error or drop."""
    shuffle: bool = True
    """Draw a new order each epoch."""


@dataclass
class ServerConfig:
    """The servers of rollout.engine=vllm, sglang and http."""

    urls: Any = field(default_factory=lambda: ["http://127.0.0.1:8000"])
    """Addresses of the servers, which share the load; one, or a list."""
    model: str | None = None
    """The name they serve the policy under; null: the one they have."""
    api_key_env: str | None = None
    """Environment variable that holds the key they want; null sends none."""
    start_timeout_s: float = 300.0
    """How long to wait for servers that are not up yet when the run starts."""
    outage_timeout_s: float = 600.0
    """How long generation waits while no server answers, before the run stops with its state saved."""
    request_timeout_s: float = 600.0
    """Of one request, for the completions of a group; what takes longer is asked for again."""
    retries: int = 5
    """How often a completion is asked for again after an error of a server that is up."""


@dataclass
class AsyncConfig:
    """Rollouts that are made in the background while the trainer updates."""

    enabled: bool = False
    """Sample, score and filter in a thread of its own, with a copy of the weights."""
    max_staleness: int = 1
    """k: updates between the weights that draw rollouts and those that learn from them; 0 is synchronous training."""
    in_flight: str = "none"
    """When newer weights come to completions half-way: none (wait for the next rollouts), or go on with them and keep
    the cache, or recompute it."""
    on_stale: str = "drop"
    """What is done with rollouts older than that: drop their groups, or mask the tokens that are too old."""


@dataclass
class SyncConfig:
    """How the policy's weights come to rollout servers."""

    mode: str = "auto"
    """adapter (LoRA alone), folder (files), gloo or nccl (over the network), none; auto: the best on offer."""
    folder: str | None = None
    """Where files are written for the servers to read; null: memory or the run folder, for servers on this machine."""
    address: str | None = None
    """Of the trainer, as servers see it, for gloo; null: the one that the way to them starts from."""
    dtype: str = "auto"
    """Of what is sent: float32, bfloat16, float16; auto is that of the policy's weights."""
    in_flight: str = "drain"
    """What is under way at a sync: drain waits for its end; recompute and keep go on with the new weights, and a cache
    that is computed again or the former one."""
    timeout_s: float = 300.0
    """Seconds that one stage of a sync may take."""


@dataclass
class ProbeConfig:
    """The check after a sync that the engine has the trainer's weights."""

    every: int | None = None
    """Syncs between checks; 0 never checks. null: 1 for servers, 0 for engines on the policy's own weights."""
    canaries: int = 2
    """Rows of prompt text that engine and trainer put log-probs on."""
    tokens: int = 160
    """Length of a canary; a stale cache shows where it is above the server's block size (vLLM: 16, 128 on CPUs)."""
    limit: float | None = None
    """Largest |Δ log-prob| allowed, in nats; null: 4 times what is measured with equal weights before training."""
    on_mismatch: str = "stop"
    """What a gap beyond the limit does, after a second sync: stop the run with its state saved, or warn."""


@dataclass
class VllmConfig:
    """How `toolbox serve` starts a server, and how vLLM runs in the trainer's process."""

    mode: str = "server"
    """server (its own process, `toolbox serve` starts it) or colocate (in the trainer's process)."""
    python: str | None = None
    """The Python of the environment that has the server; null: TOOLBOX_VLLM_PYTHON, or the toolbox's own."""
    tensor_parallel_size: int = 1
    """GPUs that one model is spread over."""
    gpu_memory_utilization: float | None = None
    """Share of GPU memory it takes; null: 0.3 in the trainer's process, the server's own default elsewhere."""
    max_model_len: int | None = None
    """Tokens that a prompt and its completion may have; null: what the model has positions for."""
    sleep: bool = True
    """In the trainer's process: give the memory back while the policy is updated."""
    extra_args: Any = field(default_factory=list)
    """Further words for the server's command."""


@dataclass
class RolloutConfig:
    """How completions are sampled."""

    engine: str = "local"
    """local (in process, prompts prefilled once per group), hf (plain generate), or servers: vllm, sglang, http."""
    prompts_per_step: int = 8
    """P, the prompts of a batch."""
    group_size: int = 8
    """G, completions per prompt."""
    max_new_tokens: int = 256
    """Longest completion, in tokens; what is longer is cut off."""
    min_new_tokens: int = 0
    """The stop token cannot be drawn before this many tokens."""
    temperature: float = 1.0
    """Of sampling; log-probs of the update are taken at it, too."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Leave out tokens below this share of the likeliest token's probability."""
    steps_per_generation: int = 1
    """Optimizer steps that share one generation of prompts_per_step × this many prompts; later ones are off-policy."""
    reuse_logps: bool | None = None
    """Whether the sampler's log-probs serve as the trainer's own off-policy; null: where the engine says so, as those
    in process do in float32."""
    dynamic_sampling: bool = False
    """Sample on until prompts_per_step groups have rewards that differ; the others are not trained (DAPO)."""
    max_oversampling: int = 8
    """Ceiling of dynamic sampling, in multiples of the groups wanted."""
    max_empty_steps: int = 3
    """Dynamic sampling stops the run after so many steps in a row without any such group."""
    max_rows: int = 256
    """Rows decoded at a time, by each server where there are several."""
    quantize: str = "none"
    """float8: rollout.engine=local samples from linear layers in that precision, made anew from the weights of each
    step; another policy than the trained one, so set objective.correction with it. none: from the weights."""
    cuda_graphs: bool = False
    """Record a token's forward pass of rollout.engine=local as a CUDA graph and replay it; not yet run on a GPU."""
    server: ServerConfig = field(default_factory=ServerConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)


@dataclass
class RewardConfig:
    """What every reward takes beside its own options; `weighted_sum` hands the first four on to its parts."""

    on_error: str | None = None
    """What a failure of the function does: stop the run, or skip (leave out and count the rows). null: math and other
    functions that are tolerant by themselves skip, all others stop."""
    timeout_s: float | None = None
    """Seconds that one call of a function may take; one that takes longer has failed. null: any time."""
    max_error_rate: float = 0.05
    """With on_error=skip: share of error_window completions that may fail before the run stops with its state saved."""
    error_window: int = 500
    """Completions, the latest ones, among which failures are counted."""
    heldout: Any = None
    """A second reward, a name or {name: …, options}, that completions are scored by and that is never trained on."""
    heldout_share: float = 0.25
    """Share of each group's completions that it scores; at least one of each."""
    heldout_window: int = 20
    """W: the last W, 2·W and 4·W steps are compared with as many before them."""
    on_hacking: str = "warn"
    """What it does where the training reward rises and the held-out one does not: warn, or stop the run."""


@dataclass
class CriticConfig:
    """The value model of advantage=gae; other estimators have none."""

    path: str | None = None
    """Where its weights start, with the policy's tokenizer; null: at the policy's, without an adapter."""
    lr: float = 1e-5
    """Learning rate, constant."""
    clip: float | None = 0.2
    """How far a value may move from the one the rollouts were judged by before its gradient ends; null: any way."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm; inf never does (.inf in YAML)."""
    pretrain_steps: int = 0
    """For so many steps the critic alone learns, and the policy stays as it is."""


@dataclass
class TrainerConfig:
    """The loop and the optimizer."""

    name: str = "toolbox"
    """toolbox, or trl: TRL's trainer with the same config."""
    algorithm: str | None = None
    """With trainer.name=trl: grpo or rloo; null: rloo where advantage=rloo, else grpo."""
    max_steps: int = 100
    """Batches of rollouts to train on."""
    stages: Any = None
    """Runs one after the other, a list of {name: …, keys to change}; each goes on from the model of the one before."""
    seed: int = 0
    """Of sampling, of the order of the data, and of a fresh adapter."""
    lr: float = 1e-6
    """Peak learning rate."""
    schedule: str = "constant"
    """constant, linear or cosine, after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of lr."""
    optimizer: str = "adamw"
    """adamw, or adamw_8bit, whose state takes a quarter of the memory (bitsandbytes, on a GPU)."""
    weight_decay: float = 0.0
    """AdamW's."""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to AdamW's denominator."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm; inf never does (.inf in YAML)."""
    ppo_epochs: int = 1
    """Optimizer steps on each batch of rollouts."""
    micro_batch_tokens: int | None = None
    """Tokens forwarded and kept for backward at a time; changes memory and speed, not the gradient. null: 1024 on a
    processor, 8192 on an accelerator."""
    reference_every: int = 0
    """Steps between refreshes of the reference, π_ref ← mix·π + (1 − mix)·π_ref; 0 keeps it."""
    reference_mix: float = 1.0
    """1 resets the reference to the policy (ProRL); 0.6 is TR-DPO's."""
    reference_resets_optimizer: bool = False
    """With each refresh the moments of the policy's optimizer start from zero (ProRL)."""
    packing: bool = True
    """Forward each prompt once and no padding; models that cannot are padded and say so."""
    recompute_mlp: bool = False
    """Compute the wide activations of gated MLPs twice instead of keeping them for backward, in float32 on a processor:
    a third less memory for activations, about a tenth more time."""
    skip_zero_advantage: bool = True
    """Do not forward rows that carry no gradient."""
    recompute_old_logps: bool = False
    """On-policy, compute old log-probs in a pass of their own; the first pass over a batch says the same anyway."""
    precision: str = "auto"
    """Of the forward pass: auto (bfloat16 on a GPU, else float32), float32 or bfloat16."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1, mps."""
    eval_every: int = 0
    """Steps between evaluations; 0 never evaluates."""
    eval_at_start: bool = True
    """Whether there is an evaluation before the first step."""
    eval_completions: int = 1
    """Completions for each prompt of an evaluation."""
    eval_temperature: float | None = 0.0
    """0 evaluates the likeliest completion; null draws as in training."""
    eval_loss: bool = False
    """Whether an evaluation computes the training loss and its terms (entropy, KL, clipping), too."""
    best_metric: str = "eval/reward"
    """Of evaluations: which one says what the best checkpoint is."""
    best_is: str = "highest"
    """highest, or lowest."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, beside the best."""
    resume: bool = False
    """Go on in run_dir from its newest whole checkpoint."""
    load_optimizer: bool = True
    """Resume with the optimizer's moments; false starts them from zero, once."""


@dataclass
class RunConfig:
    """One training run."""

    name: str = "run"
    """Names the run folder."""
    run_dir: str | None = None
    """Default: runs/<name>-<date>."""
    resume: str | None = None
    """Run folder to go on in."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: dict[str, Any] = field(default_factory=lambda: vars(RewardConfig()))
    advantage: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)


def schema_node() -> DictConfig:
    """Return the schema as Hydra composes it: `async_` is `async` there, which in Python is no name."""
    node: Any = OmegaConf.structured(RunConfig)
    with open_dict(node.rollout):
        inner = node.rollout.async_
        del node.rollout["async_"]
        node.rollout["async"] = inner
    return node


def from_composed(composed: Any) -> RunConfig:
    """Return the records of a composed config, with `async` under its name in Python again."""
    config: RunConfig = OmegaConf.to_object(composed)  # type: ignore[assignment]
    config.rollout.async_ = vars(config.rollout).pop("async")
    return config
