"""The arithmetic by hand: log-probs, KL, masked sums, aggregation. Ids such as e06.1 number checked cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_toolbox import ops
from grpo_toolbox.ops import (
    AGGREGATIONS,
    KL,
    Denominators,
    head_logps_and_entropy,
    kl_is_bounded,
    kl_k3,
    log_ratio,
    logps_and_entropy,
    masked,
    prompt_mean,
)

# ---- log-probs of tokens ---------------------------------------------------------------------------------------------


def test_logps_and_entropy_by_hand():
    # softmax(log 1, log 2, log 5) = 1/8, 2/8, 5/8; H = ⅛·log 8 + ¼·log 4 + ⅝·log 1.6 = .259930 + .346574 + .293752
    logps, entropy = logps_and_entropy(torch.tensor([1.0, 2.0, 5.0]).log(), torch.tensor(2))
    assert logps.item() == pytest.approx(math.log(5 / 8), abs=1e-6)
    assert entropy.item() == pytest.approx(0.900256, abs=1e-6)


def test_temperature_divides_the_logits():
    # logits (0, log 3) at temperature ½ are (0, log 9): the second token has 9/10, not 3/4
    logps, entropy = logps_and_entropy(torch.tensor([0.0, math.log(3)]), torch.tensor(1), temperature=0.5)
    assert logps.item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert entropy.item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), abs=1e-6)


def test_case_e06_1_each_token_is_predicted_by_the_position_before_it():
    # tokens 2 and 3 are predicted by rows 1 and 2: 3 − log(e³ + 2) = −.0949 each; one row late both would be −3.0949
    logits = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 3, 0], [0, 0, 3]])
    ids = torch.tensor([1, 2, 0, 1])
    logps, _ = logps_and_entropy(logits[1:3], ids[2:4])
    assert logps.tolist() == pytest.approx([-0.0949, -0.0949], abs=1e-4)
    late, _ = logps_and_entropy(logits[2:4], ids[2:4])
    assert late.tolist() == pytest.approx([-3.0949, -3.0949], abs=1e-4)


def test_tokens_that_are_impossible_have_no_share_of_the_entropy():
    # softmax(0, −∞, 0) is ½, 0, ½: H = log 2, ∇ log p₀ = (½, 0, −½), and a uniform one has no gradient of the entropy
    logits = torch.tensor([0.0, -math.inf, 0.0], requires_grad=True)
    logps, entropy = logps_and_entropy(logits, torch.tensor(0))
    assert (logps.item(), entropy.item()) == (pytest.approx(-math.log(2)), pytest.approx(math.log(2)))
    assert torch.autograd.grad(logps + entropy, logits)[0].tolist() == pytest.approx([0.5, 0.0, -0.5])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_greedy_draws_have_no_log_probs(temperature: float):
    for call in (
        lambda: logps_and_entropy(torch.zeros(1, 3), torch.tensor([0]), temperature),
        lambda: head_logps_and_entropy(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), temperature),
    ):
        with pytest.raises(ValueError, match=r"temperature=.* must be finite and above 0"):
            call()


def test_half_precision_logits_are_reduced_in_float32():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(50)
    logps, entropy = logps_and_entropy(logits, labels)
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, logits.double().log_softmax(-1)[labels, labels].float(), atol=1e-5, rtol=0)


def _head(positions: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    hidden = torch.randn(positions, 5, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 5, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 11, (positions,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 3, 5, 12, 512])  # 5 does not divide the 12 positions
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_equals_the_plain_computation(chunk: int, temperature: float):
    hidden, weight, labels = _head(12, torch.float32)
    with torch.no_grad():
        plain = logps_and_entropy(hidden @ weight.T, labels, temperature)
        chunked = head_logps_and_entropy(hidden, weight, labels, temperature, chunk)
    torch.testing.assert_close(chunked, plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("positions", "chunk"), [(6, 2), (7, 3), (5, 5), (4, 512), (3, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kept", [0, 400, 2**20], ids=["all computed again", "some kept", "all kept"])
def test_head_gradients_against_finite_differences(positions, chunk, temperature, kept, monkeypatch):
    """11 words in float64: 88 bytes of probabilities per position, so 400 bytes keep the first one to four."""
    monkeypatch.setattr(ops, "KEPT_PROBABILITIES", kept)
    hidden, weight, labels = _head(positions)

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return head_logps_and_entropy(h, w, labels, temperature, chunk)

    assert torch.autograd.gradcheck(both, (hidden, weight))
    frozen = weight.detach()  # another formula, which never needs the probabilities again
    assert torch.autograd.gradcheck(lambda h: both(h, frozen)[0], (hidden,))
    assert torch.autograd.gradcheck(lambda h: both(h, frozen), (hidden,))


@pytest.mark.parametrize("kept", [0, 2**20])
def test_a_second_backward_pass_gives_the_same_gradient(kept, monkeypatch):
    """What is kept between forward and backward is read there and not overwritten."""
    monkeypatch.setattr(ops, "KEPT_PROBABILITIES", kept)
    hidden, weight, labels = _head(7)
    logps, entropy = head_logps_and_entropy(hidden, weight, labels, 0.7, 3)
    first, second = (
        torch.autograd.grad((logps + entropy).sum(), (hidden, weight), retain_graph=retain) for retain in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kept", [0, 2**20], ids=["computed again", "kept"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_large_head_goes_another_way_to_the_same_gradients(kept, frozen, monkeypatch):
    """400 words × 256 are enough for oneDNN's products."""
    monkeypatch.setattr(ops, "KEPT_PROBABILITIES", kept)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 256, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(400, 256, generator=generator)).requires_grad_(not frozen)
    labels = torch.arange(20)
    leaves = [hidden] if frozen else [hidden, weight]
    ours = head_logps_and_entropy(hidden, weight, labels, 0.7, 8)
    plain = logps_and_entropy(hidden @ weight.T, labels, 0.7)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    for pick in (lambda both: both[0].sum(), lambda both: both[0].sum() + both[1].sum()):
        found = torch.autograd.grad(pick(ours), leaves, retain_graph=True)
        expected = torch.autograd.grad(pick(plain), leaves, retain_graph=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_head_gradient_of_logps_alone_and_of_entropy_alone():
    hidden, weight, labels = _head(7)
    for pick in (0, 1):
        ours = torch.autograd.grad(head_logps_and_entropy(hidden, weight, labels, 0.7, 3)[pick].sum(), (hidden, weight))
        plain = torch.autograd.grad(logps_and_entropy(hidden @ weight.T, labels, 0.7)[pick].sum(), (hidden, weight))
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)


