"""`push_to_hub` against a hub on this machine: the repository, the files, the token, and nothing that is not wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_model import save_chat_model
from grpo_toolbox import GRPOConfig, GRPOTrainer
from hub_server import OWNER, Hub, local_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub() as running:
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield running


def trained(folder: Path, **more: Any) -> GRPOTrainer:
    args = GRPOConfig(output_dir=str(folder / "run"), max_steps=1, max_completion_length=4, disable_tqdm=True, **more)
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}]}]
    trainer = GRPOTrainer(
        save_chat_model(folder / "model"),
        lambda completions, **_: [float(len(str(one))) for one in completions],
        args,
        rows,
    )
    trainer.train()
    return trainer


def test_the_model_is_pushed_when_training_has_ended(hub: Hub, tmp_path: Path) -> None:
    given = {"hub_model_id": "small", "hub_token": "hf_secret", "hub_private_repo": True, "hub_revision": "draft"}
    trainer = trained(tmp_path, push_to_hub=True, **given)
    (made,) = hub.created
    assert (made["name"], made["token"]) == ("small", "Bearer hf_secret")
    assert made.get("private") or made["visibility"] == "private"  # as versions of the client say it
    assert [(one["summary"], one["revision"]) for one in hub.commits] == [("End of training", "draft")]
    wanted = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert wanted <= set(hub.files)
    assert all(name in wanted or "token" in name or "chat_template" in name for name in hub.files), hub.files.keys()
    assert not any(b"hf_secret" in content for content in hub.files.values())
    there = tmp_path / "there"
    there.mkdir()
    for name, content in hub.files.items():
        (there / name).write_bytes(content)
    pulled = AutoModelForCausalLM.from_pretrained(there)
    assert all(torch.equal(a, b) for a, b in zip(pulled.parameters(), trainer.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(there).chat_template


def test_a_push_by_hand_takes_its_own_words(hub: Hub, tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    assert hub.commits == []
    commit = trainer.push_to_hub("by hand", token="hf_other", tags=["sums"])
    assert commit.commit_url.startswith(hub.address)
    assert (hub.commits[0]["summary"], hub.commits[0]["revision"]) == ("by hand", "main")
    assert hub.created[0]["name"] == "run"  # the name of output_dir
    assert b"- sums" in hub.files["README.md"]
    later = trainer.push_to_hub("in the background", token="hf_other", blocking=False)
    assert later.result().commit_url
    assert hub.commits[-1]["summary"] == "in the background"


def test_an_adapter_is_pushed_as_one(hub: Hub, tmp_path: Path) -> None:
    from peft import LoraConfig

    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=1, max_completion_length=4, hub_model_id=f"{OWNER}/ad"
    )
    rows = [{"prompt": "1+1="}]
    adapter = LoraConfig(r=2, target_modules="all-linear")
    reward = [lambda completions, **_: [float(len(one)) for one in completions]]
    trainer = GRPOTrainer(save_chat_model(tmp_path / "model"), reward, args, rows, peft_config=adapter)
    trainer.train()
    trainer.push_to_hub(token="hf_x")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(hub.files)
    assert "model.safetensors" not in hub.files
