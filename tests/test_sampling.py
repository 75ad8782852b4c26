"""Drawing tokens: the right set, the right frequencies, the right log-probs, and streams that do not repeat."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_toolbox.engines.sampling import row_keys, sample, uniforms
from grpo_toolbox.types import Sampling

JUST_BELOW_ONE = 1 - 2.0**-53
PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
"""By falling probability: tokens 1, 3, 4, 0, 2 with 0.4, 0.25, 0.2, 0.1, 0.05."""


def draw(logits: Tensor, uniform: Tensor | float, banned: tuple[int, ...] = (), **options: float) -> Tensor:
    points = torch.as_tensor(uniform, dtype=torch.float64).reshape(-1)
    rows = logits.expand(len(points), -1)
    return sample(rows, points, Sampling(1, **options), banned)[0]  # type: ignore[arg-type]


def drawable(logits: Tensor, banned: tuple[int, ...] = (), **options: float) -> set[int]:
    """Every token that some point of [0, 1) draws, by a grid finer than any probability of the examples."""
    grid = torch.cat([torch.arange(1000, dtype=torch.float64) / 1000, torch.tensor([JUST_BELOW_ONE])])
    return set(draw(logits, grid, banned, **options).tolist())


# ---- the inverse of the cumulative distribution ----------------------------------------------------------------------


def test_a_token_is_drawn_where_the_cumulative_probability_passes_the_point():
    """Cumulative: 0.1, 0.5, 0.55, 0.8, 1."""
    points = torch.tensor([0.0, 0.09, 0.11, 0.49, 0.51, 0.54, 0.56, 0.79, 0.81, JUST_BELOW_ONE])
    assert draw(PROBS.log(), points).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_temperature_flattens_before_drawing():
    """At T = 2 probabilities are ∝ √p: 0.316, 0.632, 0.224, 0.5, 0.447, sum 2.12; cumulative 0.149, 0.447, 0.553."""
    assert draw(PROBS.log(), [0.14, 0.16, 0.44, 0.46, 0.54, 0.56], temperature=2.0).tolist() == [0, 1, 1, 2, 2, 3]


def test_tokens_without_probability_are_never_drawn():
    """At the lower end, in the middle and at the upper end of the vocabulary."""
    inf = math.inf
    logits = torch.tensor([-inf, 0.0, -inf, 0.0, -inf])
    assert drawable(logits) == {1, 3}
    assert draw(logits, [0.0, 0.499, 0.501, JUST_BELOW_ONE]).tolist() == [1, 1, 3, 3]
    assert draw(torch.tensor([-inf, -inf, 3.0, -inf]), [0.0, 0.5, JUST_BELOW_ONE]).tolist() == [2, 2, 2]


def test_a_vocabulary_of_one_token():
    tokens, logps = sample(torch.zeros(2, 1), torch.tensor([0.0, JUST_BELOW_ONE]), Sampling(1))
    assert (tokens.tolist(), logps.tolist()) == ([0, 0], [0.0, 0.0])


def test_a_large_flat_vocabulary_is_drawn_evenly():
    """Over 49 152 equal tokens the point u draws token ⌊u·V⌋; u is taken in the middle of each token."""
    size = 49_152
    wanted = torch.arange(0, size, 241)
    assert draw(torch.zeros(size), (wanted + 0.5) / size).tolist() == wanted.tolist()
    assert draw(torch.zeros(size), [0.0, JUST_BELOW_ONE]).tolist() == [0, size - 1]


def test_a_tail_far_below_float32_is_drawn_token_by_token():
    """One token of 1/2, then 150 000 that share 1/2, and after them 1 000 of 10⁻⁹ each, together 10⁻⁶.

    In float32 a sum near 1 moves in steps of 6·10⁻⁸, so that one tail token in sixty would be drawn for all.
    """
    logits = torch.cat([torch.tensor([0.5]), torch.full((150_000,), 0.5 / 150_000), torch.full((1000,), 1e-9)]).log()
    total = 1 + 1e-6
    wanted = torch.arange(5, 1000, 20)
    drawn = draw(logits, (1 + (wanted.double() + 0.5) * 1e-9) / total)
    assert (drawn - 150_001 - wanted).abs().max() <= 2  # the probabilities before them are float32, and add up so


def test_broken_logits_give_a_token_and_a_log_prob_that_is_not_finite():
    """The engine goes on and `rollout` refuses the result, instead of an index error out of nowhere."""
    tokens, logps = sample(torch.full((1, 4), math.nan), torch.tensor([0.5]), Sampling(1))
    assert 0 <= int(tokens) < 4
    assert not torch.isfinite(logps).any()


def test_frequencies_are_the_softmax():
    """20 000 draws of 10 tokens; χ² of 9 degrees of freedom is below 27.88 in 999 of 1000 samples."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, -2.0, 1.7, 0.5])
    for temperature in (1.0, 0.7, 1.6):
        expected = (logits.double() / temperature).softmax(0) * 20_000
        points = uniforms(row_keys(11, [4], 20_000), 0)
        counts = torch.bincount(draw(logits, points, temperature=temperature), minlength=10).double()
        assert float(((counts - expected) ** 2 / expected).sum()) < 27.88