def test_head_with_a_frozen_weight_still_trains_the_body():
    hidden, weight, labels = _head(4)
    head_logps_and_entropy(hidden, weight.detach(), labels)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_head_without_positions():
    hidden, weight, labels = _head(0)
    logps, entropy = head_logps_and_entropy(hidden, weight, labels)
    assert logps.shape == entropy.shape == (0,)
    (logps.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_head_under_autocast_is_as_exact_as_the_plain_computation():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 64, generator=generator)
    weight = torch.randn(500, 64, generator=generator) * 0.5
    labels = torch.randint(0, 500, (64,), generator=generator)

    def gradient(head: bool) -> Tensor:
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            logps, _ = (
                head_logps_and_entropy(leaf, weight, labels, chunk=16)
                if head
                else logps_and_entropy(leaf @ weight.T, labels)
            )
        return torch.autograd.grad(logps.sum(), leaf)[0]

    torch.testing.assert_close(gradient(head=True), gradient(head=False), atol=1e-6, rtol=0)


# ---- ratios and KL ---------------------------------------------------------------------------------------------------


def test_log_ratio_is_now_minus_then_and_bounded():
    # π/π_old = .3/.2 = 1.5; e^±20 bounds what would be e^±500
    assert log_ratio(torch.tensor(0.3).log(), torch.tensor(0.2).log()).exp().item() == pytest.approx(1.5, abs=1e-6)
    far = log_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert far.tolist() == [20.0, -20.0]
    assert far.exp().isfinite().all()


