"""Whole-run parity with TRL: ten optimizer steps on each side from the same weights end at the same parameters.

Both trainers run as they are: TRL's `train()` with its sampler, dataloader, accumulation, clipping and AdamW, and our
`train` on what `toolbox train` builds. Only sampling is replaced, by the same given completions on both sides; they are
scored by the same reward.

AdamW divides by the size of each parameter's own gradient: where that is as small as the rounding of a sum in another
order, a step may differ by a good part of the learning rate. With torch's eps of 1e-8 that leaves up to 4e-5 after ten
float32 steps of 1e-3 (up to 3e-6 with float64 weights); with 1e-6, above such gradients and far below the others, less
than 1e-6. Three things stay in float32 whatever the weights are: TRL's head, its rotary angles at the positions that
left padding shifts, and advantages, on both sides. Where none of them rounds, float64 runs agree to the last digits.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_toolbox.models.load import Reference
from grpo_toolbox.models.tiny import build_tiny
from grpo_toolbox.ops import logps_and_entropy
from grpo_toolbox.trainer import train
from replay import Replay
from toolbox_runs import all_metrics, built_run

pytest.importorskip("trl")

from trl_side import GROUP_SIZE, MAX_TOKENS, save_reference, trl_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

STEPS = 10
PROMPTS_PER_STEP = 2  # TRL forwards one group at a time and accumulates
PROMPTS = ("1+2=", "10+20=", "3-1=", "7*8=", "a+b=", "0+0+0=")  # three steps an epoch; TRL pads them, we do not
END = 1


def _given_completions() -> dict[str, list[list[int]]]:
    """Four completions for each prompt, all different, of one to seven tokens; about a third are cut off."""
    draw = random.Random(0)
    given, seen = {}, set()
    for prompt in PROMPTS:
        rows: list[list[int]] = []
        while len(rows) < GROUP_SIZE:
            ids = [draw.randrange(3, 21) for _ in range(draw.randint(1, MAX_TOKENS))]
            ids = ids if len(ids) == MAX_TOKENS else [*ids, END]
            if tuple(ids) not in seen:
                seen.add(tuple(ids))
                rows.append(ids)
        given[prompt] = rows
    return given


COMPLETIONS = _given_completions()
LEARNING_RATE = 1e-3
ADAM_EPS = 1e-6
MAX_NORM = 0.38
REWARDS = {tuple(ids): (sum(ids) % 9) / 8 for rows in COMPLETIONS.values() for ids in rows}


def given_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [REWARDS[tuple(ids)] for ids in completion_ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@dataclass(frozen=True)
class Case:
    """One method, by TRL's options and by ours."""

    theirs: dict[str, Any]
    ours: tuple[str, ...]
    passes: int = 1
    """Optimizer steps on each generation."""


TWO_PASSES = "grpo with KL, two steps on each generation"
CASES = {
    "dapo, TRL's defaults": Case({}, ("objective=dapo", "objective.clip_eps_high=0.2")),
    "grpo with KL": Case(
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, ("objective=grpo", "objective.beta=0.1")
    ),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        ("objective=dr_grpo", "advantage=dr_grpo", "objective.beta=0"),
    ),
    TWO_PASSES: Case(
        {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.01},
        ("objective=grpo", "objective.beta=0.1", "objective.kl_unbiased=true", "objective.clip_eps=0.01"),
        passes=2,
    ),
}


@cache
def _ours(name: str, folder: Path, exact: bool = False) -> tuple[Tensor, list[dict[str, Any]]]:
    """The parameters after our run, and its metrics."""
    case = CASES[name]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in COMPLETIONS))
    run = built_run(
        "experiment=grpo_tiny",
        "callbacks=none",
        f"run_dir={folder / str(len(list(folder.iterdir())))}",
        f"data.path={data}",
        "data.columns.answer=null",
        "data.shuffle=false",
        "reward=custom",
        f"reward.name={__name__}:given_reward",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.prompts_per_step={PROMPTS_PER_STEP}",
        f"rollout.max_new_tokens={MAX_TOKENS}",
        f"trainer.max_steps={STEPS // case.passes}",
        f"trainer.ppo_epochs={case.passes}",
        f"trainer.lr={LEARNING_RATE}",
        f"trainer.max_grad_norm={MAX_NORM}",
        f"trainer.adam_eps={ADAM_EPS}",
        "trainer.micro_batch_tokens=30",
        *case.ours,
    )
    run.engine = Replay(COMPLETIONS, END)
    if run.reference is not None:  # other weights than the policy's, as TRL's: the KL is felt from the first step
        run.reference = Reference(build_tiny(seed=1)[0])
    if exact:
        _double(run.policy)
        run.reference = Reference(_double(build_tiny(seed=1)[0]))
    train(run)
    return _flat(run.policy), all_metrics(run.info.run_dir)


