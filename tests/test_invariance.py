"""The same gradient however the work is laid out: micro-batches, packing, padding, order, skipped rows.

A small Llama in float64 goes through the real pieces, so that equal means equal to 1e-10 of the largest entry.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from functools import cache, partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_toolbox.batch import Batch, collate, denominators, micro_batches, rows_with_gradient
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import Reference
from grpo_toolbox.models.tiny import build_tiny
from grpo_toolbox.objectives import Objective, clipped, loss_and_terms, reinforce
from grpo_toolbox.run import Run, UpdateSettings
from grpo_toolbox.types import Prompt, Rollout, Sampling
from grpo_toolbox.update import update

VOCABULARY = 13
TEMPERATURE = 0.7
LENGTH = 7.0
OBJECTIVES = {
    "grpo": Objective(partial(clipped, clip_eps=0.2), beta=0.04, kl="k3"),
    "dapo": Objective(partial(clipped, clip_eps=0.2, clip_eps_high=0.28), loss_agg="token_mean"),
    "dr_grpo": Objective(clipped, loss_agg="constant", beta=0.1, kl="k2"),
    "reinforce": Objective(reinforce, loss_agg="seq_mean_token_sum", beta=0.1, kl="k1"),
}
objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)

Shape = list[tuple[int, list[int]]]
"""(prompt length, completion lengths) of each group; equally many completions in each."""


def _small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,  # far from uniform: a wrong predictor must show
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(config).double()
    for layer in model.model.layers:  # LlamaRMSNorm rounds to float32 inside
        layer.input_layernorm, layer.post_attention_layernorm = _exact_norm(), _exact_norm()
    model.model.norm = _exact_norm()
    return model.eval()


def _exact_norm() -> nn.RMSNorm:
    return nn.RMSNorm(16, eps=1e-6, dtype=torch.float64)


@cache
def _shared_llama() -> LlamaForCausalLM:
    return _small_llama()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return _shared_llama()


def _rollouts(shape: Shape) -> list[Rollout]:
    """Random tokens, 0 (usually padding) and 1 (usually the stop token) among them at any place."""
    draw = random.Random(1)
    rollouts = []
    for number, (prompt_length, lengths) in enumerate(shape):
        prompt = Prompt(number, "", tuple(draw.randrange(VOCABULARY) for _ in range(prompt_length)))
        for length in lengths:
            ids = tuple(draw.randrange(VOCABULARY) for _ in range(length))
            rollouts.append(Rollout(prompt, ids, tuple(-draw.random() for _ in ids), "stop", ""))
    return rollouts


def _batch(shape: Shape, *, per_token: bool = False) -> Batch:
    """A batch with all columns; ratios of about e^±.3, so that some tokens are clipped."""
    rollouts, group_size = _rollouts(shape), len(shape[0][1])
    width = max(len(one.ids) for one in rollouts)
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(len(shape), group_size, *([width] if per_token else []), generator=generator)
    noise = torch.randn(2, len(rollouts), width, generator=generator, dtype=torch.float64)
    batch = collate(rollouts, advantages)
    with torch.no_grad():
        logps, _ = completion_logps(_shared_llama(), batch, temperature=TEMPERATURE, packed=False)
    return replace(batch, old_logps=logps + 0.3 * noise[0], ref_logps=logps + noise[1])


def _some_silent(batch: Batch) -> Batch:
    """Rows 1, 3, 4, 5 and 6 of nine, a whole group among them, get no advantage; they still count in every mean."""
    return replace(batch, advantages=batch.advantages * torch.tensor([[1.0], [0], [1], [0], [0], [0], [0], [1], [1]]))


def _gradient(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    rows: Sequence[int] | None = None,
    tokens: int = 10**6,
    packed: bool = True,
) -> Tensor:
    """The gradient of one step over all parameters, summed over micro-batches of at most `tokens` tokens."""
    counts = denominators(batch, LENGTH)
    model.zero_grad()
    for part in micro_batches(batch, range(len(batch)) if rows is None else rows, tokens):
        micro = batch.select(part)
        logps, _ = completion_logps(model, micro, temperature=TEMPERATURE, packed=packed)
        loss, _ = loss_and_terms(
            objective,
            logps=logps,
            advantages=micro.advantages,
            mask=micro.mask,
            denominators=counts,
            old_logps=micro.old_logps,
            ref_logps=micro.ref_logps,
        )
        loss.backward()
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def _assert_equal(one: Tensor, other: Tensor) -> None:
    assert one.isfinite().all()
    assert float((one - other).abs().max()) <= 1e-10 * max(float(other.abs().max()), 1e-30)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group_size = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 6), min_size=group_size, max_size=group_size)
    return draw(st.lists(st.tuples(st.integers(1, 12), lengths), min_size=1, max_size=3))


PLAIN: Shape = [(4, [3, 5, 1]), (9, [2, 2, 6]), (1, [4, 1, 3])]
SINGLE_TOKENS: Shape = [(3, [1, 1]), (2, [1, 1])]
SOME_EMPTY: Shape = [(3, [0, 4]), (2, [0, 0])]
ALL_EMPTY: Shape = [(3, [0, 0])]
UNEQUAL_PROMPTS: Shape = [(1, [2, 3]), (60, [3, 1])]
LONG_GROUP: Shape = [(5, [6, 6, 6, 6]), (1, [1, 1, 1, 1])]


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [OBJECTIVES["grpo"], OBJECTIVES["dapo"]], ids=["grpo", "dapo"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(shape=shapes(), tokens=st.integers(1, 60), packed=st.booleans())
@example(SINGLE_TOKENS, 4, True)
@example(SOME_EMPTY, 3, True)
@example(SOME_EMPTY, 3, False)
@example(ALL_EMPTY, 3, True)
@example(UNEQUAL_PROMPTS, 64, True)
@example(LONG_GROUP, 12, True)
def test_micro_batches_of_any_size(model: nn.Module, objective: Objective, shape: Shape, tokens: int, packed: bool):
    batch = _batch(shape)
    whole = _gradient(model, batch, objective, packed=packed)
    _assert_equal(_gradient(model, batch, objective, tokens=tokens, packed=packed), whole)


@objectives
@pytest.mark.parametrize("shape", [PLAIN, SINGLE_TOKENS, SOME_EMPTY, UNEQUAL_PROMPTS, LONG_GROUP])
def test_packed_equals_padded(model: nn.Module, objective: Objective, shape: Shape):
    batch = _batch(shape)
    padded = _gradient(model, batch, objective, packed=False)
    assert (padded != 0).any()
    _assert_equal(_gradient(model, batch, objective), padded)


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_per_token_advantages_split_with_their_rows(model: nn.Module, objective: Objective, packed: bool):
    batch = _batch(PLAIN, per_token=True)
    whole = _gradient(model, batch, objective, packed=False)
    _assert_equal(_gradient(model, batch, objective, tokens=14, packed=packed), whole)


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_extra_padding_columns_of_nan(model: nn.Module, objective: Objective, packed: bool):
    batch = _batch(PLAIN, per_token=True)

    def wide(column: Tensor, fill: float) -> Tensor:
        return torch.cat([column, torch.full((len(batch), 5), fill, dtype=column.dtype)], dim=1)

    wider = replace(
        batch,
        mask=wide(batch.mask, False),
        advantages=wide(batch.advantages, math.nan),
        old_logps=wide(batch.old_logps, math.nan),
        ref_logps=wide(batch.ref_logps, math.nan),
    )
    logps, entropy = completion_logps(model, wider, temperature=TEMPERATURE, packed=packed)
    assert logps.shape == entropy.shape == (9, 11)
    _assert_equal(_gradient(model, wider, objective, packed=packed), _gradient(model, batch, objective, packed=packed))


@objectives
@pytest.mark.parametrize("packed", [True, False])
def test_nan_in_every_column_where_the_mask_is_off(model: nn.Module, objective: Objective, packed: bool):
    batch = _batch(PLAIN, per_token=True)
    columns = ("advantages", "sampler_logps", "old_logps", "ref_logps")
    planted = {name: torch.where(batch.mask, getattr(batch, name), math.nan) for name in columns}
    assert all(value.isnan().any() for value in planted.values())
    dirty = replace(batch, **planted)
    _assert_equal(_gradient(model, dirty, objective, packed=packed), _gradient(model, batch, objective, packed=packed))


@objectives
def test_order_of_rows_and_groups(model: nn.Module, objective: Objective):
    batch = _batch(PLAIN)
    expected = _gradient(model, batch, objective)
    for order in ([2, 0, 1, 5, 3, 4, 8, 7, 6], [6, 7, 8, 0, 1, 2, 3, 4, 5], [8, 0, 4, 1, 6, 3, 5, 2, 7]):
        shuffled = batch.select(order)
        assert [shuffled.completions[place] for place in range(9)] == [batch.completions[row] for row in order]
        _assert_equal(_gradient(model, shuffled, objective), expected)
        _assert_equal(_gradient(model, batch, objective, rows=order, tokens=20), expected)


def test_groups_collated_in_another_order(model: nn.Module):
    advantages = torch.randn(3, 3, generator=torch.Generator().manual_seed(4))
    rollouts = _rollouts(PLAIN)
    turned = collate([*rollouts[6:], *rollouts[:6]], advantages[[2, 0, 1]])
    objective = OBJECTIVES["dapo"]
    _assert_equal(_gradient(model, turned, objective), _gradient(model, collate(rollouts, advantages), objective))


@pytest.mark.parametrize("surrogate", [clipped, reinforce])
@pytest.mark.parametrize("loss_agg", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "constant"])
def test_rows_of_zero_advantage_can_stay_at_home(model: nn.Module, surrogate: object, loss_agg: str):
    batch = _some_silent(_batch(PLAIN))
    objective = Objective(surrogate, loss_agg=loss_agg)  # type: ignore[arg-type]
    assert objective.zero_advantage_is_zero_gradient
    rows = rows_with_gradient(batch)
    assert rows == [0, 2, 7, 8]
    _assert_equal(_gradient(model, batch, objective, rows=rows), _gradient(model, batch, objective))


def test_a_row_is_skipped_only_if_all_its_tokens_have_zero_advantage():
    batch = replace(_batch([(2, [3, 3, 3])]), advantages=torch.tensor([[0.0, 0, 0], [0, -1e-30, 0], [0, 0, 2]]))
    assert rows_with_gradient(batch) == [1, 2]


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_masked_out_counts_as_a_sequence_and_gives_no_gradient(model: nn.Module, packed: bool):
    batch = _batch(PLAIN)
    mask = batch.mask.clone()
    mask[4] = False
    objective = OBJECTIVES["grpo"]
    others = [row for row in range(9) if row != 4]
    silent = replace(batch, mask=mask)
    expected = _gradient(model, batch, objective, rows=others)  # the mean over sequences still divides by 9
    _assert_equal(_gradient(model, silent, objective, packed=packed), expected)


def test_masks_come_from_lengths():
    # every completion is made of the padding and the stop token alone, and every token of it is trained
    prompt = Prompt(0, "", (5, 0))
    rollouts = [Rollout(prompt, ids, (-1.0,) * len(ids), "length", "") for ids in ((0, 0, 1), (1,), ())]
    batch = collate(rollouts, torch.ones(1, 3))
    assert batch.mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert denominators(batch, 8.0) == denominators(batch.select([2, 0, 1]), 8.0)
    assert (denominators(batch, 8.0).sequences, denominators(batch, 8.0).tokens) == (3, 4)


# ---- the split itself ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(shape=shapes(), tokens=st.integers(1, 80), data=st.data())
def test_every_row_is_in_one_micro_batch_of_at_most_the_budget(shape: Shape, tokens: int, data: st.DataObject):
    batch = collate(_rollouts(shape), torch.ones(len(shape), len(shape[0][1])))
    rows = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True)) if len(batch) else []
    parts = micro_batches(batch, rows, tokens)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert all(part for part in parts)
    assert all(batch.select(part).forward_tokens <= tokens or len(part) == 1 for part in parts)
    for group, (prompt, _) in enumerate(shape):
        members = {row for row in rows if batch.group[row] == group}
        whole = prompt + sum(len(batch.completions[row]) for row in members)
        if members and whole <= tokens:
            assert any(members <= set(part) for part in parts)


def test_micro_batches_by_hand():
    # group 0: 4 + (3, 5, 1) = 13 tokens; group 1: 9 + (2, 2, 6) = 19; group 2: 1 + (4, 1, 3) = 9
    batch = _batch(PLAIN)
    assert micro_batches(batch, range(9), 100) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert micro_batches(batch, range(9), 32) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert micro_batches(batch, range(9), 13) == [[0, 1, 2], [3, 4], [5], [6, 7, 8]]  # 9 + 2 + 2 = 13; 9 + 6 = 15 > 13
    assert micro_batches(batch, [], 13) == []


def test_select_keeps_rows_with_their_columns():
    batch = _batch(PLAIN)
    part = batch.select([7, 3])
    assert part.prompts == (batch.prompts[1], batch.prompts[2])
    assert part.group == (1, 0)
    assert part.completions == (batch.completions[7], batch.completions[3])
    assert part.mask.tolist() == [[True, False], [True, True]]  # cut to the longest, 2
    assert part.forward_tokens == 9 + 1 + 2 + 1
    assert torch.equal(part.advantages, batch.advantages[[7, 3]])
    for name in ("sampler_logps", "old_logps", "ref_logps"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[[7, 3], :2])


# ---- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_logps_and_entropies_are_those_of_plain_transformers(packed: bool):
    policy, _ = build_tiny()
    rollouts = _rollouts([*PLAIN, (60, [0, 2, 5])])
    batch = collate(rollouts, torch.ones(4, 3))
    with torch.no_grad():
        logps, entropy = completion_logps(policy, batch, temperature=TEMPERATURE, packed=packed)
        for row, one in enumerate(rollouts):
            logits = policy(torch.tensor([[*one.prompt.ids, *one.ids]])).logits[0] / TEMPERATURE
            start, count = len(one.prompt.ids), len(one.ids)
            log_probs = logits[start - 1 : start + count - 1].log_softmax(-1)
            expected = log_probs[range(count), list(one.ids)]
            torch.testing.assert_close(logps[row, :count], expected, atol=1e-5, rtol=0)
            expected = -(log_probs.exp() * log_probs).sum(-1)
            torch.testing.assert_close(entropy[row, :count], expected, atol=1e-5, rtol=0)
            assert not logps[row, count:].any()
            assert not entropy[row, count:].any()


@pytest.mark.parametrize("packed", [True, False])
def test_case_e06_2_padding_is_invisible(model: nn.Module, packed: bool):
    # prompt (5, 6) with completion (7, 8), alone and beside a longer prompt and longer completions
    short = Rollout(Prompt(0, "", (5, 6)), (7, 8), (-1.0, -1.0), "stop", "")
    long = Rollout(Prompt(1, "", (3, 1, 4, 1, 5, 9, 2)), (6, 5, 3, 5, 8), (-1.0,) * 5, "stop", "")
    with torch.no_grad():
        alone, _ = completion_logps(model, collate([short], torch.ones(1, 1)), temperature=TEMPERATURE, packed=packed)
        beside, _ = completion_logps(
            model, collate([long, short], torch.ones(2, 1)), temperature=TEMPERATURE, packed=packed
        )
    torch.testing.assert_close(beside[1, :2], alone[0], atol=1e-12, rtol=0)


def test_the_attention_of_the_model_is_put_back(model: nn.Module):
    completion_logps(model, _batch(PLAIN), temperature=1.0, packed=True)
    assert model.config._attn_implementation == "sdpa"


# ---- the real update -------------------------------------------------------------------------------------------------


def _trained(settings_: UpdateSettings, objective: Objective, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Parameters after one `update` with plain gradient descent, whose step is the gradient itself, and its metrics."""
    policy = _small_llama()
    used = {
        "policy": policy,
        "reference": Reference(_other(policy)) if objective.beta > 0 else None,
        "objective": objective,
        "optimizer": torch.optim.SGD(policy.parameters(), lr=0.0),
        "lr_at": lambda step: 0.1,
        "sampling": Sampling(max_new_tokens=7, temperature=TEMPERATURE),
        "settings": settings_,
    }
    defaults = {one.name for one in fields(Run) if one.default is not MISSING or one.default_factory is not MISSING}
    other_stages = dict.fromkeys({one.name for one in fields(Run)} - defaults - set(used))
    run = Run(**used, **other_stages)  # an update needs none of the stages around it
    metrics = update(run, batch, 1)
    return _flat(policy), metrics


