"""Every shortcut of training, on models wide enough to take them all, moves the weights as the plain way does.

The plain way is Hugging Face's own forward on padded rows with autograd alone: `trainer.packing=false` and
`trainer.skip_zero_advantage=false`, one micro-batch, nothing computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import Reference, adopt_model
from grpo_toolbox.models.packing import packing_refusal
from grpo_toolbox.models.snapshot import own_copy
from grpo_toolbox.objectives import Objective, build_objective
from grpo_toolbox.run import Run, UpdateSettings
from grpo_toolbox.surrogates import clipped
from grpo_toolbox.types import Rollout, Sampling
from grpo_toolbox.update import update
from small_models import VOCABULARY, build, make_prompts, text_ids

PROMPTS = (30, 1, 60)
LENGTHS = ((9, 4, 1, 4), (2, 40, 5, 0), (21, 21, 21, 7))
"""Prompts of one token, completions of none and one, and three that are equal (of 21)."""
WIDE = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama, tied": ("llama", WIDE | {"tie_word_embeddings": True}),
    "llama, biases": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("llama", WIDE | {"hidden_act": "gelu"}),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", WIDE),
    "phi3": ("phi3", {"hidden_size": 256, "intermediate_size": 320}),
    "gemma": ("gemma", WIDE),
    "gemma3": ("gemma3, window 256", WIDE),
    "mistral": ("mistral, window 256", WIDE),
    "olmo2": ("olmo2", WIDE),
    "smollm3": ("smollm3", WIDE),
    "gpt2": ("gpt2", {"n_embd": 256}),
    "mixtral": ("mixtral", WIDE),
    "qwen3_moe": ("qwen3_moe", WIDE | {"moe_intermediate_size": 320}),
    "deepseek_v3": ("deepseek_v3", {"hidden_size": 256, "intermediate_size": 320}),
    "diffllama": ("diffllama", WIDE),
}
Options = dict[str, Any]
LORA: Options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
FEW = ["q_proj", "v_proj"]
WAYS: dict[str, tuple[Options | None, Options]] = {
    "as it is": (None, {}),
    "in micro-batches": (None, {"micro_batch_tokens": 60}),
    "with MLPs computed twice": (None, {"recompute_mlp": True}),
    "checkpointed": (None, {"checkpointing": True}),
    "with a pass for old log-probs": (None, {"recompute_old_logps": True}),
    "in two epochs": (None, {"ppo_epochs": 2, "micro_batch_tokens": 100}),
    "with LoRA": (LORA, {}),
    "with LoRA, checkpointed": (LORA, {"checkpointing": True}),
    "with LoRA in two epochs": (LORA, {"ppo_epochs": 2, "micro_batch_tokens": 100}),
    "with LoRA of rank 1": (LORA | {"r": 1, "use_rslora": True}, {}),
    "with DoRA": (LORA | {"use_dora": True}, {}),
    "with LoRA and its biases": (LORA | {"lora_bias": True}, {}),
    "with LoRA and all biases": (LORA | {"bias": "all"}, {}),
    "with LoRA and whole norms": (LORA | {"target_modules": FEW, "modules_to_save": ["input_layernorm"]}, {}),
    "with LoRA and whole embeddings": (LORA | {"target_modules": FEW, "modules_to_save": ["embed_tokens"]}, {}),
    "with LoRA and a few tokens": (LORA | {"target_modules": FEW, "trainable_token_indices": [3, 5, 9]}, {}),
}
"""Adapter, and settings of the update."""
KL = build_objective(clipped, beta=0.1)
ENTROPY = build_objective(clipped, loss_agg="token_mean", clip_eps_high=0.28, entropy_coef=0.01)
PLAIN = build_objective(clipped)


def a_batch(prompts: Sequence[int] = PROMPTS, lengths: Sequence[Sequence[int]] = LENGTHS) -> Batch:
    """Two rows have no advantage, one of a group's equal ones among them."""
    rollouts = [
        Rollout(prompt, text_ids(length, 5 if length == 21 else 3 * length + row), (-1.0,) * length, "length", "")
        for prompt, group in zip(make_prompts(*prompts), lengths, strict=True)
        for row, length in enumerate(group)
    ]
    advantages = torch.linspace(-1, 1.7, len(rollouts)).reshape(len(lengths), -1)
    advantages[0, 1] = advantages[-1, 1] = 0.0
    return collate(rollouts, advantages)


