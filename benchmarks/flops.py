"""Multiplications and additions of one training pass over packed rows, counted exactly, and the bare matrix rate.

Only useful work is counted: each prompt once, each completion token but the last of its row (which predicts nothing),
the output head on completion tokens alone, attention on the pairs that see each other. A backward pass is twice its
forward pass: one product for the input's gradient, one for the weight's. What is computed again (the head's logits)
counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from probe import finish


@dataclass(frozen=True)
class Product:
    """A matrix product (rows, inner) · (inner, outer) that a pass does `count` times, with both its gradients."""

    rows: int
    inner: int
    outer: int
    count: int

    @property
    def flops(self) -> int:
        """Of all of them, forward and backward."""
        return 3 * 2 * self.rows * self.inner * self.outer * self.count


@dataclass(frozen=True)
class Pass:
    """One forward and backward over packed rows: prompts of S tokens with completions of T tokens behind them."""

    prompt_lengths: Sequence[int]
    completions: Sequence[tuple[int, int]]
    """Of each row, the number of its prompt and its own length."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers."""
        return sum(self.prompt_lengths) + sum(length - 1 for _, length in self.completions)

    @property
    def labels(self) -> int:
        """Tokens that are trained, and that the head is computed for."""
        return sum(length for _, length in self.completions)

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees."""
        prompts = sum(length * (length + 1) // 2 for length in self.prompt_lengths)
        rows = (
            ((length - 1) * self.prompt_lengths[prompt], (length - 1) * length // 2)
            for prompt, length in self.completions
        )
        return prompts + sum(map(sum, rows))


def pass_of(batch: Any) -> Pass:
    """Return the pass over a batch of ours."""
    lengths = map(len, batch.completions)
    return Pass([len(ids) for ids in batch.prompts], list(zip(batch.group, lengths, strict=True)))


def products(config: Any, one: Pass) -> list[Product]:
    """Return the matrix products of a Llama-shaped model in one pass, the attention's own left out."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = [(hidden, queries, 1), (hidden, keys, 2), (queries, hidden, 1), (hidden, inner, 2), (inner, hidden, 1)]
    body = [Product(one.tokens, into, out, count * layers) for into, out, count in shapes]
    return [*body, Product(one.labels, hidden, config.vocab_size, 1)]


def flops(config: Any, one: Pass) -> int:
    """Return all of a pass: the products, and the attention's two per pair forward and four backward."""
    width = config.num_attention_heads * config.head_dim
    attention = 3 * 2 * 2 * width * one.pairs * config.num_hidden_layers
    return attention + sum(product.flops for product in products(config, one))


def bare_seconds(product: Product, chunk: int, device: str = "cpu", least: float = 0.2) -> float:
    """Return the seconds that the product and its gradients take by themselves, `chunk` rows at a time at most."""
    import torch

    rows = min(product.rows, chunk)
    left = torch.randn(rows, product.inner, device=device)
    weight = torch.randn(product.outer, product.inner, device=device)
    right = torch.randn(rows, product.outer, device=device)
    outputs = [torch.empty_like(right), torch.empty_like(left), torch.empty_like(weight)]

    def run() -> None:
        torch.mm(left, weight.T, out=outputs[0])
        torch.mm(right, weight, out=outputs[1])
        torch.mm(right.T, left, out=outputs[2])

    return _seconds(run, device, least) * product.rows / rows * product.count


def _seconds(run: Callable[[], None], device: str, least: float) -> float:
    """Return the mean seconds of `run` over as many runs as take `least` seconds, after one that does not count."""
    run()
    finish(device)
    started, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - started < least:
        run()
        finish(device)
        runs += 1
    return (time.perf_counter() - started) / runs
