"""A trained model for other tools: one plain checkpoint with the adapter added in, or one GGUF file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from grpo_toolbox.errors import ConfigError, ToolboxError, unknown_option

CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's own script, the one that its maintainers keep in step with models; no package carries it."""
TYPES = ("float32", "bfloat16", "float16")


def export_model(source: str, folder: Path, *, dtype: str = "float32", trust_remote_code: bool = False) -> Path:
    """Write the model at `source` (a checkpoint's model, an adapter, any path of models) as a plain checkpoint.

    An adapter is added into its base in float32, before weights are rounded to `dtype`. ConfigError for a folder that
    holds something already.
    """
    import torch

    from grpo_toolbox.models.load import load_model, load_tokenizer, save_pretrained

    if dtype not in TYPES:
        raise unknown_option("dtype", dtype, TYPES)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something already: name a folder that is empty or not there yet.")
    model = load_model(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(model.to(getattr(torch, dtype)), tokenizer, folder)
    return folder


def find_converter(given: str | None) -> Path:
    """Return llama.cpp's converter: the script that is given, or that on the PATH; ToolboxError where there is none."""
    found = given or shutil.which(CONVERTER)
    if found is None or not Path(found).is_file():
        missing = f"--converter={given} is no file" if given else f"{CONVERTER} is not on the PATH"
        raise ToolboxError(
            f"GGUF files are written by llama.cpp's own {CONVERTER}, and {missing}: git clone "
            "https://github.com/ggml-org/llama.cpp, and name the script there with --converter."
        )
    return Path(found)


def write_gguf(folder: Path, file: Path, converter: Path, outtype: str = "f16") -> Path:
    """Have llama.cpp's converter write a plain checkpoint as one GGUF file; ToolboxError with its last words if not."""
    command = [sys.executable, str(converter), str(folder), "--outfile", str(file), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not file.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ToolboxError(f"{converter} did not write {file}: {last}")
    return file
