"""What is sent to servers: names and values of the checkpoint, as files and over a process group."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from transformers import AutoModelForCausalLM

from grpo_toolbox.engines.sync import FAILURES, Control, PushError, Stamp, push_each
from grpo_toolbox.engines.sync.choose import ChosenSync, SyncSettings, server_arguments, server_environment
from grpo_toolbox.engines.sync.groups import StoreGroup, own_address, together
from grpo_toolbox.engines.sync.weights import WeightFolders, Weights, choose_folder, described, served_weights
from grpo_toolbox.errors import ConfigError, EngineError
from grpo_toolbox.models.lora import LoraOptions, add_adapter
from small_models import build

TYPES = ("llama", "qwen2", "gemma", "gpt2", "qwen2_moe", "mixtral", "deepseek_v3")


def files_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("name", TYPES)
def test_what_is_sent_is_what_a_checkpoint_holds(name: str, tmp_path: Path) -> None:
    model = build(name)
    sent, saved = dict(served_weights(model)), files_of(model, tmp_path)
    assert set(sent) == set(saved)
    assert all(torch.equal(sent[key], value) for key, value in saved.items())


def test_tied_weights_are_sent_once() -> None:
    tied = {name for name, _ in served_weights(build("llama", tie_word_embeddings=True))}
    untied = {name for name, _ in served_weights(build("llama", tie_word_embeddings=False))}
    assert untied - tied == {"lm_head.weight"}
    assert "model.embed_tokens.weight" in tied


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_an_adapter_is_added_in_under_the_plain_models_names(name: str, tmp_path: Path) -> None:
    plain = {key for key, _ in served_weights(build(name))}
    policy = add_adapter(build(name), LoraOptions(r=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in policy.parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    sent = served_weights(policy)
    assert {key for key, _ in sent} == plain
    folder = WeightFolders(tmp_path, "test").write_weights(sent, 0)
    policy.config.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(2, 12).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(policy(input_ids=ids).logits, again(input_ids=ids).logits, atol=1e-4)


def test_a_type_changes_what_is_floating_point_and_nothing_is_copied_without_need() -> None:
    model = build("llama")
    assert {value.dtype for _, value in served_weights(model, torch.bfloat16)} == {torch.bfloat16}
    sent = dict(served_weights(model))
    assert sent["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()


def test_a_server_is_told_names_types_and_shapes() -> None:
    told = described([("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))])
    assert told == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_newest_two_versions_are_kept_and_none_is_ever_seen_half(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "run")
    for version in (1, 2, 3):
        written = folders.write_weights([("weight", torch.full((2,), float(version)))], version)
        assert torch.equal(load_file(written / "model.safetensors")["weight"], torch.full((2,), float(version)))
    assert sorted(path.name for path in folders.root.iterdir()) == ["v2", "v3"]
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_toolbox.engines.sync.weights._SHARD", 100)
    weights = [(str(index), torch.full((10,), float(index))) for index in range(6)]  # 40 bytes each
    written = WeightFolders(tmp_path, "run").write_weights(weights, 1)
    files = sorted(written.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    found = {name: value for path in files for name, value in load_file(path).items()}
    assert all(torch.equal(found[name], value) for name, value in weights)


def test_a_version_that_is_sent_again_replaces_its_files(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "run")
    for value in (1.0, 2.0):
        written = folders.write_weights([("weight", torch.tensor([value]))], 7)
    assert load_file(written / "model.safetensors")["weight"].item() == 2.0


def test_an_adapter_is_written_alone(tmp_path: Path) -> None:
    folder = WeightFolders(tmp_path, "run").write_adapter(add_adapter(build("llama"), LoraOptions(r=2)), 1)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()


def test_a_folder_must_be_one_that_the_servers_can_read(tmp_path: Path) -> None:
    assert choose_folder("shared", tmp_path, ["http://far:8000"], 1) == Path("shared").absolute()
    assert choose_folder(None, tmp_path, ["http://127.0.0.1:8000"], 1 << 60) == tmp_path
    with pytest.raises(ConfigError, match="far:8000 is another machine"):
        choose_folder(None, tmp_path, ["http://localhost:8000", "http://far:8000"], 1)


# ---- process groups --------------------------------------------------------------------------------------------------


def receive(invitation: dict[str, Any], weights: Weights, into: list[torch.Tensor], *, stop_after: int = 99) -> None:
    """What a server's worker does."""
    limit = timedelta(seconds=20)
    store = TCPStore(invitation["master_address"], invitation["master_port"], is_master=False, timeout=limit)
    group = ProcessGroupGloo(PrefixStore("weights", store), 1, invitation["world_size"], timeout=limit)
    options = BroadcastOptions()
    options.rootRank = 0
    for _, value in weights[:stop_after]:
        into.append(torch.empty_like(value))
        group.broadcast([into[-1]], options).wait()


