"""vLLM in the trainer's own process, on the trainer's GPU: asleep while the policy is updated."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_toolbox.engines import Traits
from grpo_toolbox.engines.inprocess import Drawn, InProcessEngine
from grpo_toolbox.engines.sampling import row_seeds
from grpo_toolbox.engines.sync.weights import Weights, served_weights
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import Prompt, Sampling


@dataclass(frozen=True)
class Colocation:
    """How vLLM shares the process."""

    model: str
    """The folder that it takes the architecture and the first weights from."""
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    """Over the ranks of the trainer, each of which holds its share."""
    gpu_memory_utilization: float = 0.3
    max_model_len: int | None = None
    max_rows: int = 256
    sleep: bool = True


class ColocateEngine(InProcessEngine):
    """Holds a second copy of the weights, which every sync brings up to date; asleep, it holds none."""

    traits = Traits(shares_weights=False, exact=False, logps="processed", drawn_logps=True)

    def __init__(self, policy: nn.Module, options: Colocation, **shared: Any) -> None:
        super().__init__(policy, **shared)
        self._llm = _load(options)
        self._sleeps = options.sleep and next(policy.parameters()).is_cuda
        self._asleep = False
        self._stale = self._version > 0
        self._calls = 0
        """Numbers requests, so that no two are ever alike."""

    def sync(self, version: int | None = None) -> int:
        """Count the version; the weights are taken over when they are next needed."""
        self._stale = True
        return super().sync(version)

    def close(self) -> None:
        """Give everything back."""
        self._llm.llm_engine.engine_core.shutdown()

    def _draw(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> Generator[Drawn]:
        self._wake()
        left = {name: row for row, name in enumerate(self._requests(prompts, group_size, sampling))}
        try:
            for output in self._ended():
                (drawn,) = output.outputs
                logps = [step[token].logprob for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
                row = left.pop(output.request_id)
                yield row, list(drawn.token_ids), logps, [(self._version, len(drawn.token_ids))]
        finally:
            self._llm.llm_engine.abort_request(list(left))
            self._rest()

    def _ended(self) -> Iterator[Any]:
        """Run what was handed in until all of it has ended; yield each as it does."""
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            self._check_cancelled()
            yield from (output for output in engine.step() if output.finished)

    def _requests(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[str]:
        """Hand every row in as a request of its own, and return their names."""
        from vllm import SamplingParams

        self._calls += 1
        names = []
        for row, seed in enumerate(row_seeds(sampling.seed, [prompt.id for prompt in prompts], group_size)):
            options: dict[str, Any] = {
                "max_tokens": sampling.max_new_tokens,
                "min_tokens": sampling.min_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "seed": seed,
                "stop_token_ids": list(self._stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            }
            names.append(f"{self._calls}-{row}")
            prompt = {"prompt_token_ids": list(prompts[row // group_size].ids)}
            self._llm.llm_engine.add_request(names[-1], prompt, SamplingParams(**options))
        return names

    def _wake(self) -> None:
        """Come up with the present weights: first they, then the room for keys and values."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        if self._asleep or self._stale:
            self._take(served_weights(self._model))
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False

    def _rest(self) -> None:
        """Give weights and cache back, until the next generation."""
        if self._sleeps:
            self._llm.sleep(level=2)
            self._asleep = True

    def _take(self, weights: Weights) -> None:
        def load(worker: Any) -> None:
            worker.model_runner.reload_weights(weights_iterator=iter(weights))

        self._llm.collective_rpc(load)
        self._llm.reset_prefix_cache()
        self._stale = False


def _load(options: Colocation) -> Any:
    # the workers then live in this process, which is what their weights are handed over in
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"rollout.vllm.mode=colocate needs vLLM in this environment, and it is not there ({error}); where it "
            "cannot be, because its dependencies exclude others, set rollout.vllm.mode=server and start one with "
            "`toolbox serve`."
        ) from error
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % options.tensor_parallel_size:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel_size={options.tensor_parallel_size} in the trainer's process is over its "
            f"ranks, of which there are {ranks}: set a divisor of that, or rollout.vllm.mode=server."
        )
    more: dict[str, Any] = {"distributed_executor_backend": "external_launcher"} if ranks > 1 else {}
    return LLM(
        model=options.model,
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_rows,
        enable_sleep_mode=options.sleep and _on_gpu(),
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
        **more,
    )


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
