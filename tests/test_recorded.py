"""A token's forward pass that is recorded and replayed: a tape of torch's operations stands for the GPU's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from grpo_toolbox.cli.main import main
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.recorded import RecordedPass, Work
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from grpo_toolbox.models.snapshot import adopt, own_copy
from grpo_toolbox.types import Rollout, Sampling
from small_models import build, make_prompts
from test_engines_in_flight import arriving, changed

SOME_STOPS = tuple(range(1, 4))
LENGTHS = (60, 1, 5, 17, 2, 9)


class Tape(TorchDispatchMode):
    """Every operation that reached the device, on the very tensors it reached it with."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, output))
        return output


def waits(function: Any, args: Any) -> bool:
    """Whether a GPU cannot record an operation, as it waits for a value or brings values from the processor.

    A single number travels with the kernel.
    """
    name = function.overloadpacket._qualified_op_name.partition("::")[2]
    brings = name == "lift_fresh" and args[0].ndim > 0
    return brings or name in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")


def taped(work: Work) -> Work:
    """Replays what `work` did without asking Python again; tensors it did not make are read where they stand."""
    with Tape() as tape:
        output = work()
    assert not [function for function, args, _, _ in tape.operations if waits(function, args)]

    def replay() -> torch.Tensor:
        made: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for function, args, kwargs, outputs in tape.operations:
            again = function(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(
                *(one if isinstance(one, (tuple, list)) else (one,) for one in (outputs, again)), strict=True
            ):
                made[id(old)] = new
        return made[id(output)]

    return replay


def sampled(model: Any, record: Callable[[Work], Work] | None, *, max_rows: int = 256, **options: Any) -> list[Rollout]:
    recorded = None if record is None else RecordedPass(record)
    engine = LocalEngine(
        model, decode=lambda ids, _: "", stop_ids=SOME_STOPS, max_rows=max_rows, recorded=recorded, **options
    )
    return engine.generate(make_prompts(*LENGTHS), 3, Sampling(40, temperature=1.2))


def assert_same(ours: list[Rollout], plain: list[Rollout]) -> None:
    assert [one.ids for one in ours] == [one.ids for one in plain]
    gaps = [abs(a - b) for one, other in zip(ours, plain, strict=True) for a, b in zip(one.logps, other.logps)]  # noqa: B905
    assert max(gaps) < 1e-5


@pytest.mark.parametrize("max_rows", [256, 9], ids=["at once", "in turns"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_a_replayed_pass_draws_the_same_tokens_while_rows_leave_and_enter_and_the_room_grows(kind: str, max_rows: int):
    recordings = []

    def counted(work: Work) -> Work:
        recordings.append(1)
        return taped(work)

    model = build(kind)
    plain = sampled(model, None, max_rows=max_rows)
    assert max(len(one.ids) for one in plain) == 40  # past the 32 that there is room for at first
    assert_same(sampled(model, counted, max_rows=max_rows), plain)
    assert 2 <= len(recordings) <= 12


def test_weights_that_change_in_the_middle_are_not_replayed_from_before():
    first = build("llama")
    weights = changed(first, 1)

    def drawn(record: Callable[[Work], Work] | None) -> list[Rollout]:
        model = own_copy(first)
        engine = LocalEngine(
            model,
            decode=lambda ids, _: "",
            stop_ids=SOME_STOPS,
            recorded=RecordedPass(record) if record else None,
        )
        engine.in_flight(arriving(model, {6: weights}), recompute=True)
        return engine.generate(make_prompts(*LENGTHS), 3, Sampling(24, temperature=1.2))

    plain = drawn(None)
    assert {version for one in plain for version in one.token_versions} == {0, 1}
    assert_same(drawn(taped), plain)
    later = own_copy(first)
    engine = LocalEngine(later, decode=lambda ids, _: "", stop_ids=SOME_STOPS, recorded=RecordedPass(taped))
    engine.generate(make_prompts(*LENGTHS), 3, Sampling(24, temperature=1.2))
    adopt(later, weights)
    again = engine.generate(make_prompts(*LENGTHS), 3, Sampling(24, temperature=1.2))
    fresh = LocalEngine(later, decode=lambda ids, _: "", stop_ids=SOME_STOPS)
    assert_same(again, fresh.generate(make_prompts(*LENGTHS), 3, Sampling(24, temperature=1.2)))


def refuses(work: Work) -> Work:
    raise RuntimeError("operation not permitted when stream is capturing\nand so on")


def is_wrong(work: Work) -> Work:
    return lambda: work() + torch.linspace(0, 1, work().shape[1])


def is_nan(work: Work) -> Work:
    return lambda: work() * torch.nan


@pytest.mark.parametrize("record", [refuses, is_wrong, is_nan])
def test_a_recording_that_fails_or_differs_is_given_up_and_said_once(record: Any, caplog: pytest.LogCaptureFixture):
    model = build("llama")
    plain = sampled(model, None)
    caplog.clear()
    assert_same(sampled(model, record), plain)
    said = [one.getMessage() for one in caplog.records if "cannot be recorded" in one.getMessage()]
    assert len(said) == 1


def test_without_a_gpu_it_is_refused_with_the_key(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "experiment=grpo_tiny", f"run_dir={tmp_path}/run", "rollout.cuda_graphs=true"]) == 1
    assert "rollout.cuda_graphs=true needs rollout.engine=local on a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "adapter"])
def test_copies_in_half_precision_draw_what_autocast_draws_to_the_last_bit(adapter: bool, monkeypatch: Any):
    model = add_adapter(build("llama"), LoraOptions(r=4)) if adapter else build("llama")
    casts = sampled(model, None, autocast_dtype=torch.bfloat16)
    monkeypatch.setattr("grpo_toolbox.engines.local.cast_linear", lambda *_: torch.no_grad())
    assert casts == sampled(model, None, autocast_dtype=torch.bfloat16)
    assert casts != sampled(model, None)
