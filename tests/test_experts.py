"""The load-balancing loss of a mixture of experts: transformers' own on one row, exact over a step however split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from command_line import refused
from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.measure import draw_sample
from grpo_toolbox.models.experts import (
    ExpertBalance,
    aux_loss,
    check_router,
    max_load,
    router_coefficient,
    routing,
    token_weights,
)
from grpo_toolbox.models.forward import completion_hidden, completion_logps
from grpo_toolbox.models.load import LoraOptions, Reference, load_model, merged_state_dict, save_pretrained
from grpo_toolbox.models.tiny import build_tokenizer
from grpo_toolbox.objectives import Objective, reinforce
from grpo_toolbox.run import Run, UpdateSettings
from grpo_toolbox.types import Prompt, Rollout, Sampling
from grpo_toolbox.update import update
from grpo_toolbox.verify import check_presence
from toolbox_runs import SMALL, all_metrics, built_run, toolbox_train

VOCABULARY = 21  # the tiny tokenizer's
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,  # far from uniform routing
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "doge": {"num_experts": 4, "is_moe": True},
    "deepseek_v3": _LATENT | {"num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "llama": {},
}
mixtures = pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])


def build(kind: str, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(_SIZES | KINDS[kind] | options))).eval()


@cache
def folder_of(kind: str, where: Path) -> str:
    save_pretrained(build(kind), build_tokenizer(), where / kind)
    return str(where / kind)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    where = tmp_path_factory.mktemp("experts")
    return lambda kind: folder_of(kind, where)


SHAPE = ((4, (3, 5, 1)), (7, (2, 2, 6)), (1, (4, 1, 3)))
"""(prompt, completions) of three groups, in tokens."""


def batch_of(shape: Any = SHAPE, advantages: Tensor | None = None) -> Batch:
    rollouts = []
    for number, (length, lengths) in enumerate(shape):
        prompt = Prompt(number, "", tuple(2 + (5 * number + 3 * place) % 19 for place in range(length)))
        for row, size in enumerate(lengths):
            ids = tuple(2 + (7 * row + 11 * number + 4 * place) % 19 for place in range(size))
            rollouts.append(Rollout(prompt, ids, (-1.0,) * size, "stop", ""))
    return collate(rollouts, torch.zeros(len(shape), len(shape[0][1])) if advantages is None else advantages)


class Descent(torch.optim.SGD):
    """Plain descent that keeps the sum of the gradients it was given."""

    gradient: Tensor | float = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.gradient = self.gradient + torch.cat([one.grad.flatten() for one in group["params"]])
        super().step()


def stepped(policy: nn.Module, batch: Batch, coef: float = 1.0, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """The gradient of one `update`, added up over its epochs, and its metrics."""
    optimizer = Descent([parameter for parameter in policy.parameters() if parameter.requires_grad], lr=1.0)
    used = {
        "policy": policy,
        "reference": None,
        "objective": Objective(reinforce, loss_agg="token_mean"),
        "optimizer": optimizer,
        "lr_at": lambda step: 1.0,
        "sampling": Sampling(max_new_tokens=7),
        "settings": UpdateSettings(max_grad_norm=math.inf, router_aux_coef=coef, **settings),
    }
    defaults = {one.name for one in fields(Run) if one.default is not MISSING or one.default_factory is not MISSING}
    others = dict.fromkeys({one.name for one in fields(Run)} - defaults - {*used})
    metrics = update(Run(**used, **others), batch, 1)  # type: ignore[arg-type]
    assert isinstance(optimizer.gradient, Tensor)
    return optimizer.gradient, metrics


def own_loss(model: Any, batch: Batch) -> Tensor:
    """transformers' loss of padded rows, each with its prompt, without their last tokens."""
    rows = [batch.prompts[group] + ids[:-1] for group, ids in zip(batch.group, batch.completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=real, output_router_logits=True, use_cache=False).aux_loss


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(own) if one is None else one).flatten() for one, own in pairs])


def assert_close(one: Tensor, other: Tensor, share: float = 1e-5) -> None:
    """Within `share` of the largest entry, which is not 0."""
    assert float(other.abs().max()) > 1e-4
    assert float((one - other).abs().max()) <= share * float(other.abs().max())


# ---- by hand