# current ½, reference ¼: log π − log π_ref = log 2 = .693147, r = −log 2, eʳ = ½
#   k1 = .693147                       dk1/dlogπ = 1
#   k2 = ½ · .693147² = .240227        dk2/dlogπ = .693147
#   k3 = ½ + .693147 − 1 = .193147     dk3/dlogπ = 1 − ½
# current ¼, reference ½: the signs of k1 and r turn, eʳ = 2
#   k1 = −.693147                      dk1/dlogπ = 1
#   k2 = .240227                       dk2/dlogπ = −.693147
#   k3 = 2 − .693147 − 1 = .306853     dk3/dlogπ = 1 − 2
BY_HAND = [
    ("k1", 0.5, 0.25, 0.693147, 1.0),
    ("k2", 0.5, 0.25, 0.240227, 0.693147),
    ("k3", 0.5, 0.25, 0.193147, 0.5),
    ("k1", 0.25, 0.5, -0.693147, 1.0),
    ("k2", 0.25, 0.5, 0.240227, -0.693147),
    ("k3", 0.25, 0.5, 0.306853, -1.0),
]


@pytest.mark.parametrize(("name", "current", "reference", "value", "gradient"), BY_HAND)
def test_kl_value_and_gradient(name: str, current: float, reference: float, value: float, gradient: float):
    logp = torch.tensor(math.log(current), dtype=torch.float64, requires_grad=True)
    kl = KL[name](logp, torch.tensor(math.log(reference), dtype=torch.float64))
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("name", KL)
def test_kl_of_equal_policies_is_exactly_zero(name: str):
    logps = torch.tensor([-0.1, -3.0, -50.0])
    assert torch.equal(KL[name](logps, logps), torch.zeros(3))


PI = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.10], dtype=torch.float64)
REF = torch.tensor([0.25, 0.25, 0.20, 0.17, 0.13], dtype=torch.float64)


def test_kl_estimators_in_expectation():
    # Exact sums instead of samples: E_π[k1] = E_π[k3] = Σ π·log(π/π_ref) = .009686, var k1 = .0190, var k3 = .00013.
    # With the ratio upside down (e^−r + r − 1, log π − log π_ref in the exponent) the mean is χ² − KL
    # = Σ π²/π_ref − 1 − KL = 1.019276 − 1 − .009686 = .009590, which is another number.
    k1, k3 = KL["k1"](PI.log(), REF.log()), kl_k3(PI.log(), REF.log())
    mean1, mean3 = (PI * k1).sum().item(), (PI * k3).sum().item()
    assert mean1 == pytest.approx(0.009686, abs=5e-7)
    assert mean3 == pytest.approx(mean1, abs=1e-12)
    assert mean3 != pytest.approx(0.009590, abs=5e-5)
    assert (PI * (k1 - mean1).square()).sum().item() == pytest.approx(0.0190, abs=5e-4)
    assert (PI * (k3 - mean3).square()).sum().item() == pytest.approx(0.00013, abs=1e-5)
    assert (k3 >= 0).all()
    assert (k1 < 0).any()


def test_kl_estimators_gradients_in_expectation():
    # Differentiated as they stand under samples of π, with ∇log π(y) = onehot(y) − π for softmax logits:
    #   k1: E[∇log π] = 0, no pull at all        k2: E[log(π/π_ref)·∇log π] = ∇KL(π‖π_ref)
    #   k3: E[(1 − π_ref/π)·∇log π] = π − π_ref = ∇KL(π_ref‖π)
    logits = PI.log().requires_grad_()
    expected = {
        "k1": torch.zeros(5, dtype=torch.float64),
        "k2": torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - REF.log())).sum(), logits)[0],
        "k3": PI - REF,
    }
    for name, gradient in expected.items():
        mean = (PI * KL[name](logits.log_softmax(0), REF.log())).sum()  # PI is a constant: the samples are drawn
        torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], gradient, atol=1e-12, rtol=0)


