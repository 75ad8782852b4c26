"""Model cards, and the upload of a folder to the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_toolbox import __version__

PAPERS = {
    "grpo": "GRPO (Shao et al., 2024, arXiv:2402.03300)",
    "rloo": "RLOO (Ahmadian et al., 2024, arXiv:2402.14740)",
}


def model_card(
    algorithm: str,
    *,
    name: str,
    base: str,
    dataset: str | None,
    tags: Sequence[str],
    metrics: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> str:
    """Return a README.md: what was trained, from what, by which settings, and where the reward went.

    `metrics` are the entries of a log history that have a reward.
    """
    import yaml

    on_hub = not base.startswith(("/", ".", "builtin:", "given"))
    head: dict[str, Any] = {"base_model": base} if on_hub else {}
    head |= {"datasets": [dataset]} if dataset else {}
    head |= {"library_name": "transformers", "tags": ["grpo-toolbox", algorithm, *tags]}
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    lines += [f"Trained from `{base}` by {PAPERS[algorithm]} with GRPO Toolbox {__version__}."]
    if metrics:
        first, last = metrics[0], metrics[-1]
        lines += ["", f"Mean reward: {first['reward']:.3g} at step {first['step']}, {last['reward']:.3g} at step "]
        lines[-1] += f"{last['step']}."
    if settings:
        kept = {key: value for key, value in settings.items() if not key.endswith("token")}
        lines += ["", "## Settings", "", "| field | value |", "|---|---|"]
        lines += [f"| `{key}` | `{value}` |" for key, value in kept.items()]
    return "\n".join([*lines, ""])


def push_folder(
    folder: Path,
    repo: str,
    *,
    message: str | None,
    token: str | None,
    revision: str | None,
    private: bool | None,
    blocking: bool,
) -> Any:
    """Upload a model folder (weights, tokenizer, card; no checkpoints, no logs) to a hub repository, made if needed."""
    from huggingface_hub import HfApi

    api: Any = HfApi(token=token)
    created = api.create_repo(repo, private=private, exist_ok=True)
    return api.upload_folder(
        repo_id=created.repo_id,
        folder_path=folder,
        commit_message=message,
        revision=revision,
        allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md"],
        ignore_patterns=["*/*", "trainer_state.json"],
        run_as_future=not blocking,
    )
