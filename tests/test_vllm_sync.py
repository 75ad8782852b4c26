"""Every way of sending weights to a real vLLM: change them, see the change; withhold a sync, see the probe fail."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_toolbox.engines.probe import Finding, Probe, canary_rows
from grpo_toolbox.engines.server import Limits, Server
from grpo_toolbox.engines.sync import PushError
from grpo_toolbox.engines.sync import vllm as procedure
from grpo_toolbox.engines.sync.choose import ChosenSync, Mode, SyncSettings
from grpo_toolbox.engines.sync.weights import WeightFolders, served_weights
from grpo_toolbox.engines.targets import VllmTarget
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from served_models import POSITIONS, served_model
from small_models import forced_logps
from vllm_server import VllmServer, vllm  # noqa: F401

LENGTH = min(300, POSITIONS - 8)
"""Two blocks of a processor's prefix cache, where the model has positions for them."""


@pytest.fixture
def server(vllm: VllmServer) -> Iterator[Server]:  # noqa: F811
    made = Server(vllm.address, Limits())
    made.model = str(made.get("/v1/models")["data"][0]["id"])
    yield made
    vllm.load(vllm.model)
    made.close()


def probed(policy: Any, server: Server) -> tuple[Probe, VllmTarget]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.get_input_embeddings().num_embeddings
    prompts = [tuple(torch.randint(5, vocabulary, (40,), generator=generator).tolist()) for _ in range(9)]
    return Probe(canary_rows(prompts, 2, LENGTH), Teacher(policy, packed=True)), VllmTarget(server, 120.0)


def nudge(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def causes(findings: list[Finding]) -> list[str | None]:
    return [finding.cause for finding in findings]


@pytest.mark.parametrize("mode", ["folder", "gloo"])
def test_weights_arrive_and_a_withheld_sync_is_seen(mode: Mode, server: Server, tmp_path: Path) -> None:
    policy = served_model()
    sync = ChosenSync("vllm", SyncSettings(mode, folder=str(tmp_path), timeout_s=120.0), policy, tmp_path)
    probe, target = probed(policy, server)
    assert sync.version(server) is None
    sync.push([server], policy, 1)
    assert causes(probe.check([target], moved=False)) == [None]
    for version in (2, 3):
        nudge(policy, version)
        assert causes(probe.check([target], moved=True)) == ["delivery"]
        sync.push([server], policy, version)
        assert sync.version(server) == version
        assert causes(probe.check([target], moved=False)) == [None]
    sync.close()


def test_a_prefix_cache_that_was_not_reset_is_seen(server: Server, tmp_path: Path) -> None:
    if LENGTH < 130:
        pytest.skip("no whole block of a processor's prefix cache fits")
    policy = served_model()
    probe, target = probed(policy, server)
    folders = WeightFolders(tmp_path, "test")
    assert causes(probe.check([target], moved=False)) == [None]
    nudge(policy, 1)
    procedure.load_folder(server, folders.write_weights(served_weights(policy), 1), 120.0)
    assert causes(probe.check([target], moved=True)) == ["cache"]
    procedure.flush(server, "drain", 120.0)
    assert causes(probe.check([target], moved=False)) == [None]


def test_an_adapter_arrives_alone_and_the_base_stays(server: Server, tmp_path: Path) -> None:
    policy = add_adapter(served_model(), LoraOptions(r=4))
    base = server.model
    sync = ChosenSync("vllm", SyncSettings("adapter", folder=str(tmp_path)), policy, tmp_path)
    probe, target = probed(policy, server)
    for version in range(4):
        sync.push([server], policy, version)
        server.model = str(sync.served_as)
        assert (sync.version(server), server.model.rpartition("-v")[2]) == (version, str(version))
        assert causes(probe.check([target], moved=version > 0)) == [None]
        nudge(policy, version)
    listed = [one["id"] for one in server.get("/v1/models")["data"]]
    assert len(listed) == 3  # the base, the newest adapter and the one before
    sync.push([server], policy, 4)
    server.model = base
    assert causes(probe.check([target], moved=True)) == ["adapter"]
    sync.close()


def test_a_sender_that_dies_leaves_the_former_weights_and_the_next_push_works(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_toolbox.engines.sync.groups import StoreGroup

    policy = served_model()
    before = copy.deepcopy(policy)
    sync = ChosenSync("vllm", SyncSettings("gloo", timeout_s=20.0), policy, tmp_path)
    sync.push([server], policy, 1)
    nudge(policy, 1)
    whole = StoreGroup.send

    def breaks(group: Any, weights: Any) -> None:
        whole(group, weights[:3])
        group.close()
        raise RuntimeError("the sender is gone")

    with monkeypatch.context() as patch:
        patch.setattr(StoreGroup, "send", breaks)
        with pytest.raises(PushError):
            sync.push([server], policy, 2)
    assert sync.version(server) is None
    probe, target = probed(before, server)
    assert causes(probe.check([target], moved=False)) == [None]
    sync.push([server], policy, 2)
    probe, target = probed(policy, server)
    assert causes(probe.check([target], moved=False)) == [None]
    sync.close()


@pytest.mark.parametrize("mode", ["folder", "gloo"])
def test_case_e09_3_a_request_that_comes_during_a_push_waits_and_is_answered_with_the_new_weights(
    mode: Mode, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second into the push it has no answer; then every token's log-prob is that of the new weights."""
    policy = served_model()
    sync = ChosenSync("vllm", SyncSettings(mode, folder=str(tmp_path), timeout_s=120.0), policy, tmp_path)
    sync.push([server], policy, 1)
    nudge(policy, 1)
    prompt = list(range(5, 25))
    asked = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 8,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": 3,
    }
    name = "load_folder" if mode == "folder" else "transfer"
    push = getattr(procedure, name)

    with ThreadPoolExecutor(1) as pool:
        answers: list[Any] = []

        def meanwhile(*arguments: Any) -> None:
            answers.append(pool.submit(server.post, "/v1/completions", asked))
            time.sleep(0.5)
            assert not answers[0].done()
            push(*arguments)
            assert not answers[0].done()

        with monkeypatch.context() as patch:
            patch.setattr(procedure, name, meanwhile)
            sync.push([server], policy, 2)
        choice = answers[0].result(timeout=60)["choices"][0]
    ids = choice["token_ids"]
    forced = forced_logps(policy, prompt, ids)
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), forced, atol=1e-3, rtol=0)
    assert float((forced_logps(served_model(), prompt, ids) - forced).abs().max()) > 0.05
    sync.close()
