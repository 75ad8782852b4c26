"""One process or two: with denominators summed over processes and gradients added, the gradient is the same."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from exact_llama import small_llama
from grpo_toolbox.batch import Batch, denominators
from grpo_toolbox.models.forward import completion_logps
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
    return Batch(PROMPTS, (0, 0, 1, 1), COMPLETIONS, mask, advantages, drawn, old_logps=drawn, ref_logps=drawn - 0.3)


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
        denominators=counts,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
    )
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


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
