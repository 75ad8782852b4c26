"""`model.fp32_head`: logits in float32 from what the body gives, wherever the head is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.forward import autocast, completion_logps, decoder
from grpo_toolbox.models.head import Float32Head, use_float32_head
from grpo_toolbox.models.load import LoraOptions, load_model, make_reference, save_pretrained
from grpo_toolbox.models.tiny import build_tiny, build_tokenizer
from grpo_toolbox.ops import logps_and_entropy
from grpo_toolbox.types import Prompt, Rollout, Sampling
from toolbox_runs import built_run

PROMPT = Prompt(0, "", (4, 5, 13, 6, 15))
ROWS = [(4, 5, 6, 1), (7, 8, 1), (9, 1), (10, 11, 12, 13)]
HALF = torch.bfloat16


def tiny(fp32_head: bool, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    model, _ = build_tiny()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # logits of a trained model's size: rounding them shows
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    if fp32_head:
        use_float32_head(model)
    return model.to(dtype)


def batch() -> Batch:
    rollouts = [Rollout(PROMPT, ids, (-1.0,) * len(ids), "stop", "") for ids in ROWS]
    return collate(rollouts, torch.ones(1, len(ROWS)))


def logps_of(model: Any, packed: bool = True, precision: torch.dtype | None = HALF) -> Tensor:
    with autocast(torch.device("cpu"), precision):
        return completion_logps(model, batch(), temperature=0.8, packed=packed)[0]


def by_hand(model: Any, precision: torch.dtype | None = HALF) -> Tensor:
    """Log-probs of the body's hidden states under a head in float32, row by row."""
    rows = torch.zeros(len(ROWS), max(map(len, ROWS)))
    for row, ids in enumerate(ROWS):
        with torch.no_grad(), autocast(torch.device("cpu"), precision):
            hidden = decoder(model)(input_ids=torch.tensor([[*PROMPT.ids, *ids]]), use_cache=False).last_hidden_state[0]
        logits = hidden[len(PROMPT.ids) - 1 : -1].float() @ model.lm_head.weight.detach().float().T
        rows[row, : len(ids)] = logps_and_entropy(logits, torch.tensor(ids), 0.8)[0]
    return rows


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("precision", "dtype"), [(HALF, torch.float32), (None, HALF)], ids=["autocast", "weights"])
def test_log_probs_are_those_of_a_float32_head(packed: bool, precision: torch.dtype | None, dtype: torch.dtype):
    exact, rounded = (logps_of(tiny(on, dtype=dtype), packed, precision) for on in (True, False))
    expected = by_hand(tiny(False, dtype=dtype), precision)
    assert exact.dtype == torch.float32
    assert (exact - expected).abs().max() < 1e-5
    assert (rounded - expected).abs().max() > 1e-3


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_reach_body_and_head(packed: bool, tied: bool):
    """Those of the whole model in float32, up to the rounding of the body's own bfloat16."""
    model, plain = tiny(True, tied=tied), tiny(False, tied=tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight or not tied
    logps_of(model, packed).sum().backward()
    logps_of(plain, packed, None).sum().backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        assert found is not None
        assert (found - parameter.grad).norm() < 0.05 * parameter.grad.norm(), name


@pytest.mark.parametrize("packed", [True, False])
def test_in_float32_and_float64_it_changes_nothing(packed: bool):
    for dtype in (torch.float32, torch.float64):
        with_it, without = (logps_of(tiny(on, dtype=dtype), packed, None) for on in (True, False))
        assert torch.equal(with_it, without)


@pytest.mark.parametrize("engine", [LocalEngine, HfEngine])
def test_the_engine_samples_with_the_head_that_is_trained(engine: Any):
    """One token, so that sampler and trainer see the same prompt: what is left is the head's own rounding."""
    gaps = []
    for fp32_head in (True, False):
        model = tiny(fp32_head)
        sampler = engine(model, decode=lambda *_: "", stop_ids=(1,), autocast_dtype=HALF)
        rollouts = sampler.generate([PROMPT], 8, Sampling(max_new_tokens=1, temperature=0.8, seed=3))
        drawn = collate(rollouts, torch.ones(1, 8))
        with torch.no_grad(), autocast(torch.device("cpu"), HALF):
            logps, _ = completion_logps(model, drawn, temperature=0.8, packed=False)
        expected = torch.stack([_first(model)[one.ids[0]] for one in rollouts])
        assert (logps[:, 0] - drawn.sampler_logps[:, 0]).abs().max() < 1e-5
        gaps.append((drawn.sampler_logps[:, 0] - expected).abs().max())
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-3


def _first(model: Any) -> Tensor:
    """Log-probs (V,) of the first new token under a head in float32."""
    with torch.no_grad(), autocast(torch.device("cpu"), HALF):
        hidden = decoder(model)(input_ids=torch.tensor([PROMPT.ids]), use_cache=False).last_hidden_state[0, -1]
    return (hidden.float() @ model.lm_head.weight.detach().T / 0.8).log_softmax(dim=-1)


def test_it_is_off_by_default_and_a_setting_of_the_run(tmp_path):
    heads = {}
    for setting in ((), ("model.fp32_head=true",)):
        run = built_run("experiment=grpo_tiny", "callbacks=none", f"run_dir={tmp_path / str(len(setting))}", *setting)
        heads[setting] = type(run.policy.get_output_embeddings()).__name__
    assert list(heads.values()) == ["Linear", "Float32Head"]


def test_it_lives_beside_an_adapter_a_reference_and_a_checkpoint(tmp_path):
    adapted = load_model("builtin:tiny", lora=LoraOptions(r=2), fp32_head=True)
    assert isinstance(adapted.get_base_model().lm_head, Float32Head)
    model = load_model("builtin:tiny", fp32_head=True)
    with make_reference(model).model() as reference:
        assert isinstance(reference.get_output_embeddings(), Float32Head)
    save_pretrained(model, build_tokenizer(), tmp_path)
    again = load_model(str(tmp_path))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_a_head_that_it_cannot_serve_is_refused():
    with pytest.raises(ConfigError, match=r"fp32_head=true needs .* no adapter"):
        load_model("builtin:tiny", lora=LoraOptions(r=2, target_modules=["lm_head"]), fp32_head=True)
    model, _ = build_tiny()
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ConfigError, match="one linear layer"):
        use_float32_head(model)