# ---- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
def test_log_probs_are_of_the_whole_softmax_whatever_is_cut_or_banned(options):
    logits, points = PROBS.log().expand(3, -1), torch.tensor([0.0, 0.5, 0.9])
    for temperature in (1.0, 0.7):
        tokens, logps = sample(logits, points, Sampling(1, temperature=temperature, **options), banned=(1,))
        assert 1 not in tokens
        torch.testing.assert_close(logps, (PROBS.log() / temperature).log_softmax(0)[tokens])


def test_greedy_takes_the_most_likely_allowed_token_and_reports_it_at_temperature_one():
    greedy = Sampling(1, temperature=0)
    tokens, logps = sample(3 * PROBS.log().unsqueeze(0), torch.tensor([0.99]), greedy)
    assert int(tokens) == 1
    assert float(logps) == pytest.approx(math.log(0.4**3 / sum(p**3 for p in PROBS.tolist())), abs=1e-5)
    tokens, _ = sample(PROBS.log().unsqueeze(0), torch.tensor([0.0]), greedy, banned=(1, 3))
    assert int(tokens) == 4


# ---- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "kept"), [(4.0, range(2, 800)), (0.1, range(2000, 3000))], ids=["peaked", "flat"])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(spread, kept):
    """3 000 tokens: in a peaked distribution 90 % lie within the first thousand, which are sorted alone; else all are.

    A grid over [0, 1) finds every kept token that two of its points fall to, and no other.
    """
    logits = spread * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    probs, order = logits.double().softmax(0).sort(descending=True)
    count = int((probs.cumsum(0) < 0.9).sum()) + 1
    assert count in kept
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = set(draw(logits, grid, top_p=0.9).tolist())
    assert drawn <= set(order[:count].tolist())
    likely = order[: int((probs[:count] / probs[:count].sum() > 1 / 10_000).sum())]  # two points of the grid or more
    assert set(likely.tolist()) <= drawn


def test_banned_tokens_are_banned_in_the_rows_named():
    rows = PROBS.log().expand(2, -1)
    tokens, _ = sample(rows, torch.tensor([0.3, 0.3]), Sampling(1), banned=(1,), where=torch.tensor([True, False]))
    assert tokens.tolist() == [3, 1]  # without token 1 the cumulative sums are 1/6, 1/4, 2/3: 0.3 draws token 3


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),  # the token that crosses top-p is kept
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_p": 1e-9}, {1}),  # never nothing
        ({"min_p": 0.24}, {0, 1, 3, 4}),  # 0.24·0.4 = 0.096
        ({"min_p": 0.26}, {1, 3, 4}),  # 0.104
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # top-p of what top-k left: 0.4, 0.25, 0.2 of 0.85
        ({"top_k": 4, "min_p": 0.6}, {1, 3}),  # 0.24
        ({"top_p": 0.7, "min_p": 0.6}, {1, 3}),  # of the two left, 0.4 is 0.62
    ],
)
def test_cuts_keep_exactly_the_right_tokens(options, kept):
    assert drawable(PROBS.log(), **options) == kept