def _other(policy: nn.Module) -> nn.Module:
    """A policy nearby."""
    other = copy.deepcopy(policy)
    nn.utils.vector_to_parameters(0.9 * _flat(policy), other.parameters())
    return other


def _flat(policy: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


@objectives
@pytest.mark.parametrize("epochs", [1, 3])
def test_update_does_not_depend_on_the_split(objective: Objective, epochs: int):
    batch = replace(_some_silent(_batch(PLAIN)), old_logps=None, ref_logps=None)
    plain = UpdateSettings(epochs, 10**6, math.inf, packed=False, skip_zero_advantage=False)
    expected, logged = _trained(plain, objective, batch)
    start = _flat(_small_llama())
    for changed in (
        UpdateSettings(epochs, 10**6, math.inf),
        UpdateSettings(epochs, 1, math.inf),
        UpdateSettings(epochs, 20, math.inf, packed=False),
        UpdateSettings(epochs, 20, math.inf, skip_zero_advantage=False),
    ):
        parameters, metrics = _trained(changed, objective, batch)
        _assert_equal(parameters - start, expected - start)
        assert metrics["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-9)
        assert metrics["loss"] == pytest.approx(logged["loss"], rel=1e-9, abs=1e-12)


@objectives
def test_two_epochs_are_two_gradient_steps_against_the_first_policy(objective: Objective):
    batch = replace(_some_silent(_batch(PLAIN)), old_logps=None, ref_logps=None)
    policy = _small_llama()
    with torch.no_grad():
        first, _ = completion_logps(policy, batch, temperature=TEMPERATURE, packed=False)
        reference, _ = completion_logps(_other(policy), batch, temperature=TEMPERATURE, packed=False)
    for epoch in range(2):
        step = replace(batch, old_logps=None if epoch == 0 else first, ref_logps=reference)
        gradient = _gradient(policy, step, objective, packed=False)
        moved = _flat(policy) - 0.1 * gradient
        nn.utils.vector_to_parameters(moved, policy.parameters())
    parameters, metrics = _trained(UpdateSettings(2, 20, math.inf), objective, batch)
    start = _flat(_small_llama())
    _assert_equal(parameters - start, moved - start)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()))
    assert metrics["lr"] == 0.1
