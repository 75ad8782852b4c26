"""The probe: engines that have the trainer's weights pass, and each way of not having them is called by its name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.probe import DRAWN, SCORED, Gap, Probe, Reading, Row, canary_rows
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.targets import EngineTarget, SglangTarget, VllmTarget
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.engines.watch import SyncWatch
from grpo_toolbox.errors import EngineError
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from small_models import build, forced_logps, text_ids
from toolbox_runs import SMALL, checkpoints, metrics, toolbox_train
from vllm_server import free_port

ROWS = canary_rows([text_ids(11), text_ids(9, 5), text_ids(7, 3)], 2, 40)


class Copy:
    """A server with weights of its own: a model of which it draws and scores, perhaps with an old model's cache."""

    name = "the server"

    def __init__(self, model: Any, *, scores: bool = True) -> None:
        self.model = model
        self.cached: Any = None
        self.half = False
        self.seen: Sequence[Row] | None = None
        self._scores = scores

    def read(self, rows: Sequence[Row]) -> Reading:
        teacher = Teacher(self.model, packed=False, autocast_dtype=torch.bfloat16 if self.half else None)
        drawer = teacher if self.cached is None else Teacher(self.cached, packed=False)
        drawn = [(*row, 5, 6, 7, 8) for row in rows]
        logps = drawer.logps(drawn, [len(row) for row in rows])
        top = teacher.next_logps(rows).topk(SCORED)
        scored = tuple(
            dict(zip(ids.tolist(), values.tolist(), strict=True))
            for ids, values in zip(top.indices, top.values, strict=True)
        )
        pairs = zip(drawn, logps, strict=True)
        return Reading(
            tuple((row[-DRAWN:], tuple(one.tolist())) for row, one in pairs),
            scored if self._scores else None,
            tuple(self.seen) if self.seen is not None else tuple(rows),
        )


