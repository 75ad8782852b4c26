"""The reference beside an adapter: the base before it is reset, the adapter of that moment afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import LoraOptions, Reference, load_model, save_pretrained
from grpo_toolbox.models.tiny import build_tokenizer
from grpo_toolbox.types import Prompt, Rollout


def _batch() -> Batch:
    prompt = Prompt(id=0, text="", ids=(3, 4, 5))
    rows = [Rollout(prompt, ids, (0.0,) * len(ids), "stop", "") for ids in ((6, 7, 8), (9, 1))]
    return collate(rows, torch.tensor([[1.0, -1.0]]))


@torch.no_grad()
def _logps(model: nn.Module, *, packed: bool = True) -> Tensor:
    return completion_logps(model, _batch(), temperature=1.0, packed=packed)[0]


def _of(reference: Reference) -> Tensor:
    with reference.model() as net:
        return _logps(net)


def _learn(policy: nn.Module) -> None:
    """One optimizer step on the log-probs, large enough to see."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    policy.train()
    logps, _ = completion_logps(policy, _batch(), temperature=1.0, packed=True)
    (logps * _batch().advantages).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    policy.eval()


def _adapted(**options: bool) -> nn.Module:
    policy = load_model("builtin:tiny", lora=LoraOptions(2), **options)  # type: ignore[arg-type]
    for _ in range(2):  # the first step moves only B, which starts at 0
        _learn(policy)
    return policy


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"fp32_head": True}], ids=str)
def test_after_a_reset_it_is_the_policy_and_stays_while_that_learns(options: dict[str, bool]) -> None:
    base = _logps(load_model("builtin:tiny"))
    policy = _adapted(**options)
    reference = Reference(policy)
    assert torch.equal(_of(reference), base)
    for _ in range(2):  # the second reset writes into the copy that the first has made
        then = _logps(policy)
        reference.refresh(policy, 1.0)
        assert torch.equal(_of(reference), then)
        _learn(policy)
        assert (_logps(policy) - then).abs().max() > 0.01
        assert torch.equal(_of(reference), then)


def test_a_reset_copies_the_adapter_and_nothing_of_the_base() -> None:
    policy = _adapted()
    reference = Reference(policy)
    reference.refresh(policy, 1.0)
    base = {value.data_ptr() for name, value in policy.named_parameters() if ".lora_" not in name}
    with reference.model() as net:
        shared = {value.data_ptr() for value in net.parameters()} & {value.data_ptr() for value in policy.parameters()}
        assert shared == base
        assert not any(value.requires_grad for value in net.parameters())
    assert reference.own_weights().keys() == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    assert all(value.requires_grad == (".lora_" in name) for name, value in policy.named_parameters())


def test_the_policy_is_trained_counted_and_written_as_without_a_reset(tmp_path) -> None:  # type: ignore[no-untyped-def]
    policy = _adapted()
    before = {name: value.clone() for name, value in policy.named_parameters()}
    reference = Reference(policy)
    reference.refresh(policy, 1.0)
    with reference.model():
        pass
    after = dict(policy.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(kept, after[name]) for name, kept in before.items())
    save_pretrained(policy, build_tokenizer(), tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == set()
    torch.testing.assert_close(_logps(load_model(str(tmp_path))), _logps(policy), rtol=0, atol=1e-5)


def test_it_runs_in_eval_mode_beside_a_policy_with_dropout() -> None:
    policy = load_model("builtin:tiny", lora=LoraOptions(2, dropout=0.5))
    _learn(policy)
    reference = Reference(policy)
    reference.refresh(policy, 1.0)
    then = _logps(policy)
    policy.train()
    assert torch.equal(_of(reference), then)
    assert torch.equal(_of(reference), then)
    assert policy.training


def test_saved_weights_bring_it_back() -> None:
    policy = _adapted()
    reference = Reference(policy)
    assert reference.state_dict() is None
    reference.refresh(policy, 1.0)
    kept = _of(reference)
    state = copy.deepcopy(reference.state_dict())
    assert state is not None
    _learn(policy)
    resumed = Reference(policy)
    own = resumed.own_weights()
    assert own.keys() == state.keys()
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
    assert torch.equal(_of(resumed), kept)
    assert resumed.state_dict() is not None


def test_a_mix_is_refused_before_and_after_a_reset() -> None:
    """With B·A = 2·3 and B'·A' = 0·5, half of each product is 3, and the product of half of each factor is 1·4."""
    policy = _adapted()
    reference = Reference(policy)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"reference_mix=0\.6 cannot be done with LoRA.*reference_mix=1"):
            reference.refresh(policy, 0.6)
        reference.refresh(policy, 1.0)


def test_full_fine_tuning_keeps_a_copy_of_everything() -> None:
    policy = load_model("builtin:tiny")
    reference = Reference(policy)
    start = _of(reference)
    assert reference.state_dict() is None
    _learn(policy)
    assert torch.equal(_of(reference), start)
    reference.refresh(policy, 1.0)
    assert torch.equal(_of(reference), _logps(policy))
    assert reference.own_weights().keys() == dict(policy.named_parameters()).keys()