def test_the_loss_by_hand() -> None:
    """Two layers, three experts, k = 1; tokens a and b count 1, token c counts a half: 2 layers × 2.5 tokens = 5.

    Logits are logarithms of probabilities. Layer 1: a (.5 .25 .25), b (.2 .6 .2), c (.1 .1 .8): it chooses 1, 1, .5.
    Layer 2: all (.5 .3 .2): it chooses 2.5, 0, 0. f = (3.5, 1, .5) / 5 = (.7, .2, .1).
    P·5 = (.5 + .2 + .05 + 1.25, .25 + .6 + .05 + .75, .25 + .2 + .4 + .5) = (2, 1.65, 1.35).
    aux = 3 · (.7·2 + .2·1.65 + .1·1.35) / 5 = 1.119; the busiest expert has 2.5 of layer 2, evenly it were 2.5 / 3.
    """
    first = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    second = torch.tensor([[0.5, 0.3, 0.2]] * 3).log()
    weights = torch.tensor([1.0, 1.0, 0.5])
    whole = routing([first, second], weights, 1)
    assert whole.chosen.tolist() == [[1, 1, 0.5], [2.5, 0, 0]]
    assert whole.probability.tolist() == pytest.approx([2, 1.65, 1.35])
    assert float(aux_loss(whole, whole)) == pytest.approx(1.119)
    assert float(max_load(whole)) == pytest.approx(3)
    parts = [routing([first[rows], second[rows]], weights[rows], 1) for rows in (slice(0, 1), slice(1, 3))]
    step = parts[0] + parts[1]
    assert sum(float(aux_loss(part, step)) for part in parts) == pytest.approx(1.119)
    # by themselves: a has 3·(1·1)/2; b and c, with a pool of 3, 3·(1.5·1 + 1·1.1 + .5·.9)/9
    assert [float(aux_loss(part, part)) for part in parts] == pytest.approx([1.5, 3.05 / 3])


def test_even_routing_has_the_loss_k() -> None:
    """Any choice counts the same where all probabilities are 1/E: E · Σ_e f_e / E = Σ_e f_e = k."""
    for top_k in (1, 2, 3):
        whole = routing([torch.zeros(5, 4)], torch.ones(5), top_k)
        assert float(aux_loss(whole, whole)) == pytest.approx(top_k)