def test_what_is_left_is_drawn_in_proportion():
    """top_k = 2 leaves 0.4 and 0.25 of 0.65: token 1 below 0.615, token 3 above."""
    assert draw(PROBS.log(), [0.0, 0.61, 0.62, JUST_BELOW_ONE], top_k=2).tolist() == [1, 1, 3, 3]


def test_cuts_see_the_temperature():
    """At T = 2 the shares are 0.149, 0.298, 0.106, 0.236, 0.211: two tokens reach 0.5, at T = 1 they reach 0.65."""
    assert drawable(PROBS.log(), top_p=0.6) == {1, 3}
    assert drawable(PROBS.log(), top_p=0.6, temperature=2.0) == {1, 3, 4}


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.7}])
def test_banned_tokens_are_never_drawn(options):
    """Cuts are counted on what may be drawn: with the two likeliest banned, top-k = 2 leaves tokens 4 and 0."""
    points = uniforms(row_keys(0, [0], 20_000), 0)
    drawn = set(draw(PROBS.log(), points, banned=(1, 3), **options).tolist())
    assert drawn == {"top_k": {4, 0}, "top_p": {4}, "min_p": {4}}.get(next(iter(options), ""), {4, 0, 2})


# ---- streams ---------------------------------------------------------------------------------------------------------


def stream(seed: int = 0, prompt: int = 0, place: int = 0, position: int = 0) -> float:
    return float(uniforms(row_keys(seed, [prompt], place + 1)[-1:], position))


def test_numbers_lie_in_the_half_open_unit_interval_and_are_even():
    """Mean 1/2 and variance 1/12 within four standard errors; each of 10 bins holds a tenth (χ² of 9 < 27.88)."""
    points = uniforms(row_keys(1, range(100), 200), 3)
    assert points.dtype == torch.float64
    assert 0 <= float(points.min()) < float(points.max()) < 1
    assert float(points.mean()) == pytest.approx(1 / 2, abs=4 * (1 / 12 / 20_000) ** 0.5)
    assert float(points.var()) == pytest.approx(1 / 12, abs=4 * (1 / 180 / 20_000) ** 0.5)
    counts = torch.histc(points, bins=10, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 27.88


def test_no_number_comes_twice():
    """400 000 rows and positions: a 53-bit number comes twice with probability 10⁻⁵."""
    keys = row_keys(7, range(50), 20)
    points = torch.stack([uniforms(keys, position) for position in range(400)])
    assert len(torch.unique(points)) == points.numel()


@pytest.mark.parametrize("axis", ["seed", "position", "prompt", "place"])
def test_neighbouring_streams_are_not_correlated(axis):
    """Of 19 008 pairs of independent numbers the correlation is within 4/√19008 = 0.029."""
    keys = [row_keys(seed, range(12), 12) for seed in range(12)]
    points = torch.stack([uniforms(key, position) for key in keys for position in range(12)])
    points = points.reshape(12, 12, 12, 12).movedim(["seed", "position", "prompt", "place"].index(axis), 0)
    pairs = torch.stack([points[:-1].flatten(), points[1:].flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.029


def test_a_stream_is_named_by_seed_prompt_place_and_position_alone():
    keys = row_keys(3, [8, 2, 5], 4)
    assert keys.tolist() == [key for prompt in (8, 2, 5) for key in row_keys(3, [prompt], 4).tolist()]
    assert row_keys(3, [2], 2).tolist() == row_keys(3, [2], 4)[:2].tolist()


def test_swapped_names_are_other_streams():
    """(seed, prompt, place, position) is not a sum or an exclusive or of its parts."""
    names = [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3), (4, 2, 3, 1), (3, 0, 3, 4), (0, 3, 3, 4)]
    assert len({stream(*name) for name in names}) == len(names)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 10**30])
def test_any_whole_number_is_a_seed(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns where an integer wraps around unmeant
        keys = row_keys(seed, [0, 1], 2)
    assert keys.dtype == np.uint64
    assert len(set(keys.tolist())) == 4