def nudge(model: Any, size: float = 0.05, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def started(policy: Any, **options: Any) -> tuple[Probe, Copy]:
    """A probe that has measured the noise of a server with equal weights."""
    probe, server = Probe(ROWS, Teacher(policy, packed=True)), Copy(copy.deepcopy(policy), **options)
    assert probe.check([server], moved=False)[0].cause is None
    return probe, server


def test_canaries_are_prompts_one_behind_the_other() -> None:
    assert canary_rows([(1, 2, 3), (4, 5)], 2, 6) == [(1, 2, 3, 4, 5, 1), (4, 5, 1, 2, 3, 4)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2, window 256", "mamba"])
def test_the_teachers_log_probs_are_those_of_a_plain_forward(name: str) -> None:
    model = build(name)
    teacher = Teacher(model, packed=name not in ("mamba", "gemma2, window 256"))
    rows = [text_ids(12), text_ids(9, 4)]
    for row, first, logps in zip(rows, (5, 1), teacher.logps(rows, [5, 1]), strict=True):
        assert torch.allclose(logps, forced_logps(model, row[:first], row[first:]), atol=1e-4)
    after = teacher.next_logps(rows)
    for row, every in zip(rows, after, strict=True):
        assert every[7].item() == pytest.approx(float(forced_logps(model, row, (7,))), abs=1e-4)


@pytest.mark.parametrize("kind", [LocalEngine, HfEngine])
def test_an_engine_on_the_policys_own_weights_passes(kind: Any) -> None:
    policy = build("llama")
    engine = kind(policy, decode=lambda ids, finish: "", stop_ids=[1])
    probe = Probe(ROWS, Teacher(policy, packed=True))
    for moved in (False, True):
        finding = probe.check([EngineTarget("the engine", engine)], moved=moved)[0]
        assert finding.cause is None
        assert finding.drawn.max < 1e-4
        nudge(policy)


def test_an_engine_that_only_draws_is_found_out_too() -> None:
    policy = build("llama")
    stale = HfEngine(copy.deepcopy(policy), decode=lambda ids, finish: "", stop_ids=[1])
    probe, target = Probe(ROWS, Teacher(policy, packed=True)), EngineTarget("the engine", stale)
    assert probe.check([target], moved=False)[0].cause is None
    nudge(policy)
    assert probe.check([target], moved=True)[0].cause == "unknown"  # it cannot tell more without scores


def test_weights_that_were_delivered_pass() -> None:
    policy = build("llama")
    probe, server = started(policy)
    nudge(policy)
    server.model = copy.deepcopy(policy)
    assert probe.check([server], moved=True)[0].cause is None


def test_weights_that_were_not_delivered() -> None:
    policy = build("llama")
    probe, server = started(policy)
    nudge(policy)
    finding = probe.check([server], moved=True)[0]
    assert finding.cause == "delivery"
    assert "were not delivered" in str(finding)


def test_a_change_far_below_the_limit_is_missed_by_nobody_who_repeats_to_the_last_digit() -> None:
    policy = build("llama")
    probe, server = started(policy)
    nudge(policy, 2e-6)
    finding = probe.check([server], moved=True)[0]
    assert finding.gap.max < finding.limit.max
    assert finding.cause == "delivery"
    server.model = copy.deepcopy(policy)
    assert probe.check([server], moved=False)[0].cause is None


def test_an_adapter_that_is_not_active() -> None:
    policy = add_adapter(build("llama"), LoraOptions(r=4))
    base = build("llama")
    nudge(policy)
    probe, server = started(policy)
    nudge(policy, seed=1)
    server.model = base
    assert probe.check([server], moved=True)[0].cause == "adapter"


def test_a_first_adapter_that_does_not_arrive_may_be_either() -> None:
    policy = add_adapter(build("llama"), LoraOptions(r=4))
    probe, server = started(policy)
    nudge(policy)
    assert probe.check([server], moved=True)[0].cause == "delivery or adapter"


def test_a_stale_prefix_cache() -> None:
    policy = build("llama")
    probe, server = started(policy)
    server.cached = server.model
    nudge(policy)
    server.model = copy.deepcopy(policy)
    assert probe.check([server], moved=True)[0].cause == "cache"


def test_a_precision_that_changes_on_the_way() -> None:
    policy = build("llama")
    probe, server = started(policy)
    nudge(policy)
    server.model, server.half = copy.deepcopy(policy), True
    assert probe.check([server], moved=True)[0].cause == "precision"


def test_half_precision_from_the_start_is_noise_and_a_missed_sync_is_seen_all_the_same() -> None:
    policy = build("llama")
    probe, server = Probe(ROWS, Teacher(policy, packed=True)), Copy(copy.deepcopy(policy))
    server.half = True
    first = probe.check([server], moved=False)[0]
    assert first.cause is None
    assert first.gap.max > 1e-3
    nudge(policy)
    assert probe.check([server], moved=True)[0].cause == "delivery"
    server.model = copy.deepcopy(policy)
    assert probe.check([server], moved=False)[0].cause is None


def test_a_single_token_may_lie_further_out_than_the_mean_of_many() -> None:
    """Noise 0.004 on average: 4 · 0.004 = 0.016 is allowed, times 1 + 3/√n: 0.064 of one token, 0.022 of 64."""
    limit = Gap(0.004, 0.02, 64).limit()
    assert Gap(0.023, 0.023, 1).within(limit)
    assert not Gap(0.065, 0.065, 1).within(limit)
    assert Gap(0.0219, 0.03, 64).within(limit)
    assert not Gap(0.0221, 0.03, 64).within(limit)
    assert not Gap(0.001, 0.081, 64).within(limit)


def test_tokens_that_the_server_puts_in_front() -> None:
    policy = build("llama")
    probe, server = started(policy)
    server.seen = [(0, *row) for row in ROWS]
    server.model = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert probe.check([server], moved=False)[0].cause == "tokens"


def test_other_weights_altogether() -> None:
    policy = build("llama")
    probe, server = started(policy)
    nudge(policy)
    nudge(server.model, seed=9)
    assert probe.check([server], moved=True)[0].cause == "unknown"


def test_weights_that_are_not_numbers() -> None:
    policy = build("llama")
    probe, server = started(policy)
    with torch.no_grad():
        server.model.lm_head.weight.fill_(torch.nan)
    finding = probe.check([server], moved=False)[0]
    assert finding.cause is not None
    assert finding.gap.max == float("inf")


def test_a_limit_that_the_user_sets() -> None:
    policy = build("llama")
    server = Copy(copy.deepcopy(policy))
    nudge(server.model)
    assert Probe(ROWS, Teacher(policy, packed=True)).check([server], moved=False)[0].cause == "unknown"
    assert Probe(ROWS, Teacher(policy, packed=True), 20.0).check([server], moved=False)[0].cause is None


# ---- in a run --------------------------------------------------------------------------------------------------------


def watching(policy: Any, **options: Any) -> tuple[SyncWatch, Copy]:
    server = Copy(copy.deepcopy(policy))
    watch = SyncWatch(Probe(ROWS, Teacher(policy, packed=True)), lambda: [server], **options)
    assert watch.after_sync(lambda: None) is not None  # the noise
    return watch, server


def test_a_sync_that_failed_once_is_done_again() -> None:
    policy = build("llama")
    watch, server = watching(policy)
    nudge(policy)

    def again() -> None:
        server.model = copy.deepcopy(policy)

    watch.after_sync(again)
    seen = watch.measured()
    assert (seen["probe/resyncs"], seen["probe/failed"]) == (1.0, 0.0)
    watch.settle()


def test_a_sync_that_fails_again_stops_the_run_by_choice(caplog: pytest.LogCaptureFixture) -> None:
    policy = build("llama")
    watch, _ = watching(policy)
    nudge(policy)
    watch.after_sync(lambda: None)
    assert watch.measured()["probe/failed"] == 1.0
    with pytest.raises(EngineError, match="were not delivered"):
        watch.settle()
    watch.settle()  # said once
    watch.stops = False
    watch.after_sync(lambda: None)
    watch.settle()
    assert "were not delivered" in caplog.text


@pytest.mark.parametrize("kind", [VllmTarget, SglangTarget])
def test_a_server_that_goes_away_while_it_is_probed_is_given_up_until_it_is_back(kind: Any) -> None:
    """Nobody listens there: the run goes on with whom it still has, and one that refuses is told to the user."""
    policy = build("llama")
    gone = Server(f"http://127.0.0.1:{free_port()}", Limits())
    gone.up = True
    stays, targets = Copy(copy.deepcopy(policy)), []
    watch = SyncWatch(Probe(ROWS, Teacher(policy, packed=True)), lambda: targets)
    targets[:] = [stays, kind(gone, 5.0)]
    with pytest.raises(EngineError, match="before training, a rollout server went away"):
        watch.after_sync(lambda: None)
    assert not gone.up
    assert "no connection" in gone.trouble or "refused" in gone.trouble
    watch, _ = watching(policy)
    watch.targets = lambda: [kind(gone, 5.0)]
    assert watch.after_sync(lambda: None) is None
    assert watch.measured() == {}
    watch.settle()


def test_probes_come_every_so_many_syncs() -> None:
    policy = build("llama")
    watch, _ = watching(policy, every=3)
    due = []
    for _ in range(6):
        watch.after_sync(lambda: None)
        due.append(bool(watch.measured()))
    assert due == [False, False, True, False, False, True]


def test_other_weights_before_training_stop_in_any_case() -> None:
    policy = build("llama")
    server = Copy(build("llama"))
    nudge(server.model)
    watch = SyncWatch(Probe(ROWS, Teacher(policy, packed=True)), lambda: [server], stops=False)
    with pytest.raises(EngineError, match="before training, the server"):
        watch.after_sync(lambda: None)


class Forgetful(LocalEngine):
    """An engine that samples with the weights it began with, as one whose syncs are lost."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(copy.deepcopy(model), **options)


def test_a_run_whose_syncs_are_lost_stops_and_keeps_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grpo_toolbox.config.engine.LocalEngine", Forgetful)
    arguments = (*SMALL, "rollout.probe.every=1", "trainer.max_steps=40", "trainer.lr=0.01", f"run_dir={tmp_path}")
    assert toolbox_train(*arguments) == 1
    assert "after the sync, the engine:" in capsys.readouterr().err
    *before, last = metrics(tmp_path)
    assert last["probe/failed"] == 1.0
    assert all(line["grad_norm"] == 0.0 for line in before)  # the first step that moved is the one that stops
    assert checkpoints(tmp_path) == [last["step"]]


def test_a_run_is_probed_and_is_the_same_run(tmp_path: Path) -> None:
    for name, every in (("plain", 0), ("probed", 1)):
        arguments = (*SMALL, f"rollout.probe.every={every}", "trainer.max_steps=2", f"run_dir={tmp_path / name}")
        assert toolbox_train(*arguments) == 0
    probed = metrics(tmp_path / "probed")
    assert all(line["probe/failed"] == 0.0 and line["probe/gap_max"] < 1e-4 for line in probed)
    stripped = [{key: value for key, value in line.items() if "probe/" not in key} for line in probed]
    assert stripped == metrics(tmp_path / "plain")
