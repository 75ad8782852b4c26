"""The single-file example against the package: independent code, the same numbers."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from grpo_toolbox.callbacks import Callback
from grpo_toolbox.config.build import build_run
from grpo_toolbox.config.inputs import check_inputs
from grpo_toolbox.config.schema import RunConfig, from_composed, schema_node
from grpo_toolbox.data.builtin import additions
from grpo_toolbox.engines.sampling import row_keys
from grpo_toolbox.engines.sampling import uniforms as package_uniforms
from grpo_toolbox.models.tiny import ALPHABET, build_tiny
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.run import Run
from grpo_toolbox.trainer import train
from grpo_toolbox.types import RunInfo, Step
from scratch_example import FILE, scratch, settings_of

# ---- the file itself -------------------------------------------------------------------------------------------------


def test_it_is_one_file_of_at_most_250_lines():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 250


def test_it_imports_nothing_of_the_package():
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            (argument,) = node.args  # a literal, or the flag --report-to with its choices
            imported |= {argument.value} if isinstance(argument, ast.Constant) else set(scratch.CHOICES["report_to"])
    third_party = imported - set(sys.stdlib_module_names) - {"none"}
    assert third_party == {"torch", "transformers", "tokenizers", "peft", "datasets", "trackio", "wandb"}


# ---- the same first steps as the package -----------------------------------------------------------------------------


class Recorder(Callback):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step)


def _config(*overrides: str) -> RunConfig:
    ConfigStore.instance().store(name="schema", node=schema_node(), provider="grpo_toolbox")
    with initialize_config_module("grpo_toolbox.conf", version_base="1.3"):
        composed = compose("train", ["experiment=grpo_tiny", "callbacks=none", *overrides])
    return from_composed(composed)


def _package_run(folder: Path, config: RunConfig) -> tuple[Run, Recorder]:
    info = RunInfo(name=config.name, run_dir=folder, max_steps=config.trainer.max_steps, first_step=1, config={})
    run = build_run(config, check_inputs(config), info)
    recorder = Recorder()
    run.callbacks = [recorder]
    return run, recorder


def _in_float64(run: Run) -> None:
    """Adam's first steps have the size of lr however small a gradient is: float32's rounding errors would show."""
    run.policy.double()
    if run.reference is not None:
        with run.reference.model() as reference:
            reference.double()


def _settings(config: RunConfig) -> dict[str, object]:
    """The package's resolved configuration in the example's words."""
    scale = {"group_relative": "group", "dr_grpo": "none"}[config.advantage["name"]]
    loss = {"seq_mean_token_mean": "grpo", "token_mean": "dapo", "constant": "dr_grpo"}[config.objective["loss_agg"]]
    low, high = config.objective["clip_eps"], config.objective["clip_eps_high"]
    return {
        "max_steps": config.trainer.max_steps,
        "prompts_per_step": config.rollout.prompts_per_step * config.rollout.steps_per_generation,
        "steps_per_generation": config.rollout.steps_per_generation,
        "group_size": config.rollout.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "seed": config.trainer.seed,
        "scale_rewards": scale,
        "loss_type": loss,
        "is_level": config.objective["ratio_level"],
        "clip_eps": low,
        "clip_eps_high": low if high is None else high,
        "beta": config.objective["beta"],
        "ppo_epochs": config.trainer.ppo_epochs,
        "lr": config.trainer.lr,
        "max_grad_norm": config.trainer.max_grad_norm,
    }


def test_the_default_settings_are_those_of_grpo_tiny():
    config = _config()
    settings = _settings(config)
    assert {name: scratch.TINY[name] for name in settings} == settings
    assert (config.trainer.schedule, config.trainer.warmup_steps, config.trainer.weight_decay) == ("constant", 0, 0.0)
    assert (config.advantage["std"], config.advantage["eps"]) == ("sample", 1e-4)
    assert config.objective["kl"] == "k3"
    assert (config.reward["name"], config.reward["extract"]) == ("exact_match", "whole")


VARIANTS = {
    "grpo_tiny": [],
    "two epochs": ["trainer.ppo_epochs=2", "trainer.lr=1e-2", "objective.clip_eps_high=0.28"],
    "no KL": ["objective.beta=0", "rollout.temperature=0.5"],
    "dr_grpo": ["advantage=dr_grpo", "objective.loss_agg=constant", "trainer.ppo_epochs=2"],
    "dapo": ["objective=dapo", "trainer.ppo_epochs=2"],
    "gspo": ["objective=gspo", "rollout.steps_per_generation=4", "rollout.prompts_per_step=4"],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_three_batches_of_rollouts_equal_those_of_the_package(overrides, tmp_path):
    config = _config(*overrides)
    portions = config.rollout.steps_per_generation  # a step of the package is one portion of a batch of rollouts
    config.trainer.max_steps = 3 * portions
    run, recorder = _package_run(tmp_path, config)
    _in_float64(run)
    model = copy.deepcopy(run.policy)
    train(run)
    theirs = [recorder.steps[first : first + portions] for first in range(0, 3 * portions, portions)]
    rollouts = [[rollout for step in steps for rollout in step.rollouts] for steps in theirs]
    prompts = [[one.prompt for one in batch[:: config.rollout.group_size]] for batch in rollouts]
    batches = [[([*prompt.ids], prompt.columns["answer"]) for prompt in batch] for batch in prompts]

    def uniforms(step: int, place: int, rows: int) -> torch.Tensor:
        seed = config.trainer.seed * 1_000_003 + theirs[step - 1][0].number
        ids = [prompt.id for prompt in prompts[step - 1]]
        return package_uniforms(row_keys(seed, ids, config.rollout.group_size), place)

    _, tokenizer, _, reward = scratch.tiny()
    settings = settings_of(**_settings(config))
    scored = clipped = 0.0
    ours = scratch.train(model, tokenizer, batches, reward, settings, uniforms)
    for steps, drawn, (texts, rewards, batch, metrics) in zip(theirs, rollouts, ours, strict=True):
        completions = [tuple(row[mask].tolist()) for row, mask in zip(batch["ids"], batch["mask"], strict=True)]
        assert completions == [one.ids for one in drawn]
        assert texts == [one.text for one in drawn]
        assert torch.equal(rewards, torch.cat([step.scores.total for step in steps]))
        advantages = torch.cat([step.advantages for step in steps])
        torch.testing.assert_close(batch["advantages"].view(rewards.shape), advantages, atol=1e-6, rtol=0)
        assert metrics["grad_norm"] == pytest.approx(steps[-1].metrics["grad_norm"], rel=1e-3)
        scored, clipped = scored + metrics["reward_mean"], clipped + metrics["clip_fraction"]
    for (name, value), other in zip(model.named_parameters(), run.policy.parameters(), strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert scored > 0  # else nothing was learnt, and equal by default
    assert (clipped > 0) == (config.trainer.ppo_epochs * portions > 1)


def test_the_tiny_task_is_the_package_s():
    model, tokenizer, examples, _ = scratch.tiny()
    theirs, their_tokenizer = build_tiny()
    assert model.config.to_dict() | {"dtype": "float32"} == theirs.config.to_dict()
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert model.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())
    assert tokenizer.get_vocab() == their_tokenizer.get_vocab()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    rows = additions()
    assert examples == [(their_tokenizer(row["prompt"])["input_ids"], row["answer"]) for row in rows]
    assert len(examples) == 55


def test_the_tiny_reward_is_the_package_s_on_every_text_the_model_can_write():
    """But for two signs in a row, which the package reads as one: only `--0` and `+-0` can be right, for 0."""
    texts = ["".join(letters) for size in range(4) for letters in itertools.product(ALPHABET, repeat=size)]
    texts = [text for text in texts if text[:2] not in ("--", "+-")]
    theirs = build_reward("exact_match", extract="whole")
    for answer in ("0", "7"):
        golds = [answer] * len(texts)
        assert [scratch.same_number(text, answer) for text in texts] == theirs(completions=texts, answer=golds)


# ---- the formulas, by hand -------------------------------------------------------------------------------------------


def test_advantages_of_three_right_of_eight():
    """mean 3/8, sample std √(8 · 15/64 / 7) = 0.51755; (1 − 3/8) / 0.51765 = 1.20738, −(3/8) / 0.51765 = −0.72443."""
    rewards = torch.tensor([[1.0, 0, 1, 0, 0, 1, 0, 0]], dtype=torch.float64)
    scaled = scratch.group_advantages(rewards, "group")[0, :2].tolist()
    assert scaled == pytest.approx([1.20738, -0.72443], abs=1e-5)
    assert scratch.group_advantages(rewards, "none")[0, :2].tolist() == [0.625, -0.375]


def test_equal_rewards_have_advantages_of_exactly_zero():
    for value in (0.1, 1 / 3, 0.7):  # of which the mean of seven is not the number itself
        assert not scratch.group_advantages(torch.full((1, 7), value), "group").any()


@pytest.mark.parametrize(
    ("loss_type", "short", "long"),
    [("grpo", 1 / 20, 1 / 200), ("dapo", 1 / 110, 1 / 110), ("dr_grpo", 1 / 200, 1 / 200)],
)
def test_a_token_of_ten_and_one_of_a_hundred(loss_type, short, long):
    """Two completions, 10 and 100 tokens long, of at most 100: 1/(2·10) and 1/(2·100); 1/110; 1/(2·100)."""
    mask = torch.arange(100) < torch.tensor([[10], [100]])
    weights = scratch.token_weights(mask, settings_of(loss_type=loss_type, max_new_tokens=100))
    assert weights[:, 0].tolist() == pytest.approx([short, long])
    assert not weights[0, 10:].any()


def _batch(ratios: torch.Tensor, advantage: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logps = ratios.log()[None].requires_grad_()
    mask = torch.ones_like(logps, dtype=torch.bool)
    advantages = torch.tensor([[advantage]], dtype=logps.dtype)
    return logps, {"mask": mask, "old_logps": torch.zeros_like(logps), "advantages": advantages}


@pytest.mark.parametrize(("advantage", "still"), [(1.0, [0, 0, 0, 1]), (-1.0, [1, 0, 0, 0])])
def test_a_clipped_token_has_no_gradient_and_the_others_have_all_of_it(advantage, still):
    """1.35 > 1.28 does not grow with A > 0, 0.7 < 0.8 does not shrink with A < 0; else ∂(−ρA)/∂log π = −ρA."""
    ratios = torch.tensor([0.7, 0.95, 1.1, 1.35], dtype=torch.float64)
    logps, batch = _batch(ratios, advantage)
    losses, clipped, _ = scratch.token_losses(logps, batch, settings_of(clip_eps_high=0.28, beta=0.0))
    losses.sum().backward()
    stopped = torch.tensor(still, dtype=torch.bool)
    assert clipped[0].tolist() == stopped.tolist()
    torch.testing.assert_close(logps.grad[0], torch.where(stopped, 0.0, -ratios * advantage))


def test_the_sequence_ratio_is_the_geometric_mean():
    """(0.7 · 0.95 · 1.1 · 1.35)^¼ = 0.99686: every token's loss, of which each token moves a quarter."""
    logps, batch = _batch(torch.tensor([0.7, 0.95, 1.1, 1.35], dtype=torch.float64), 1.0)
    losses, clipped, _ = scratch.token_losses(logps, batch, settings_of(is_level="sequence", beta=0.0))
    assert losses[0].tolist() == pytest.approx([-0.99686] * 4, abs=1e-5)
    assert not clipped.any()
    losses.mean().backward()
    assert logps.grad[0].tolist() == pytest.approx([-0.99686 / 4] * 4, abs=1e-5)