def test_choices_have_no_gradient() -> None:
    """f = (1, 0): aux = 2·p, whose gradient is 2·p·(1 − p) = 2·0.7311·0.2689 = 0.3932."""
    logits = torch.tensor([[1.0, 0.0]]).requires_grad_()
    whole = routing([logits], torch.ones(1), 1)
    assert not whole.chosen.requires_grad
    (gradient,) = torch.autograd.grad(aux_loss(whole, whole), logits)
    assert gradient.tolist()[0] == pytest.approx([0.3932, -0.3932], abs=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_what_each_token_counts(packed: bool) -> None:
    """A group of three and one of its rows alone: the prompt counts a third per row, the last token not at all."""
    batch = batch_of(((4, (3, 5, 1)),))
    third = 1 / 3
    whole = token_weights(batch, rows_per_prompt=3, packed=packed)
    alone = token_weights(batch.select([1]), rows_per_prompt=3, packed=packed)
    if packed:
        assert whole.tolist() == pytest.approx([1] * 4 + [1] * 2 + [1] * 4)
        assert alone.tolist() == pytest.approx([third] * 4 + [1] * 4)
    else:
        row = [third] * 4
        assert whole.tolist() == pytest.approx(row + [1, 1, 0, 0, 0] + row + [1] * 4 + [0] + row + [0] * 5)
        assert alone.tolist() == pytest.approx(row + [1] * 4 + [0])


# ---- transformers' own loss


@mixtures
@pytest.mark.parametrize("packed", [True, False])
def test_one_row_has_the_loss_and_the_gradient_of_transformers(kind: str, packed: bool) -> None:
    batch = batch_of(((6, (8,)),))
    model = build(kind)
    expected = own_loss(model, batch)
    gradient, metrics = stepped(build(kind), batch, coef=0.5, packed=packed)
    assert metrics["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * expected.item(), rel=1e-5)  # the advantage is 0
    assert_close(gradient, 0.5 * gradient_of(model, expected))


@mixtures
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 20, 10**6])
def test_a_step_of_single_rows_has_the_loss_of_them_all_in_one(kind: str, packed: bool, tokens: int) -> None:
    """In groups of one no prompt is shared: transformers' function of the whole step, however that is split."""
    batch = batch_of(((6, (8,)), (2, (5,)), (9, (1,)), (3, (7,))))
    model = build(kind)
    expected = own_loss(model, batch)
    gradient, metrics = stepped(build(kind), batch, packed=packed, micro_batch_tokens=tokens)
    assert metrics["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradient, gradient_of(model, expected))
    apart = [own_loss(model, batch.select([row])).item() for row in range(4)]
    assert abs(sum(apart) / 4 - expected.item()) > 0.01 * expected.item()


# ---- invariance


@pytest.mark.parametrize(("kind", "epochs"), [("mixtral", 1), ("mixtral", 2), ("qwen3_moe", 1), ("olmoe", 1)])
def test_a_step_does_not_depend_on_the_split_nor_on_packing(kind: str, epochs: int) -> None:
    """With advantages, some of which are 0: whole groups, parts of groups, single rows; packed and padded."""
    advantages = torch.tensor([[1.0, -0.5, 0.0], [0.0, 0.0, 0.0], [0.7, 0.0, -1.1]])
    batch = batch_of(advantages=advantages)
    small = {"ppo_epochs": epochs, "skip_zero_advantage": False}
    expected, logged = stepped(build(kind), batch, coef=0.1, packed=False, micro_batch_tokens=10**6, **small)
    for changed in (
        {"packed": True, "micro_batch_tokens": 10**6},
        {"packed": True, "micro_batch_tokens": 1},
        {"packed": True, "micro_batch_tokens": 14},
        {"packed": False, "micro_batch_tokens": 14},
        {"packed": True, "micro_batch_tokens": 14, "skip_zero_advantage": True},
    ):
        gradient, metrics = stepped(build(kind), batch, coef=0.1, **(small | changed))
        assert_close(gradient, expected, 1e-4)
        for name in ("aux_loss", "experts/max_load", "loss", "grad_norm"):
            assert metrics[name] == pytest.approx(logged[name], rel=1e-4), name
        assert metrics["rows_trained"] == 9


def test_the_loss_reaches_the_gradient_of_rows_without_an_advantage() -> None:
    batch = batch_of()
    _, off = stepped(build("mixtral"), batch, coef=0.0)
    gradient, on = stepped(build("mixtral"), batch, coef=0.01)
    twice, _ = stepped(build("mixtral"), batch, coef=0.02)
    assert (off["rows_trained"], off["grad_norm"]) == (0, 0)
    assert "aux_loss" not in off
    assert (on["rows_trained"], on["loss"]) == (9, pytest.approx(0.01 * on["aux_loss"]))
    assert_close(twice, 2 * gradient)


def test_it_adds_to_the_gradient_of_the_objective() -> None:
    batch = batch_of(advantages=torch.linspace(-1, 1, 9).reshape(3, 3))
    parts = [stepped(build("olmoe"), batch, coef=coef)[0] for coef in (0.0, 0.3)]
    alone, _ = stepped(build("olmoe"), batch_of(), coef=0.3)
    assert_close(parts[1], parts[0] + alone)


@pytest.mark.parametrize(("coef", "tokens", "passes"), [(0.1, 10**6, 1), (0.1, 1, 18), (0.0, 1, 9)])
def test_an_extra_pass_is_made_only_for_several_micro_batches(coef: float, tokens: int, passes: int) -> None:
    policy, seen = build("mixtral"), []
    policy.model.register_forward_hook(lambda *_: seen.append(1))
    stepped(policy, batch_of(advantages=torch.ones(3, 3)), coef=coef, micro_batch_tokens=tokens)
    assert len(seen) == passes


def test_nothing_is_left_on_the_model() -> None:
    policy = build("mixtral")
    stepped(policy, batch_of(), micro_batch_tokens=1)
    assert not policy.model._forward_hooks
    assert not policy.model._forward_pre_hooks
    assert not policy.config.output_router_logits
    assert policy(input_ids=torch.tensor([[3, 4]])).router_logits is None


def test_padding_and_the_last_token_may_be_anything() -> None:
    """The last token of a completion is not counted: another one there has the same loss."""
    batch = batch_of()
    other = replace(batch, completions=tuple((*ids[:-1], 20) for ids in batch.completions))
    for packed in (True, False):
        first, second = (stepped(build("qwen3_moe"), one, packed=packed) for one in (batch, other))
        assert first[1]["aux_loss"] == pytest.approx(second[1]["aux_loss"], rel=1e-6)
        assert_close(first[0], second[0], 1e-5)


def test_completions_of_no_token_count_their_share_of_the_prompt() -> None:
    batch = batch_of(((4, (3, 0)), (5, (0, 0))))
    whole, _ = stepped(build("mixtral"), batch, packed=True)
    for packed, tokens in ((False, 10**6), (True, 1), (False, 1)):
        assert_close(stepped(build("mixtral"), batch, packed=packed, micro_batch_tokens=tokens)[0], whole, 1e-4)


# ---- adapters, checkpointing, dropout, half precision


def adapted(folder: str, **options: Any) -> Any:
    """A policy whose adapters do something, those of experts and routers, too."""
    policy = load_model(folder, lora=LoraOptions(2), **options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_B" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=draw))
    return policy


@pytest.mark.parametrize("make", [load_model, adapted])
def test_checkpointing_changes_nothing(make: Callable[..., Any], folder: Callable[[str], str]) -> None:
    plain, again = (
        stepped(make(folder("mixtral"), gradient_checkpointing=on), batch_of(), micro_batch_tokens=20)[0]
        for on in (False, True)
    )
    assert_close(again, plain, 1e-6)


@mixtures
def test_adapters_are_trained_by_it_as_the_weights_that_they_make(kind: str, folder: Callable[[str], str]) -> None:
    policy = adapted(folder(kind))
    merged = build(kind)
    merged.load_state_dict(merged_state_dict(policy))
    expected = own_loss(merged, batch_of(((6, (8,)),))).item()
    assert stepped(policy, batch_of(((6, (8,)),)))[1]["aux_loss"] == pytest.approx(expected, rel=1e-4)
    whole = stepped(adapted(folder(kind)), batch_of())
    parts = stepped(adapted(folder(kind)), batch_of(), packed=False, micro_batch_tokens=1)
    assert_close(parts[0], whole[0], 1e-4)
    names = [name for name, one in policy.named_parameters() if one.requires_grad]
    sizes = [one.numel() for one in policy.parameters() if one.requires_grad]
    moved = {name for name, part in zip(names, whole[0].split(sizes), strict=True) if part.abs().max() > 1e-6}
    assert any("mlp.gate.lora_" in name for name in moved)
    assert any("self_attn" in name for name in moved)


def test_a_reference_beside_adapted_experts_is_reset_exactly(folder: Callable[[str], str]) -> None:
    policy, batch = adapted(folder("mixtral")), batch_of()
    reference = Reference(policy)

    def logps(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return completion_logps(model, batch, temperature=1.0, packed=True)[0]

    for _ in range(2):
        stepped(policy, batch)
        then = logps(policy.eval())
        reference.refresh(policy, 1.0)
        stepped(policy, batch)
        with reference.model() as net:
            assert torch.equal(logps(net), then)
        assert not torch.equal(logps(policy.eval()), then)
    assert all(".lora_" in name for name in reference.own_weights())


def test_adapted_experts_are_written_and_read(tmp_path: Path, folder: Callable[[str], str]) -> None:
    policy = adapted(folder("qwen3_moe"))
    ids = torch.arange(2, 14).unsqueeze(0)
    for merged in (False, True):
        save_pretrained(policy, build_tokenizer(), tmp_path / str(merged), merged=merged)
        again: Any = load_model(str(tmp_path / str(merged)))
        torch.testing.assert_close(again(input_ids=ids).logits, policy(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_dropout_on_adapted_experts_is_refused_by_its_name(folder: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.dropout=0\.1 cannot be had for a mixture of experts"):
        load_model(folder("olmoe"), lora=LoraOptions(2, dropout=0.1))


def test_dropout_routes_the_same_way_when_counted_and_when_trained(folder: Callable[[str], str]) -> None:
    policy = load_model(folder("mixtral"), lora=LoraOptions(4, dropout=0.5, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    policy.train()
    micros = [batch_of().select(rows) for rows in ([0, 1], [2, 3, 4], [5, 6, 7, 8])]
    balance = ExpertBalance(policy, 1.0, rows_per_prompt=3, packed=True)
    state = torch.get_rng_state()
    balance.count(micros, partial(completion_hidden, policy, packed=True))
    assert torch.equal(torch.get_rng_state(), state)
    counted, parts = balance._step, []
    for micro in micros:
        with balance.watching(micro):
            completion_logps(policy, micro, temperature=1.0, packed=True)
        parts.append(balance._part)
    assert counted is not None
    assert torch.equal(sum(part.chosen for part in parts if part is not None), counted.chosen)  # type: ignore[arg-type]
    assert not torch.equal(torch.get_rng_state(), state)


def test_the_routers_own_noise_is_off_in_training(tmp_path: Path) -> None:
    save_pretrained(build("mixtral", router_jitter_noise=0.5), build_tokenizer(), tmp_path)
    model: Any = load_model(str(tmp_path)).train()
    ids = torch.arange(2, 14).unsqueeze(0)
    first = model(input_ids=ids).logits
    assert torch.equal(first, model(input_ids=ids).logits)
    assert torch.equal(first, model.eval()(input_ids=ids).logits)


def test_sums_are_not_rounded_by_autocast() -> None:
    """1001 tokens of probability 1/4 are 250.25; bfloat16 has 250 and 251 there."""
    logits = torch.zeros(1001, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = routing([logits], torch.ones(1001), 1)
    assert whole.probability.tolist() == [250.25] * 4
    assert float(whole.chosen.sum()) == 1001


# ---- which models


def test_the_weight_is_the_one_that_is_set_or_the_models_own() -> None:
    olmoe, llama = build("olmoe").config, build("llama").config
    assert [router_coefficient(olmoe, wanted) for wanted in (None, 0.0, 0.3)] == [0.01, 0.0, 0.3]
    assert [router_coefficient(llama, wanted) for wanted in (None, 0.0)] == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.3 .* type llama has none: set .*=0"):
        router_coefficient(llama, 0.3)


@mixtures
def test_a_mixture_is_taken(kind: str) -> None:
    check_router(build(kind), 0.01)


@pytest.mark.parametrize(("kind", "reason"), [("deepseek_v3", "hands out none"), ("doge", "another formula")])
def test_other_mixtures_are_refused_once_loaded(kind: str, reason: str) -> None:
    model = build(kind)
    check_router(model, 0.0)
    with pytest.raises(ConfigError, match=reason):
        check_router(model, 0.01)


def test_a_model_without_experts_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_toolbox.config.build.load_model", None)
    assert "type llama has none" in refused("model.router_aux_loss_coef=0.01", "callbacks=none")
    assert "must be a finite number" in refused("model.router_aux_loss_coef=-1", "callbacks=none")
    assert [*tmp_path.glob("runs/*")] == []


# ---- runs


def test_a_run_takes_the_models_own_weight(tmp_path: Path, folder: Callable[[str], str]) -> None:
    given = (f"model.path={folder('olmoe')}", "model.router_aux_loss_coef=null", f"run_dir={tmp_path}")
    assert built_run(*SMALL, *given).settings.router_aux_coef == 0.01


def test_verify_sees_whether_it_reaches_the_gradient(
    tmp_path: Path, folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (f"model.path={folder('qwen3_moe')}", "model.router_aux_loss_coef=0.001", f"run_dir={tmp_path}")
    run = built_run(*SMALL, *given)
    sample = draw_sample(run)
    found = check_presence(run, sample)
    assert found.passed
    assert "experts" in found.measured
    whole = ExpertBalance.loss
    monkeypatch.setattr(ExpertBalance, "loss", lambda self: float(whole(self)))
    assert not check_presence(run, sample).passed


def test_it_evens_a_lopsided_router_out(tmp_path: Path) -> None:
    """One expert is preferred by most tokens; with a weight aux comes down to even, without it stays."""
    model = build("olmoe", num_hidden_layers=1)
    with torch.no_grad():
        router = model.model.layers[0].mlp.gate.weight
        router.mul_(0.1)
        router[0] += 0.2 * model.model.embed_tokens.weight.mean(dim=0).sign()
    save_pretrained(model, build_tokenizer(), tmp_path / "model")
    aux = {}
    for coef in (1e-9, 1.0):
        run_dir = tmp_path / f"run{coef}"
        given = ("reward=custom", "reward.name=plugs:digits", "trainer.max_steps=8", "trainer.lr=0.01")
        where = (f"model.path={tmp_path / 'model'}", f"model.router_aux_loss_coef={coef}", f"run_dir={run_dir}")
        assert toolbox_train(*SMALL, *given, *where, "advantage=dr_grpo", "objective=reinforce") == 0
        aux[coef] = [line["aux_loss"] for line in all_metrics(run_dir)]
    assert aux[1.0][0] == pytest.approx(aux[1e-9][0])
    assert aux[1.0][-1] - 2 < 0.5 * (aux[1e-9][-1] - 2)  # 2 is even


def test_the_critic_is_not_balanced(tmp_path: Path, folder: Callable[[str], str]) -> None:
    seen = []
    for coef in (0.0, 0.7):
        given = (f"model.path={folder('mixtral')}", f"model.router_aux_loss_coef={coef}", "advantage=gae")
        run = built_run(*SMALL, *given, f"run_dir={tmp_path / str(coef)}")
        assert run.critic is not None
        batch = batch_of(advantages=torch.ones(3, 3))
        ones = torch.ones(batch.mask.shape)
        seen.append(run.critic.update(replace(batch, values=0 * ones, returns=ones), 1, 1))
    assert seen[0] == seen[1]
    assert seen[0]["critic/grad_norm"] > 0