def _theirs(name: str, folder: Path, exact: bool = False) -> Tensor:
    """The parameters after TRL's run."""
    trainer = trl_trainer(
        save_reference(folder / "reference"),
        rewards=[given_reward],
        prompts=list(COMPLETIONS),
        micro_batches=PROMPTS_PER_STEP,
        max_steps=STEPS,
        shuffle_dataset=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_epsilon=ADAM_EPS,
        weight_decay=0.0,
        max_grad_norm=MAX_NORM,
        save_strategy="no",
        disable_tqdm=True,
        **CASES[name].theirs,
    )
    text = {tuple(trainer.processing_class(prompt)["input_ids"]): prompt for prompt in COMPLETIONS}

    def replay(prompt_ids: Sequence[Sequence[int]], *_: Any) -> tuple[list[list[int]], None]:
        seen: Counter[str] = Counter()
        rows = []
        for prompt in (text[tuple(ids)] for ids in prompt_ids):
            rows.append(COMPLETIONS[prompt][seen[prompt]])
            seen[prompt] += 1
        return rows, None

    trainer._generate_single_turn = replay
    if exact:
        for model in (trainer.model, trainer.ref_model):
            _with_plain_head(_double(model))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return _flat(trainer.model)


def _double(model: nn.Module) -> nn.Module:
    """Put the model into float64, its norms too: Llama's round to float32 inside."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double()


def _with_plain_head(model: Any) -> None:
    """Have the model answer TRL's calls as its float32 head does, in the precision of the weights."""

    def forward(*args: Any, labels: Tensor, fused_lm_head: bool, **options: Any) -> SimpleNamespace:
        logits = type(model).forward(model, *args, **options).logits[:, :-1]
        targets = labels[:, 1:]
        found = logps_and_entropy(logits, targets.clamp(min=0))
        logps, entropy = (values.masked_fill(targets == -100, 0) for values in found)
        return SimpleNamespace(log_probs=logps, entropy=entropy, aux_loss=None)

    model.forward = forward


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for _, parameter in sorted(model.named_parameters())])


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_trls(name: str, folder: Path):
    ours, _ = _ours(name, folder)
    theirs = _theirs(name, folder)
    assert (theirs - _flat(build_tiny(seed=0)[0])).abs().max() > 9e-3  # ten steps of the learning rate, nearly
    assert (ours - theirs).abs().max() < 1e-5


def test_in_float64_they_are_trls_to_the_last_digits(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Prompts of one length, so that nothing is shifted; rewards of eighths, not scaled; a head in float64."""
    alike = {prompt.ljust(6, "0"): rows for prompt, rows in COMPLETIONS.items()}
    monkeypatch.setattr(sys.modules[__name__], "COMPLETIONS", alike)
    exact = Case(
        CASES[TWO_PASSES].theirs | {"scale_rewards": "none"}, (*CASES[TWO_PASSES].ours, "advantage=dr_grpo"), passes=2
    )
    monkeypatch.setitem(CASES, "exact", exact)
    ours, _ = _ours("exact", folder, exact=True)
    assert (ours - _theirs("exact", folder, exact=True)).abs().max() < 1e-12


def test_every_case_goes_elsewhere_and_has_something_to_agree_on(folder: Path):
    """Parity would be cheap where the gradient is never clipped, no ratio leaves its bounds and no KL is felt."""
    runs = {name: _ours(name, folder) for name in CASES}
    for (one, _), (other, _) in itertools.combinations(runs.values(), 2):
        assert (one - other).abs().max() > 1e-3
    assert all(max(line["grad_norm"] for line in metrics) > MAX_NORM for _, metrics in runs.values())
    assert min(line["grad_norm"] for line in runs["dr_grpo"][1]) < MAX_NORM
    assert all(line["clip_fraction"] > 0.2 for line in runs[TWO_PASSES][1])
    assert all(line["kl"] > 0.1 for name in ("grpo with KL", TWO_PASSES) for line in runs[name][1])
