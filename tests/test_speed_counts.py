"""What makes a step cheap, guarded by counts and not by clocks: tokens forwarded, passes, products, largest tensors.

That none of it changes a gradient is what tests/test_invariance.py and tests/test_update.py are for; the seconds are
measured by benchmarks/.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_toolbox.batch import Batch, collate
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.models.forward import completion_logps
from grpo_toolbox.models.load import LoraOptions, Reference
from grpo_toolbox.models.lora import add_adapter
from grpo_toolbox.objectives import Objective, build_objective
from grpo_toolbox.run import Run, UpdateSettings
from grpo_toolbox.surrogates import clipped
from grpo_toolbox.trainer import train
from grpo_toolbox.types import Rollout, Sampling
from grpo_toolbox.update import update
from small_models import STOP, VOCABULARY, build, make_prompts, shared, text_ids
from toolbox_runs import built_run

Lengths = Sequence[Sequence[int]]
PROMPTS = (30, 12)
LENGTHS: Lengths = ((9, 4, 1), (2, 7, 5))
PACKED = 30 + 12 + (8 + 3 + 0) + (1 + 6 + 4)  # prompts once; the last token of a completion predicts nothing


def rollouts_of(prompts: Sequence[int] = PROMPTS, lengths: Lengths = LENGTHS) -> list[Rollout]:
    """Completions of these lengths."""
    return [
        Rollout(prompt, text_ids(length, 3 * length + row), (-1.0,) * length, "length", "")
        for prompt, group in zip(make_prompts(*prompts), lengths, strict=True)
        for row, length in enumerate(group)
    ]


def batch_of(prompts: Sequence[int] = PROMPTS, lengths: Lengths = LENGTHS, silent: Sequence[int] = ()) -> Batch:
    """Completions of these lengths; groups in `silent` have no spread."""
    rollouts = rollouts_of(prompts, lengths)
    advantages = torch.linspace(-1, 1.7, len(rollouts)).reshape(len(lengths), -1)
    advantages[list(silent)] = 0.0
    return collate(rollouts, advantages)


def run_of(policy: nn.Module, objective: Objective | None = None, **settings: Any) -> Run:
    """A run with nothing in it but what an update needs."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    used = {
        "policy": policy,
        "reference": Reference(shared("llama")) if objective and objective.beta else None,
        "objective": objective or build_objective(clipped),
        "optimizer": torch.optim.SGD(trained, lr=0.0),
        "lr_at": lambda step: 0.0,
        "sampling": Sampling(max_new_tokens=9),
        "group_size": len(LENGTHS[0]),
        "settings": UpdateSettings(**settings),
    }
    defaults = {one.name for one in fields(Run) if one.default is not MISSING or one.default_factory is not MISSING}
    return Run(**used, **dict.fromkeys({one.name for one in fields(Run)} - defaults - set(used)))


@contextmanager
def forwarded(*models: Any) -> Iterator[list[int]]:
    """Collect how many tokens go through the embedding in each forward pass."""
    sizes: list[int] = []
    handles = [
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: sizes.append(args[0].numel()))
        for model in models
    ]
    yield sizes
    for handle in handles:
        handle.remove()


# ---- tokens and passes of an update ----------------------------------------------------------------------------------


def test_an_update_forwards_each_prompt_once_and_no_padding():
    """53 + 11 tokens; six padded rows, each with its prompt, would be 6 × 39."""
    model = build("llama")
    with forwarded(model) as sizes:
        metrics = update(run_of(model), batch_of(), 1)
    assert sizes == [PACKED] == [64]
    assert metrics["rows_trained"] == 6


def test_groups_without_spread_stay_at_home():
    model = build("llama")
    with forwarded(model) as sizes:
        metrics = update(run_of(model), batch_of(silent=[0]), 1)
    assert sizes == [12 + 1 + 6 + 4]
    assert metrics["rows_trained"] == 3


