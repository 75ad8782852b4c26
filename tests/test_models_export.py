"""Trained models for other tools: `toolbox models export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from command_line import toolbox
from grpo_toolbox.checkpoint import latest_checkpoint
from grpo_toolbox.models.load import load_model
from toolbox_runs import SMALL

CONVERTER = """
import pathlib, sys
folder, _, file, _, outtype = sys.argv[1:]
assert (pathlib.Path(folder) / "config.json").is_file()
pathlib.Path(file).write_text(outtype)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ("trainer.max_steps=1", "model.lora.r=2", "reward=custom", "reward.name=plugs:digits", "trainer.lr=0.1")
    assert toolbox("train", *SMALL, *words, f"run_dir={folder}").code == 0
    return folder


def test_an_adapter_is_added_in(run_dir: Path, tmp_path: Path) -> None:
    result = toolbox("models", "export", str(run_dir), str(tmp_path / "plain"))
    assert result.code == 0, result.err
    newest = latest_checkpoint(run_dir / "checkpoints")
    assert newest is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.tensor([[3, 4, 5]])
    trained = load_model(str(newest / "model"))(ids).logits
    assert torch.allclose(plain(ids).logits, trained, atol=1e-6)
    assert not torch.allclose(load_model("builtin:tiny")(ids).logits, trained, atol=1e-3)


def test_weights_are_rounded_on_request(run_dir: Path, tmp_path: Path) -> None:
    assert toolbox("models", "export", str(run_dir), str(tmp_path / "half"), "--dtype", "bfloat16").code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_gguf_is_written_by_llama_cpp_s_converter(run_dir: Path, tmp_path: Path) -> None:
    """A script stands in for it, which says what it is asked for."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(CONVERTER)
    file = tmp_path / "model.gguf"
    words = ("--gguf", str(file), "--converter", str(script), "--outtype", "q8_0")
    result = toolbox("models", "export", str(run_dir), str(tmp_path / "plain"), *words)
    assert result.code == 0, result.err
    assert file.read_text() == "q8_0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gguf", "m.gguf"], "git clone https://github.com/ggml-org/llama.cpp"),
        (["--gguf", "m.gguf", "--converter", "none.py"], "--converter=none.py is no file"),
        (["--dtype", "int8"], "float32"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_written(
    words: list[str], message: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    result = toolbox("models", "export", str(run_dir), str(tmp_path / "plain"), *words)
    assert result.code == 1
    assert message in result.err
    assert not (tmp_path / "plain").exists()


def test_a_folder_that_holds_something_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = toolbox("models", "export", str(run_dir), str(tmp_path))
    assert (result.code, "holds something already" in result.err) == (1, True)