def policy(name: str, lora: Options | None, checkpointing: bool) -> Any:
    """The same weights each time, an adapter's no longer zero, and logits of a few nats."""
    kind, changes = MODELS[name]
    model = build(kind, **changes)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.div_(2.8)
    adapter = None if lora is None else LoraConfig(task_type="CAUSAL_LM", **lora)
    model = adopt_model(model, lora=adapter, gradient_checkpointing=checkpointing)
    generator = torch.Generator().manual_seed(5)
    for place, parameter in model.named_parameters():
        if "lora_B" in place:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def moved(model: nn.Module, objective: Objective, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """By how much one `update` with plain gradient descent moves each trained parameter, and its metrics."""
    run = a_run(model, objective, **settings)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    metrics = update(run, a_batch(), 1)
    return {name: value.detach() - before[name] for name, value in trained.items()}, metrics


def a_run(model: nn.Module, objective: Objective, **settings: Any) -> Run:
    """A run with nothing in it but what an update needs."""
    trained = [value for value in model.parameters() if value.requires_grad]
    used = {
        "policy": model,
        "reference": Reference(model) if objective.beta else None,
        "objective": objective,
        "optimizer": torch.optim.SGD(trained, lr=0.0),
        "lr_at": lambda step: 0.02,
        "sampling": Sampling(max_new_tokens=40, temperature=0.8),
        "group_size": len(LENGTHS[0]),
        "settings": UpdateSettings(max_grad_norm=math.inf, **settings),
    }
    defaults = {one.name for one in fields(Run) if one.default is not MISSING or one.default_factory is not MISSING}
    return Run(**used, **dict.fromkeys({one.name for one in fields(Run)} - defaults - set(used)))


def assert_the_plain_step(name: str, way: str, objectives: Sequence[Objective]) -> None:
    lora, settings = WAYS[way]
    settings = dict(settings)
    checkpointing = settings.pop("checkpointing", False)
    epochs = {key: value for key, value in settings.items() if key == "ppo_epochs"}
    for objective in objectives:
        model = policy(name, lora, checkpointing)
        assert packing_refusal(model, VOCABULARY, 100, torch.device("cpu")) is None
        ours, metrics = moved(model, objective, **settings)
        plain = {"packed": False, "skip_zero_advantage": False, "micro_batch_tokens": 10**6}
        theirs, expected = moved(policy(name, lora, False), objective, **plain, **epochs)
        whole = torch.cat([one.flatten() for one in theirs.values()]).norm()
        assert whole > 0
        for place, change in theirs.items():
            assert (ours[place] - change).norm() < 1e-4 * (change.norm() + 0.01 * whole), place
        for metric in ("loss", "grad_norm"):
            assert metrics[metric] == pytest.approx(expected[metric], rel=2e-4, abs=1e-5)


def test_all_shortcuts_together_take_the_plain_step():
    assert_the_plain_step("llama", "as it is", [KL, ENTROPY, PLAIN])


@pytest.mark.parametrize("way", ["with MLPs computed twice", "checkpointed", "with LoRA, checkpointed"])
def test_what_is_computed_twice_takes_it_too(way: str):
    """Wide layers are computed again as they were, in backward, when the pass that they are part of is over."""
    assert_the_plain_step("llama", way, [KL])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_comes_with_checkpointing_switched_on_is_computed_again_as_it_was(reentrant: bool):
    """In a form of its own that would forget the packed attention by then."""
    model = policy("llama", None, False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ours, _ = moved(adopt_model(model), KL)
    theirs, _ = moved(policy("llama", None, False), KL, packed=False, skip_zero_advantage=False)
    for place, change in theirs.items():
        assert (ours[place] - change).norm() < 1e-3 * change.norm(), place


def test_mlps_of_one_class_may_have_different_activations():
    """Both in one process: what is known of the first must not be taken for the second."""
    for name in ("llama", "llama, gelu", "llama"):
        assert_the_plain_step(name, "as it is", [PLAIN])


def test_a_pass_of_its_own_for_old_log_probs_says_what_the_first_pass_says():
    assert_the_plain_step("llama", "with a pass for old log-probs", [KL, ENTROPY])


def test_biases_alone_may_be_trained():
    """In the first layer neither input nor weight ask for a gradient then."""
    assert_the_plain_step("qwen2", "with LoRA and all biases", [KL])


# ---- one after another, and at once ----------------------------------------------------------------------------------

SHAPES: list[tuple[Sequence[int], Sequence[Sequence[int]]]] = [
    (PROMPTS, LENGTHS),
    ((90,), ((1, 1, 0, 1),)),  # nothing behind the prompt is forwarded
    ((3, 5), ((50, 2, 3, 4), (9, 9, 30, 1))),
    ((4,), ((6,),)),
]


def weights_after(model: Any, run: Run, shapes: Sequence[Any]) -> Tensor:
    for number, shape in enumerate(shapes, start=1):
        rollouts = a_batch(*shape) if len(shape[1][0]) > 1 else one_row(*shape)
        update(run, rollouts, number)
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def one_row(prompts: Sequence[int], lengths: Sequence[Sequence[int]]) -> Batch:
    """A group of one completion, as its advantage might be without a baseline."""
    (prompt,), (length,) = make_prompts(*prompts), lengths[0]
    return collate([Rollout(prompt, text_ids(length), (-1.0,) * length, "stop", "")], torch.ones(1, 1))


def assert_same_weights(model: Any, run: Run, shapes: Sequence[Any]) -> None:
    plain = policy("llama", None, False)
    padded = a_run(plain, PLAIN, packed=False, skip_zero_advantage=False, micro_batch_tokens=10**6)
    start = torch.cat([one.detach().flatten() for one in plain.parameters()])
    ours, theirs = weights_after(model, run, shapes) - start, weights_after(plain, padded, shapes) - start
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_steps_of_different_shapes_one_after_another():
    """What one step has kept or put aside must not be what the next reads."""
    model = policy("llama", None, False)
    assert_same_weights(model, a_run(model, PLAIN, micro_batch_tokens=70), SHAPES)


def test_a_step_that_broke_off_in_its_backward_pass_leaves_nothing_behind():
    model = policy("llama", None, False)
    run = a_run(model, PLAIN, micro_batch_tokens=70)

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    broken = model.model.layers[0].register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="in the middle"):
        update(run, a_batch(), 1)
    broken.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert_same_weights(model, run, SHAPES[:1])


def test_rollouts_may_be_drawn_between_a_forward_pass_and_its_backward_pass():
    """They run the same modules, on copies of the weights, without gradients."""
    model, found = policy("llama", None, True), []
    for between in (False, True):
        model.train().zero_grad()
        logps, _ = completion_logps(model, a_batch(), temperature=1.0, packed=True)
        if between:
            engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(1,))
            assert len(engine.generate(make_prompts(9, 3), 2, Sampling(20))) == 4
        logps.sum().backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", [5, 20])
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "LoRA"])
def test_wide_models_are_sampled_as_they_are_trained(lora: Options | None, tokens: int):
    """For few tokens through the layers of training, for many through copies of their weights."""
    model = policy("llama", lora, False)
    engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(1,))
    rollouts = engine.generate(make_prompts(9, 3), 4, Sampling(tokens, temperature=0.8))
    with torch.no_grad():
        logps, _ = completion_logps(model, collate(rollouts, torch.zeros(2, 4)), temperature=0.8, packed=False)
    for row, one in enumerate(rollouts):
        assert one.logps == pytest.approx(logps[row, : len(one.ids)].tolist(), abs=1e-4)