def test_k3_goes_on_as_its_tangent():
    # r = 10 + 2: value e¹⁰ − 11 + 2·(e¹⁰ − 1) = 66066.4, gradient in log π stays −(e¹⁰ − 1) = −22025.5
    logp = torch.tensor([-12.0, -10.0, -9.999], dtype=torch.float64, requires_grad=True)
    kl = kl_k3(logp, torch.zeros(3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    e10 = math.exp(10)
    assert kl[0].item() == pytest.approx(e10 - 11 + 2 * (e10 - 1))
    assert gradient[:2].tolist() == pytest.approx([1 - e10, 1 - e10])
    assert gradient[2].item() == pytest.approx(1 - math.exp(9.999))
    assert kl_is_bounded(logp.detach(), torch.zeros(3)).tolist() == [True, False, False]


def test_case_e07_1_a_gap_of_94_nats_stays_finite_and_is_counted():
    # r = −.5 + 95 = 94.5, and e^94.5 overflows float32; below the reference, log π must rise: negative gradient
    logp, ref = torch.tensor(-95.0, requires_grad=True), torch.tensor(-0.5)
    kl = kl_k3(logp, ref)
    kl.backward()
    assert kl.isfinite()
    assert kl.item() == pytest.approx(math.exp(10) - 11 + (math.exp(10) - 1) * 84.5, rel=1e-6)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(1 - math.exp(10), rel=1e-6)
    assert kl_is_bounded(logp.detach(), ref)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [("k1", 99.0, 1.0), ("k2", 0.5 * 99**2, 99.0), ("k3", 98.0, 1.0)],  # log π − floor = −1 + 100; e^−99 + 99 − 1
)
def test_case_e07_4_a_token_impossible_under_the_reference(name: str, value: float, gradient: float):
    logp, ref = torch.tensor(-1.0, requires_grad=True), torch.tensor(-math.inf)
    kl = KL[name](logp, ref)
    kl.backward()
    assert kl.item() == pytest.approx(value)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient)
    assert kl_is_bounded(logp.detach(), ref)


# ---- masked sums and aggregation -------------------------------------------------------------------------------------


def test_masked_stops_nan_in_value_and_in_gradient():
    values = torch.tensor([[1.0, math.nan], [2.0, math.inf]], requires_grad=True)
    kept = masked(values, torch.tensor([[True, False], [True, False]]))
    assert kept.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    (gradient,) = torch.autograd.grad(kept.square().sum(), values)
    assert gradient.tolist() == [[2.0, 0.0], [4.0, 0.0]]


# Per-token losses (1, 2, 3) and (10), N = 2 sequences, 4 tokens, L = 5:
#   seq_mean_token_mean  ((1 + 2 + 3)/3 + 10/1) / 2 = 6
#   token_mean           16 / 4 = 4
#   seq_mean_token_sum   16 / 2 = 8
#   constant             16 / (2·5) = 1.6
@pytest.mark.parametrize(
    ("name", "value"),
    [("seq_mean_token_mean", 6.0), ("token_mean", 4.0), ("seq_mean_token_sum", 8.0), ("constant", 1.6)],
)
def test_aggregation_by_hand(name: str, value: float):
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, -77.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    assert AGGREGATIONS[name](per_token, mask, Denominators(2, 4, 5)).item() == pytest.approx(value)


def test_every_aggregation_has_a_hand_number():
    assert set(AGGREGATIONS) == {"seq_mean_token_mean", "token_mean", "prompt_mean", "seq_mean_token_sum", "constant"}
    assert set(KL) == {name for name, *_ in BY_HAND}


