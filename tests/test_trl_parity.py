"""Parity with TRL: its objective and ours on the same log-probs, loss and gradient, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.api.metrics import logged_metrics
from grpo_toolbox.selection import entropy_threshold
from grpo_toolbox.types import Step

pytest.importorskip("trl")

from same_tensors import (
    ENTROPY,
    HALVES,
    MASK,
    OLD,
    REFERENCE,
    ROWS,
    SAMPLER,
    WHOLE,
    WIDTH,
    assert_equal,
    our_metrics,
    ours,
    theirs,
)
from trl_side import MAX_TOKENS, save_reference, trl_trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

CLIP = {"clip_eps": 0.2, "clip_eps_high": 0.28}
LOSS_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"epsilon_high": 0.28}, CLIP | {"loss_agg": "seq_mean_token_mean"}),
    "dr_grpo": ({"epsilon_high": 0.28}, CLIP | {"loss_agg": "constant", "length": MAX_TOKENS}),
    "dapo": ({"epsilon_high": 0.28}, CLIP | {"loss_agg": "token_mean"}),
    "luspo": ({"epsilon_high": 0.28}, CLIP | {"loss_agg": "seq_mean_token_sum"}),
    "cispo": ({"epsilon_high": 1.3}, {"name": "cispo", "ratio_cap": 1.3, "loss_agg": "token_mean"}),
    "sapo": ({}, {"name": "sapo", "loss_agg": "seq_mean_token_mean"}),
    "vespo": ({}, {"name": "vespo", "loss_agg": "token_mean"}),
}
CLIPPED_TYPES = ("grpo", "dr_grpo", "dapo", "luspo")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("trl") / "reference")


@pytest.fixture
def default_float64() -> Iterator[None]:
    """TRL makes some constants (SAPO's temperatures) in the default precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.usefixtures("default_float64")
def test_loss_types_at_both_levels_over_two_micro_batches(loss_type: str, level: str, reference: Path):
    their_options, our_options = LOSS_TYPES[loss_type]
    trainer = trl_trainer(
        reference, loss_type=loss_type, importance_sampling_level=level, micro_batches=2, **their_options
    )
    options = our_options | {"ratio_level": level}
    assert_equal(ours(options, old_logps=OLD), theirs(trainer, HALVES, old_per_token_logps=OLD))
    assert_equal(ours(options), theirs(trainer, HALVES))  # on-policy: π_old = π


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.usefixtures("default_float64")
def test_what_is_logged_of_the_clip_is_what_trl_logs(loss_type: str, level: str, reference: Path):
    """Under TRL's names, of all tokens or completions of the step, though the one of no advantage is not forwarded."""
    their_options, our_options = (dict(options) for options in LOSS_TYPES[loss_type])
    if loss_type in CLIPPED_TYPES:  # narrow enough for the ratios of whole completions
        their_options |= {"epsilon": 0.1, "epsilon_high": 0.05}
        our_options |= {"clip_eps": 0.1, "clip_eps_high": 0.05}
    elif loss_type == "cispo":
        their_options["epsilon_high"] = our_options["ratio_cap"] = 1.05
    trainer = trl_trainer(
        reference,
        loss_type=loss_type,
        importance_sampling_level=level,
        per_device_train_batch_size=ROWS,
        **their_options,
    )
    theirs(trainer, WHOLE, old_per_token_logps=OLD)
    named = {name: values[-1] for name, values in trainer._metrics["train"].items() if name != "entropy"}
    found = our_metrics(our_options | {"ratio_level": level}, HALVES, old_logps=OLD)
    mine = logged_metrics(Step(1, found), loss_type)
    shown = {name for name in mine if name.startswith(("clip_ratio/", "cispo_", "vespo/"))}
    if loss_type == "vespo":  # a mean over what is forwarded, so that the row without advantage is not in it
        everything = our_metrics(our_options | {"ratio_level": level}, WHOLE, old_logps=OLD, every_row=True)
        mine["vespo/phi_seq_mean"] = everything["vespo/phi_mean"]
    assert shown == set(named)
    assert {name: mine[name] for name in named} == pytest.approx(named, abs=1e-7)
    assert not named or max(named.values()) > 0.1


# TRL's option, ours, and the loss types that have it
EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]] = {
    "KL": ({"beta": 0.3, "use_bias_correction_kl": False}, {"beta": 0.3}, tuple(LOSS_TYPES)),
    "unbiased KL": ({"beta": 0.3}, {"beta": 0.3, "kl_unbiased": True}, tuple(LOSS_TYPES)),
    "delta above the clip range": ({"delta": 1.6}, {"delta": 1.6}, CLIPPED_TYPES),
    "delta below it": ({"delta": 1.1}, {"delta": 1.1}, CLIPPED_TYPES),
    "entropy bonus": ({"entropy_coef": 0.2}, {"entropy_coef": 0.2}, tuple(LOSS_TYPES)),
    "top entropy": ({"top_entropy_quantile": 0.4}, {"top_entropy_quantile": 0.4}, tuple(LOSS_TYPES)),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, {"off_policy_threshold": 0.05}, tuple(LOSS_TYPES)),
    "all together": (
        {"beta": 0.3, "delta": 1.6, "top_entropy_quantile": 0.7, "off_policy_mask_threshold": 0.1},
        {"beta": 0.3, "kl_unbiased": True, "delta": 1.6, "top_entropy_quantile": 0.7, "off_policy_threshold": 0.1},
        CLIPPED_TYPES,
    ),
}
COMBINATIONS = [(extra, loss_type) for extra, (_, _, loss_types) in EXTRAS.items() for loss_type in loss_types]