def test_of_a_batch_without_spread_one_micro_batch_is_forwarded_to_measure_the_engine():
    model = build("llama")
    with forwarded(model) as sizes:
        metrics = update(run_of(model, micro_batch_tokens=40), batch_of(silent=[0, 1]), 1, rollouts_of())
    assert len(sizes) == 1
    assert sizes[0] <= 40
    assert (metrics["rows_trained"], metrics["forward_tokens"]) == (0, 0)
    assert "sampler/logp_gap_mean" in metrics


def test_with_a_kl_or_the_switch_off_every_row_is_forwarded():
    for options in ({"objective": build_objective(clipped, beta=0.1)}, {"skip_zero_advantage": False}):
        model = build("llama")
        with forwarded(model) as sizes:
            update(run_of(model, **options), batch_of(silent=[0, 1]), 1)
        assert sizes == [PACKED]


def test_the_switch_back_to_padding_forwards_what_others_forward():
    model = build("llama")
    with forwarded(model) as sizes:
        update(run_of(model, packed=False), batch_of(), 1)
    assert sizes == [6 * (30 + 9)]


def test_old_log_probs_are_those_of_the_first_epoch():
    model = build("llama")
    with forwarded(model) as sizes:
        update(run_of(model, ppo_epochs=3), batch_of(), 1)
    assert sizes == [PACKED] * 3


def test_or_of_a_pass_of_their_own_where_that_is_asked_for():
    model = build("llama")
    with forwarded(model) as sizes:
        update(run_of(model, recompute_old_logps=True), batch_of(), 1)
    assert sizes == [PACKED] * 2


def test_the_reference_is_forwarded_once_for_all_epochs_on_the_same_packing():
    model = build("llama")
    run = run_of(model, build_objective(clipped, beta=0.1), ppo_epochs=2)
    with run.reference.model() as reference:
        pass
    with forwarded(model, reference) as sizes:
        update(run, batch_of(), 1)
    assert sizes == [PACKED] * 3


def test_a_group_that_fits_is_not_split_and_its_prompt_not_repeated():
    """Budgets below one group repeat its prompt; from the larger group (44 tokens) on nothing is."""
    packed = {}
    for budget in (36, 44, 60, 1000):
        model = build("llama")
        with forwarded(model) as sizes:
            update(run_of(model, micro_batch_tokens=budget), batch_of(), 1)
        packed[budget] = sum(sizes), len(sizes)
    assert packed[36][0] > PACKED
    assert [packed[budget] for budget in (44, 60, 1000)] == [(PACKED, 2), (PACKED, 2), (PACKED, 1)]


def test_a_whole_step_forwards_prompts_twice_and_completions_twice(tmp_path: Path):
    """Once to sample and once to train: 4 prompts of 4 tokens, 16 completions of 3, whose last token is never run."""
    words = ("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.min_new_tokens=3", "objective.beta=0")
    run = built_run(*words, "callbacks=none", "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}")
    run.reward = _with_spread(run.reward)
    with forwarded(run.policy) as sizes:
        train(run)
    assert sum(sizes) == 2 * (4 * 4 + 16 * 2)


def _with_spread(reward: Any) -> Any:
    def alternating(completions: Sequence[str]) -> list[float]:
        return [float(row % 2) for row in range(len(completions))]

    return replace(reward, components=(replace(reward.components[0], function=alternating),))


# ---- products --------------------------------------------------------------------------------------------------------


_MATRIX_PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.addmm_: 1}
"""By operation: which argument is the left matrix."""