def test_gloo_brings_every_tensor_to_the_worker() -> None:
    weights = [("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.tensor(4.0))]
    group = StoreGroup("127.0.0.1", 1, 20)
    arrived: list[torch.Tensor] = []
    worker = threading.Thread(target=receive, args=(group.invitation(), weights, arrived))
    worker.start()
    group.join()
    group.send(weights)
    worker.join(20)
    assert all(torch.equal(one, value) for one, (_, value) in zip(arrived, weights, strict=True))
    first = group.checksum
    changed = [("a", weights[0][1] + 1), *weights[1:]]
    group.close()
    assert first is not None
    assert first != _checksum(changed)
    assert first == _checksum(weights)


def _checksum(weights: Weights) -> int:
    import zlib

    total = 0
    for _, value in weights:
        total = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().tobytes(), total)
    return total


def test_a_worker_that_dies_on_the_way_ends_the_senders_wait() -> None:
    weights = [(str(index), torch.randn(1 << 16)) for index in range(64)]
    group = StoreGroup("127.0.0.1", 1, 5)
    worker = threading.Thread(target=receive, args=(group.invitation(), weights, []), kwargs={"stop_after": 2})
    worker.start()
    group.join()
    with pytest.raises(RuntimeError):
        group.send(weights)
    worker.join(20)


def test_the_servers_refusal_is_raised_before_the_groups_time_limit() -> None:
    waiting = threading.Event()

    def refuse() -> None:
        raise EngineError("the server refuses")

    with pytest.raises(EngineError, match="refuses"):
        together(waiting.wait, refuse, 60)  # type: ignore[arg-type]
    waiting.set()
    with pytest.raises(ValueError, match="the sender's"):
        together(lambda: (_ for _ in ()).throw(ValueError("the sender's")), lambda: "taken", 60)
    assert together(lambda: None, lambda: "taken", 60) == "taken"


def test_sglangs_group_is_told_by_name() -> None:
    told = StoreGroup("127.0.0.1", 3, 20, name="name").invitation()
    assert (told["group_name"], told["backend"], told["rank_offset"], told["world_size"]) == ("name", "gloo", 1, 4)
    assert told["master_port"] > 0


def test_the_trainers_address_is_the_one_that_leads_to_the_server() -> None:
    assert own_address(None, "http://localhost:8000") == "127.0.0.1"
    assert own_address("10.1.2.3", "http://far:8000") == "10.1.2.3"


# ---- versions and failures -------------------------------------------------------------------------------------------


def test_a_stamp_tells_its_own_versions_from_all_others() -> None:
    stamp = Stamp("ab12")
    assert stamp.version(stamp.of(17)) == 17
    stated = (stamp.unfinished, "default", "17", "ab12-v", "ab12-vx", Stamp("cd34").of(17))
    assert [stamp.version(one) for one in stated] == [None] * len(stated)


class Named:
    """A server of which only the address matters."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        raise AssertionError

    post = get


def test_one_server_that_fails_keeps_no_other_from_its_weights() -> None:
    got = []

    def deliver(server: Control) -> None:
        if server.address == "b":
            raise FAILURES[0]("b is gone\nwith a long tail")
        got.append(server.address)

    with pytest.raises(PushError, match="weights 3 were not taken by b: b is gone") as caught:
        push_each([Named("a"), Named("b"), Named("c")], 3, deliver)
    assert sorted(got) == ["a", "c"]
    assert caught.value.failed == {"b": "b is gone"}


@pytest.mark.parametrize(
    ("kind", "mode", "says"),
    [
        ("vllm", "adapter", "needs model.lora.r above 0"),
        ("vllm", "nccl", "the policy is on the processor"),
        ("sglang", "nccl", "the policy is on the processor"),
    ],
)
def test_a_way_that_cannot_be_is_refused_without_a_server(kind: Any, mode: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        ChosenSync(kind, SyncSettings(mode), build("llama"), tmp_path)


def test_a_server_is_started_with_our_extension_alone_on_its_path() -> None:
    folder = Path(server_environment()["PYTHONPATH"])
    assert [path.name for path in folder.glob("*.py")] == ["toolbox_vllm.py"]
    assert "nccl" in server_arguments(on_gpu=True)[-1]
    assert "toolbox_gloo" in server_arguments(on_gpu=False)[-1]
