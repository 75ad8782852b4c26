"""The library's constructors against TRL's: built by the same arguments they have the same first gradient, and say the
same of an evaluation.

Both trainers run as they are, `train()` and `evaluate()` included; only sampling is replaced, by the same completions
on both sides. The policy has left its reference, so that a KL is felt from the first step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import grpo_toolbox
from grpo_toolbox.models.tiny import build_tiny
from replay import Replay

trl = pytest.importorskip("trl")

import huggingface_hub.constants  # noqa: E402

huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # a trainer announces itself when it is built

from datasets import Dataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

PROMPTS = ("1+2=", "10+20=")
END, LONGEST, GROUP = 1, 6, 4
SHARED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "num_generations": GROUP,
    "per_device_train_batch_size": GROUP * len(PROMPTS),
    "per_device_eval_batch_size": GROUP * len(PROMPTS),
    "max_completion_length": LONGEST,
}
HALVES = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 2}
RLOO = {"algorithm": "RLOO"}

CASES: dict[str, dict[str, Any]] = {
    "TRL's defaults": {},
    "dapo in two micro-batches": HALVES,
    "grpo": {"loss_type": "grpo", **HALVES},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.3},
    "KL without the ratio": {"beta": 0.3, "use_bias_correction_kl": False},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": False, **HALVES},
    "scaled by the batch": {"scale_rewards": "batch"},
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
    "whole completions": {
        **{"importance_sampling_level": "sequence", "loss_type": "grpo"},
        **{"beta": 0.1, "use_bias_correction_kl": False},  # with it ours takes each token's ratio, and says so
    },
    "cispo with entropy": {"loss_type": "cispo", "epsilon_high": 5.0, "entropy_coef": 0.05},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "where entropy is high": {"top_entropy_quantile": 0.3},
    "without what was cut off": {"mask_truncated_completions": True},
    "at another temperature": {"temperature": 0.7},
    "RLOO": RLOO,
    "RLOO, normalised, bounded": {**RLOO, "normalize_advantages": True, "reward_clip_range": (0.2, 0.9)},
}


def _completions() -> dict[str, list[list[int]]]:
    """Four for each prompt, all different, some of them cut off."""
    draw = random.Random(1)
    given: dict[str, list[list[int]]] = {}
    for prompt in PROMPTS:
        lengths = (2, LONGEST, 4, LONGEST)
        rows = [[draw.randrange(3, 21) for _ in range(length)] for length in lengths]
        given[prompt] = [
            row if len(row) == LONGEST and place == 1 else [*row[:-1], END] for place, row in enumerate(rows)
        ]
    return given


COMPLETIONS = _completions()
CENTRAL = ("TRL's defaults", "grpo with KL", "dr_grpo", "RLOO")
SLOW = pytest.mark.slow
CLOSE = {"rel": 1e-4, "abs": 1e-6}


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(ids) % 9 / 8 for ids in completion_ids]


def brevity(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    return [None if len(ids) == 2 else 1 / len(ids) for ids in completion_ids]


class Gradient(TrainerCallback):
    """Keeps what the optimizer is given."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.found = torch.cat([value.grad.flatten() for _, value in sorted(model.named_parameters())])


@cache
def model_folder(folder: Path) -> str:
    model, tokenizer = build_tiny(seed=1)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def built(library: Any, folder: Path, callback: Gradient, fields: dict[str, Any]) -> Any:
    """Build a trainer of a library by its constructor; then give the policy other weights than the reference's."""
    fields = dict(fields)
    algorithm = fields.pop("algorithm", "GRPO")
    args = getattr(library, f"{algorithm}Config")(output_dir=str(folder / library.__name__), **SHARED | fields)
    data = Dataset.from_dict({"prompt": list(PROMPTS)})
    trainer = getattr(library, f"{algorithm}Trainer")(
        model=model_folder(folder),
        reward_funcs=[spread, brevity],
        args=args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[callback],
    )
    trainer.model.load_state_dict(build_tiny(seed=0)[0].state_dict())
    if library is grpo_toolbox:  # the trainer's own log-probs, where the engine's would do
        trainer._run.generation = replace(trainer._run.generation, reuse_logps=False)
        trainer._run.engine = Replay(COMPLETIONS, END)
        return trainer
    text = {tuple(trainer.processing_class(prompt)["input_ids"]): prompt for prompt in PROMPTS}

    def replay(prompt_ids: Sequence[Sequence[int]], *_: Any) -> Any:
        seen: Counter[str] = Counter()
        rows = []
        for prompt in (text[tuple(ids)] for ids in prompt_ids):
            rows.append(list(COMPLETIONS[prompt][seen[prompt]]))
            seen[prompt] += 1
        return rows if algorithm == "RLOO" else (rows, None)

    trainer._generate_single_turn = replay
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@dataclass(frozen=True)
class Found:
    """What a trainer said of an evaluation, and the gradient of the step that it took then."""

    evaluation: dict[str, float]
    gradient: Tensor


@cache
def found(library: Any, folder: Path, name: str) -> Found:
    callback = Gradient()
    trainer = built(library, folder, callback, CASES[name] | {"reward_weights": [1.0, 0.5]})
    evaluation = trainer.evaluate()
    trainer.train()
    return Found(evaluation, callback.found)


@pytest.mark.parametrize("name", [name if name in CENTRAL else pytest.param(name, marks=SLOW) for name in CASES])
def test_the_first_gradient_and_the_evaluation_are_trls(name: str, folder: Path) -> None:
    ours, theirs = (found(library, folder, name) for library in (grpo_toolbox, trl))
    assert theirs.gradient.norm() > 1e-3
    assert (ours.gradient - theirs.gradient).norm() < 1e-5 * theirs.gradient.norm()
    says_the_same(ours.evaluation, theirs.evaluation)


def says_the_same(ours: dict[str, float], theirs: dict[str, float]) -> None:
    compared = [key for key in theirs if not key.endswith(("_time", "_runtime", "_per_second"))]
    assert {"eval_loss", "eval_entropy", "eval_reward", "eval_completions/mean_length"} <= set(compared)
    assert {key: ours[key] for key in compared} == pytest.approx({key: theirs[key] for key in compared}, **CLOSE)


def test_an_evaluation_of_another_number_of_completions_says_what_trls_says(folder: Path) -> None:
    fields = {"num_generations_eval": 3, "per_device_eval_batch_size": 3 * len(PROMPTS), "beta": 0.1}
    ours, theirs = (built(library, folder, Gradient(), fields).evaluate() for library in (grpo_toolbox, trl))
    says_the_same(ours, theirs)


@pytest.mark.slow
def test_every_case_has_a_gradient_of_its_own(folder: Path) -> None:
    """Else parity would be cheap. Those that are another one where the ratio is 1 and all is one batch stand here."""
    same = {"dapo in two micro-batches", "bnpo", "vespo", "sapo"}
    each = {name: found(grpo_toolbox, folder, name).gradient for name in CASES if name not in same}
    for (one, mine), (other, theirs) in itertools.combinations(each.items(), 2):
        assert (mine - theirs).norm() > 1e-3 * mine.norm(), (one, other)