def _trained(share: float) -> Tensor:
    """The tokens that our step would train: one threshold over all of them."""
    return (entropy_threshold(ENTROPY[MASK], share) <= ENTROPY) & MASK


@pytest.mark.parametrize(("extra", "loss_type"), COMBINATIONS)
@pytest.mark.usefixtures("default_float64")
def test_options_of_the_objective(extra: str, loss_type: str, reference: Path):
    their_options, our_options, _ = EXTRAS[extra]
    trainer = trl_trainer(
        reference, loss_type=loss_type, per_device_train_batch_size=ROWS, **(LOSS_TYPES[loss_type][0] | their_options)
    )
    columns = {"ref_logps": REFERENCE, "old_logps": OLD, "sampler_logps": SAMPLER}
    plain = ours(LOSS_TYPES[loss_type][1], **columns)
    if "top_entropy_quantile" in our_options:
        columns["trained"] = _trained(our_options["top_entropy_quantile"])
    changed = ours(LOSS_TYPES[loss_type][1] | our_options, **columns)
    expected = theirs(
        trainer,
        WHOLE,
        ref_per_token_logps=REFERENCE,
        old_per_token_logps=OLD,
        sampling_per_token_logps=SAMPLER,
    )
    assert_equal(changed, expected)
    assert any(not torch.allclose(one, other) for one, other in zip(plain, changed, strict=True))


TOOL_FREE = (torch.arange(WIDTH) + torch.arange(ROWS).unsqueeze(1)) % 3 != 2
"""Which tokens the model wrote: the others are a tool's, and the third row is a tool's alone."""


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.usefixtures("default_float64")
def test_tokens_of_tools_are_left_out_as_trl_leaves_them_out(loss_type: str, level: str, reference: Path):
    """TRL's tool_mask: no loss, no KL, no bonus, no count, no share in a sequence's ratio."""
    trainer = trl_trainer(
        reference,
        loss_type=loss_type,
        importance_sampling_level=level,
        **{"beta": 0.3, "entropy_coef": 0.2, "off_policy_mask_threshold": 0.05, "use_bias_correction_kl": False},
        **{"per_device_train_batch_size": ROWS, **LOSS_TYPES[loss_type][0]},
    )
    options = {"beta": 0.3, "entropy_coef": 0.2, "off_policy_threshold": 0.05, "ratio_level": level}
    our_columns = {"ref_logps": REFERENCE, "old_logps": OLD, "sampler_logps": SAMPLER}
    columns = {"ref_per_token_logps": REFERENCE, "old_per_token_logps": OLD, "sampling_per_token_logps": SAMPLER}
    written = MASK & TOOL_FREE
    mine = ours(LOSS_TYPES[loss_type][1] | options, mask=written, **our_columns)
    assert_equal(mine, theirs(trainer, WHOLE, tool_mask=TOOL_FREE.long(), **columns))
    assert not mine[1][~written].any()
    assert not torch.allclose(mine[0], ours(LOSS_TYPES[loss_type][1] | options, **our_columns)[0])


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.99])
def test_the_tokens_of_highest_entropy_are_trls(share: float, reference: Path):
    trainer = trl_trainer(reference, top_entropy_quantile=share)
    for kept in (range(8), range(5), range(2, 3), range(1, 2)):  # 30, 16, 1 and 3 tokens
        rows = list(kept)
        mask, entropy = MASK[rows], ENTROPY[rows].float()
        expected = trainer.get_high_entropy_mask(entropy, mask.long(), 1 - share)
        assert torch.equal((entropy >= entropy_threshold(entropy[mask], share)) & mask, expected)