class Operations(TorchDispatchMode):
    """Counts the shapes of everything that is made, and of the results of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[int, ...]] = Counter()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.flops = 0
        """Of matrix products; attention is none of them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                self.made[tuple(one.shape)] += 1
        if function.overloadpacket in _MATRIX_PRODUCTS:
            left = args[_MATRIX_PRODUCTS[function.overloadpacket]]
            self.products[tuple(result.shape)] += 1
            self.flops += 2 * left.shape[1] * result.numel()
        return result

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that was made."""
        return max(torch.Size(shape).numel() for shape in self.made)


def test_with_an_adapter_frozen_matrices_get_no_gradient_product():
    plain, adapted = build("llama"), add_adapter(build("llama"), LoraOptions(r=3))
    frozen = {tuple(parameter.shape) for parameter in plain.parameters() if parameter.ndim == 2}
    found = {}
    for name, model in (("plain", plain), ("adapted", adapted)):
        with Operations() as operations:
            update(run_of(model), batch_of(), 1)
        found[name] = sum(count for shape, count in operations.products.items() if shape in _either_way(frozen))
    assert found["adapted"] == 0
    assert found["plain"] >= 2 * 7  # seven matrices in each of two layers


def _either_way(shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return shapes | {shape[::-1] for shape in shapes}


def test_the_operations_of_a_pass_are_those_that_the_benchmark_counts(benchmark: Any):
    """Every product three times (forward, two gradients); logits may be computed a second time, nothing else is."""
    flops = benchmark("flops")
    model, batch = build("llama"), batch_of()
    one = flops.pass_of(batch)
    products = flops.products(model.config, one)
    assert (one.tokens, one.labels) == (PACKED, 28)
    assert (products[-1].rows, products[-1].outer) == (28, VOCABULARY)
    assert one.pairs == sum(sum(range(1, length + 1)) for length in PROMPTS) + sum(
        sum(range(length + 1, length + own)) for length, group in zip(PROMPTS, LENGTHS, strict=True) for own in group
    )
    with Operations() as operations:
        update(run_of(model), batch, 1)
    again = operations.flops - sum(product.flops for product in products)
    assert again in (0, products[-1].flops // 3)


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE = 4096
"""A vocabulary that outweighs everything else in a small model."""


def test_an_update_never_holds_logits_of_all_tokens():
    """The largest tensor is that of a chunk of the head, and twice the tokens do not make it larger."""
    model, largest = build("llama", vocab_size=WIDE), []
    for groups in (8, 16):
        batch = batch_of((5,) * groups, ((100, 100),) * groups)
        with Operations() as operations:
            update(run_of(model, micro_batch_tokens=10**6), batch, 1)
        largest.append(operations.largest)
    assert largest[0] == largest[1] < 1600 * WIDE / 2


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_without_gradient_do_not_either(packed: bool):
    """The padded way, for models that take no layout, does."""
    model, batch = build("llama", vocab_size=WIDE), batch_of((5,) * 8, ((100, 100),) * 8)
    with Operations() as operations, torch.no_grad():
        completion_logps(model, batch, temperature=1.0, packed=packed)
    assert (operations.largest < 1600 * WIDE / 2) == packed


def test_a_rollout_holds_logits_of_one_token_a_row():
    model = build("llama", vocab_size=WIDE)
    engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=())
    with Operations() as operations:
        engine.generate(make_prompts(40, 25), 4, Sampling(max_new_tokens=12))
    assert operations.largest <= 8 * WIDE


@pytest.mark.parametrize("copies", [False, True])
def test_a_group_attends_to_one_copy_of_its_prompt(copies: bool):
    """Sixteen rows behind 200 tokens: no tensor is as large as sixteen copies of its keys; `generate` makes one."""
    model = shared("llama")
    engine = (HfEngine if copies else LocalEngine)(model, decode=lambda ids, _: "", stop_ids=())
    with Operations() as operations:
        engine.generate(make_prompts(200), 16, Sampling(max_new_tokens=4))
    keys = 200 * model.config.num_key_value_heads * model.config.head_dim
    assert (operations.largest >= 16 * keys) == copies


# ---- the benchmarks themselves ---------------------------------------------------------------------------------------

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = ("run_all", "steps", "rollouts", "servers", "learning", "matrix_rate", "growth", "cuda_steps")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def commands() -> Iterator[tuple[str, list[str]]]:
    """What the scripts' docstrings and the page on benchmarks tell the reader to type, by script."""
    pages = [*BENCHMARKS.glob("*.py"), BENCHMARKS.parent / "docs" / "benchmarks.md"]
    for page in pages:
        for script, options in re.findall(r"^ *python benchmarks/(\w+)\.py(.*)$", page.read_text(), flags=re.MULTILINE):
            if script in SCRIPTS:
                yield script, shlex.split(options, comments=True)


