"""One process or two: with denominators summed over processes and gradients added, the gradient is the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from exact_llama import VOCABULARY, small_llama
from grpo_toolbox.batch import Batch, denominators
from grpo_toolbox.models.experts import ExpertBalance, aux_loss
from grpo_toolbox.models.forward import completion_hidden, completion_logps
from grpo_toolbox.objectives import OBJECTIVES, Objective, loss_and_terms
from grpo_toolbox.ops import AGGREGATIONS, Denominators

LENGTH = 7.0
PROMPTS = ((3, 4, 5), (6, 7))
COMPLETIONS = ((8, 9, 10, 1), (11, 1), (12, 8, 1), (9,))
ADVANTAGES = (1.3, -0.7, 0.4, -1.1)
KINDS = [(agg, beta, entropy) for agg in AGGREGATIONS for beta, entropy in ((0.0, 0.0), (0.1, 0.05))]


def _batch() -> Batch:
    lengths = torch.tensor([len(ids) for ids in COMPLETIONS])
    mask = torch.arange(4) < lengths.unsqueeze(1)
    drawn = torch.linspace(-3, -1, 16, dtype=torch.float64).reshape(4, 4)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64).unsqueeze(1)
    made = Batch(PROMPTS, (0, 0, 1, 1), COMPLETIONS, mask, advantages, drawn, old_logps=drawn, ref_logps=drawn - 0.3)
    return replace(made, prompt_length=torch.tensor([[3.0], [3.0], [2.0], [2.0]]))


def _gradient(model: nn.Module, batch: Batch, counts: Denominators, kind: tuple[str, float, float]) -> Tensor:
    agg, beta, entropy_coef = kind
    objective = Objective(OBJECTIVES["clipped"], loss_agg=agg, beta=beta, entropy_coef=entropy_coef)
    logps, entropy = completion_logps(model, batch, temperature=0.8, packed=True)
    loss, _ = loss_and_terms(
        objective,
        logps=logps,
        entropy=entropy,
        advantages=batch.advantages,
        mask=batch.mask,
        denominators=replace(counts, prompt_length=batch.prompt_length),
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
    )
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def _balanced(batch: Batch, add_up: Callable[[Tensor], object]) -> Tensor:
    """The gradient of the load-balancing loss, with how often experts were chosen added up over processes."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=4, initializer_range=0.4, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = MixtralForCausalLM(config).eval()
    balance = ExpertBalance(model, 1.0, rows_per_prompt=2, packed=True)
    with balance.watching(batch):
        completion_hidden(model, batch, packed=True)
    part = balance._part
    assert part is not None
    step = replace(part, chosen=part.chosen.clone(), tokens=part.tokens.clone())
    add_up(step.chosen)
    add_up(step.tokens)
    found = torch.autograd.grad(aux_loss(part, step), list(model.parameters()), allow_unused=True)
    return torch.cat([one.flatten() for one in found if one is not None])


def _worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = ([0], [1, 2, 3])[rank]  # a group straddles the processes, and they hold unequal shares
    mine = _batch().select(rows)
    own = denominators(mine, LENGTH)
    shared = torch.tensor([own.sequences, own.tokens], dtype=torch.float64)
    dist.all_reduce(shared)
    counts = Denominators(sequences=float(shared[0]), tokens=float(shared[1]), length=LENGTH)
    model = small_llama()
    total = []
    for kind in KINDS:
        gradient = _gradient(model, mine, counts, kind)
        dist.all_reduce(gradient)
        total.append(gradient)
    total.append(_balanced(mine, dist.all_reduce))
    dist.all_reduce(total[-1])
    if rank == 0:
        torch.save(total, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gradients_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_worker, args=(port, str(folder)), nprocs=2)
    return torch.load(folder / "gradients.pt")


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[f"{agg}-beta{beta}" for agg, beta, _ in KINDS])
def test_two_processes_have_the_gradient_of_one(gradients_of_two: list[Tensor], index: int) -> None:
    batch = _batch()
    alone = _gradient(small_llama(), batch, denominators(batch, LENGTH), KINDS[index])
    assert alone.abs().max() > 1e-4
    torch.testing.assert_close(gradients_of_two[index], alone, rtol=1e-10, atol=1e-13)


def test_two_processes_balance_experts_as_one(gradients_of_two: list[Tensor]) -> None:
    alone = _balanced(_batch(), lambda counts: None)
    assert alone.abs().max() > 1e-3
    torch.testing.assert_close(gradients_of_two[-1], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))
