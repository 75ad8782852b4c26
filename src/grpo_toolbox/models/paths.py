"""What `model.path` may be, checked without loading torch: a built-in, a local folder, or a name on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_toolbox.errors import ConfigError, unknown_option

TINY, SMOLLM2 = "builtin:tiny", "builtin:smollm2"
ADAPTER_FILE = "adapter_config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def cache_folder() -> Path:
    """Return where fetched models are kept: $GRPO_TOOLBOX_CACHE, or grpo-toolbox in the user's cache folder."""
    own = os.environ.get("GRPO_TOOLBOX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo-toolbox"


def smollm2_folder() -> Path:
    """Return the folder of the converted SmolLM2 checkpoint, whether or not it is there yet."""
    return cache_folder() / "models" / "smollm2-135m-instruct"


def resolve_model_path(path: str) -> str:
    """Return what `load_model` can load: `builtin:tiny`, an absolute folder, or a hub name (not looked up here).

    Raises ConfigError for an unknown built-in, one that is not fetched yet, or a folder that holds no model.
    """
    if path == TINY:
        return path
    if path == SMOLLM2:
        return str(_fetched_smollm2())
    if path.startswith("builtin:"):
        raise unknown_option("model.path", path, (TINY, SMOLLM2))
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such user
    if path and folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", ADAPTER_FILE)):
            raise ConfigError(
                f"model.path={path} holds no model: neither config.json nor {ADAPTER_FILE} is in it. "
                "Set model.path to the folder that holds the checkpoint itself."
            )
        return str(folder.resolve())
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"model.path={path!r} is neither a folder nor a hub name such as Qwen/Qwen2.5-0.5B-Instruct. "
            f"Built in: {TINY}, {SMOLLM2}."
        )
    return path


def _fetched_smollm2() -> Path:
    folder = smollm2_folder()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path={SMOLLM2} is not fetched yet ({folder} holds no model): "
            "run `make smollm` or `toolbox models get smollm2` once."
        )
    return folder