def test_two_models_may_be_trained_at_once_beside_an_engine():
    """Each in a thread of its own: what is switched while one runs is not switched for the others."""
    names = ("llama", "qwen3")
    alone = [moved(policy(name, None, False), KL, micro_batch_tokens=60)[0] for name in names]
    models = [[policy(name, None, False) for _ in range(2)] for name in names]
    sampled = own_copy(models[0][0])
    engine = LocalEngine(sampled, decode=lambda ids, _: "", stop_ids=(1,))
    with ThreadPoolExecutor(3) as threads:
        drawn = threads.submit(lambda: [engine.generate(make_prompts(20, 3), 4, Sampling(20)) for _ in range(3)])
        steps = [
            threads.submit(lambda own: [moved(one, KL, micro_batch_tokens=60)[0] for one in own], own) for own in models
        ]
        for expected, changes in zip(alone, steps, strict=True):
            for change in changes.result():
                for place in expected:
                    torch.testing.assert_close(change[place], expected[place], atol=1e-7, rtol=1e-4)
        first, *others = ([one.ids for one in rollouts] for rollouts in drawn.result())
    assert all(other == first for other in others)


# ---- every kind and every way ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_takes_it(name: str):
    for way in ("as it is", "in micro-batches", "checkpointed"):
        assert_the_plain_step(name, way, [KL, ENTROPY])
    if name not in ("gpt2", "mixtral", "qwen3_moe"):  # an adapter on a convolution or on experts has rules of its own
        assert_the_plain_step(name, "with LoRA", [KL])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_way_of_training_takes_it(name: str, way: str):
    assert_the_plain_step(name, way, [KL])