def test_every_documented_command_line_is_understood(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """All but measuring: what to measure is overridden by nothing."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    known = list(commands())
    assert {script for script, _ in known} == set(SCRIPTS)
    for script, options in known:
        without = [*options, "--only", "", "--model", str(tmp_path), "--out", str(tmp_path / "none.jsonl")]
        if "--tune" not in options:
            benchmark(script).main(without)
    assert "machine" not in capsys.readouterr().err


def test_the_table_says_how_many_times_faster_and_takes_the_newest(benchmark: Any):
    """TRL 30 s against our newest 10 s is 3.00×; 2 of 8 GiB are 0.25; the faster cache of `generate` counts."""
    common = {"scale": "full", "device": "cpu", "threads": 2, "versions": {"torch": "1"}, "machine": "one"}

    def line(name: str, side: str, seconds: float, gib: float = 1.0) -> dict[str, Any]:
        return {"name": name, "side": side, "seconds": seconds, "peak_gib": gib, "completion_tokens": 600} | common

    records = [line("A", "ours", 99.0, 9.0), line("A", "trl", 30.0, 8.0), line("A", "ours", 10.0, 2.0)]
    records += [line("E-64", "ours", 2.0), line("E-64", "static", 6.0), line("E-64", "dynamic", 3.0)]
    records.append(line("A", "ours", 1.0) | {"threads": 1})
    table = benchmark("tables").report(records, "full", "cpu", 2)
    assert "| 10.00 s | trl 30.00 s | 3.00× | 1.7× | 2.1× |" in table
    assert "| 2.00 GiB | trl 8.00 GiB | 0.25 | 0.8 | 0.6 |" in table
    assert "| 300 tok/s | dynamic 200 tok/s | 1.50× | 1.7× | 2.3× |" in table


def test_long_tailed_lengths_have_their_mean_and_their_longest(benchmark: Any):
    workloads = benchmark("workloads")
    lengths = workloads.STEPS["D"].lengths()
    assert (len(lengths), sum(lengths), max(lengths)) == (64, 64 * 64, 256)
    assert min(lengths) >= 1
    assert sorted(lengths)[32] < 50  # most are shorter than the mean
    assert workloads.STEPS["A"].lengths() == [64] * 64


def test_fixed_rewards_give_every_mixed_group_spread(benchmark: Any):
    """In whatever portions completions are scored."""
    workloads = benchmark("workloads")
    workloads._scored.clear()
    prompts, kinds = ["a"] * 4 + ["b"] * 4, ["mixed"] * 4 + ["flat"] * 4
    assert workloads.fixed_reward(prompts[:3], kinds[:3]) == [0, 1, 0]
    assert workloads.fixed_reward(prompts[3:], kinds[3:]) == [1, 1, 1, 1, 1]


def test_our_rows_end_where_the_workload_wants_them(benchmark: Any):
    """Although prompts wait for their places and rows leave: each has its own length and ends with the stop token."""
    forcing, workloads = benchmark("forcing"), benchmark("workloads")
    load = workloads.Workload(4, 2, 5, max_new_tokens=20, mean_new_tokens=6)
    model = build("llama")
    model.generation_config.eos_token_id = STOP
    engine = LocalEngine(model, decode=lambda ids, _: "", stop_ids=(STOP,), max_rows=4)
    with forcing.ending_our_rows(load, model):
        rollouts = engine.generate(make_prompts(5, 7, 3, 6), 2, Sampling(20, min_new_tokens=20))
    assert [len(one.ids) for one in rollouts] == load.lengths()
    assert all(one.ids.index(STOP) == len(one.ids) - 1 for one in rollouts if len(one.ids) < 20)


def test_rows_of_generate_end_there_too(benchmark: Any):
    forcing = benchmark("forcing")
    ends = forcing.EndRows([1, 3], prompt_tokens=2, stop_ids=[STOP])
    scores = torch.zeros(2, 4)
    drawable = [(ends(torch.zeros(2, 2 + place), scores.clone()) > -1).tolist() for place in range(3)]
    only_stop, all_but_stop = [False, True, False, False], [True, False, True, True]
    assert drawable == [[only_stop, all_but_stop], [all_but_stop] * 2, [all_but_stop, only_stop]]