def test_k3_and_its_weight():
    """π = 0.30, π_ref = 0.25: r = ln(5/6), k3 = 5/6 − 1 − ln(5/6) = 0.0156549; its gradient is 1 − 5/6 = 1/6."""
    logps = torch.tensor([[0.30]], dtype=torch.float64).log().requires_grad_()
    batch = {"mask": logps > -9, "old_logps": logps.detach(), "ref_logps": torch.full_like(logps, math.log(0.25))}
    batch["advantages"] = torch.zeros_like(logps)
    losses, _, k3 = scratch.token_losses(logps, batch, settings_of(beta=0.5))
    assert k3.item() == pytest.approx(0.0156549, abs=1e-7)
    assert losses.item() == pytest.approx(0.5 * 0.0156549, abs=1e-7)
    losses.sum().backward()
    assert logps.grad.item() == pytest.approx(0.5 / 6)


def test_padding_on_the_left_changes_no_log_prob():
    model, tokenizer, _, _ = scratch.tiny()
    rows = [tokenizer(text)["input_ids"] for text in ("1+2=3", "=", "12+345")]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    padded = scratch.token_logps(model, ids, real, settings_of())
    for row, values in zip(rows, padded, strict=True):
        alone = scratch.token_logps(
            model, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long), settings_of()
        )
        torch.testing.assert_close(values[width - len(row) + 1 :], alone[0, 1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_rows_in_memory_at_a_time_change_no_parameter(loss_type):
    trained = []
    for rows_at_once in (256, 12):
        model, tokenizer, examples, _ = scratch.tiny()
        settings = settings_of(loss_type=loss_type, rows_at_once=rows_at_once, max_steps=2, ppo_epochs=2, group_size=8)
        batches, longer_is_better = [examples[:4]] * 2, lambda text, answer: float(len(text))
        for *_, metrics in scratch.train(model.double(), tokenizer, batches, longer_is_better, settings):
            assert metrics["grad_norm"] > 0
        trained.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], atol=1e-9, rtol=0)