# Two prompts of two completions: losses 1, 2, 3 and 10 on 4 tokens: 16/4 = 4; losses 6 and 6, 6 on 3 tokens: 6.
#   Prompt mean (4 + 6)/2 = 5, while the token mean is 34/7 and the sequence mean (2 + 10 + 6 + 6)/4 = 6.
#   The prompts' mean lengths are 2 and 1.5: (16/2 + 18/1.5)/4 = 5
def test_prompt_mean_by_hand_however_the_rows_are_split():
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, 0.0], [6.0, -1.0, 0.0], [6.0, 6.0, 0.0]])
    mask = torch.arange(3) < torch.tensor([[3], [1], [1], [2]])
    counts = Denominators(4, 7, 5)
    lengths = torch.tensor([[2.0], [2.0], [1.5], [1.5]])
    for parts in ([[0, 1, 2, 3]], [[3, 0], [2], [1]]):
        losses = [
            prompt_mean(per_token[rows], mask[rows], replace(counts, prompt_length=lengths[rows])) for rows in parts
        ]
        assert float(sum(losses)) == pytest.approx(5)
    with pytest.raises(ValueError, match="prompt_mean needs"):
        prompt_mean(per_token, mask, counts)
    nothing = replace(counts, prompt_length=torch.zeros(4, 1))
    assert prompt_mean(per_token, torch.zeros_like(mask), nothing) == 0


# A right answer of 10 tokens (A = +1) beside a wrong one of 100 (A = −1), ρ = 1: the gradient of −A·log π per token.
#   seq_mean_token_mean  1/(2·10) = 1/20 and 1/(2·100) = 1/200: the wrong tokens weigh ten times less
#   token_mean           1/110 both            constant, L = 100   1/(2·100) = 1/200 both
#   seq_mean_token_sum   1/2 both
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("seq_mean_token_mean", 1 / 20, 1 / 200),
        ("token_mean", 1 / 110, 1 / 110),
        ("constant", 1 / 200, 1 / 200),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
    ],
)
def test_weights_of_10_and_100_tokens(name: str, right: float, wrong: float):
    mask = torch.arange(100) < torch.tensor([[10], [100]])
    logps = torch.full((2, 100), -1.0, dtype=torch.float64, requires_grad=True)
    loss = AGGREGATIONS[name](-torch.tensor([[1.0], [-1.0]]) * logps, mask, Denominators(2, 110, 100))
    (gradient,) = torch.autograd.grad(-loss, logps)
    assert gradient[0, :10].tolist() == pytest.approx([right] * 10, abs=1e-12)
    assert gradient[1].tolist() == pytest.approx([-wrong] * 100, abs=1e-12)
    assert torch.equal(gradient[0, 10:], torch.zeros(90, dtype=torch.float64))


# One sequence of 4 tokens at loss 2, one of 12 at loss 1, each a micro-batch of its own:
#   sequence mean (2 + 1)/2 = 1.5 (e03.2); constant length 16: (8 + 12)/(2·16) = .625 (e03.3); token mean 20/16 = 1.25,
#   which is not the mean 1.5 of the micro-batches' own token means; summed: 20/2 = 10
@pytest.mark.parametrize(
    ("name", "value"),
    [("seq_mean_token_mean", 1.5), ("constant", 0.625), ("token_mean", 1.25), ("seq_mean_token_sum", 10.0)],
)
def test_cases_e03_losses_of_micro_batches_add_up(name: str, value: float):
    counts = Denominators(sequences=2, tokens=16, length=16)
    parts = [
        AGGREGATIONS[name](torch.full((1, tokens), loss), torch.ones(1, tokens, dtype=torch.bool), counts).item()
        for tokens, loss in ((4, 2.0), (12, 1.0))
    ]
    assert sum(parts) == pytest.approx(value)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_case_e04_2_nothing_left_to_train_is_a_loss_of_zero(name: str):
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    loss = AGGREGATIONS[name](
        -logps, nothing, Denominators(sequences=2, tokens=0, length=3, prompt_length=torch.zeros(2, 1))
    )
    loss.backward()
    assert loss.item() == 0
    assert logps.grad is not None
    assert torch.equal(logps.grad, torch.zeros(2, 3))
