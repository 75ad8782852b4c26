"""`toolbox serve [group=option] [key=value] …`: the rollout server that `toolbox train` asks for with these words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo_toolbox.cli.train import run_composed
from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:  # `--help` waits for neither OmegaConf nor torch
    from grpo_toolbox.config.schema import RunConfig
    from grpo_toolbox.engines.commands import Serving

_USAGE = """\
usage: toolbox serve [group=option …] [key=value …] [--python PYTHON] [--index N] [--dry-run]

Prints the command that starts the rollout server of a run, for the version of vLLM or SGLang that is installed, and
becomes that server. Take the words of `toolbox train`: rollout.engine says which server, model.path what it serves,
rollout.server.urls where.

  --python PYTHON  the Python of the environment that has vLLM or SGLang; else rollout.vllm.python, TOOLBOX_VLLM_PYTHON
                   (TOOLBOX_SGLANG_PYTHON), or the one that runs the toolbox
  --index N        which of rollout.server.urls, counted from 0
  --dry-run        print the command alone

examples
  toolbox serve model=smollm2 rollout.engine=vllm
  toolbox serve model.path=/models/mine rollout.engine=vllm rollout.vllm.tensor_parallel_size=2 --dry-run"""


def run(argv: Sequence[str]) -> int:
    """Compose a run and start its server in the place of this process; returns 0 after `--dry-run`."""
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    parser = argparse.ArgumentParser(prog="toolbox serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--python")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    flags, rest = parser.parse_known_args(argv)
    return run_composed("serve", rest, partial(_serve, flags))


def _serve(flags: argparse.Namespace, checked: tuple[RunConfig, dict[str, Any]]) -> int:
    from grpo_toolbox.engines.commands import installed, sglang_command, vllm_command

    config, _ = checked
    make = {"vllm": vllm_command, "sglang": sglang_command}.get(config.rollout.engine)
    if make is None:
        raise ConfigError(
            f"rollout.engine={config.rollout.engine} has no server that the toolbox starts: set rollout.engine=vllm or "
            "sglang. An endpoint of rollout.engine=http is yours to start."
        )
    named = os.environ.get(f"TOOLBOX_{config.rollout.engine.upper()}_PYTHON")
    has = installed(flags.python or config.rollout.vllm.python or named or sys.executable)
    command = make(has, _serving(config, flags.index, has.gpu))
    print(command, flush=True)
    if not flags.dry_run:
        os.execvpe(command.words[0], command.words, {**os.environ, **command.environment})
    return 0


def _serving(config: RunConfig, index: int, on_gpu: bool) -> Serving:
    from grpo_toolbox.engines.commands import Serving
    from grpo_toolbox.engines.server import addresses
    from grpo_toolbox.engines.sync.choose import server_arguments, server_environment

    urls = addresses(config.rollout.server.urls)
    if not 0 <= index < len(urls):
        raise ConfigError(f"--index {index}: rollout.server.urls has {len(urls)}, counted from 0.")
    place = urlsplit(urls[index])
    options, background = config.rollout.vllm, config.rollout.async_
    return Serving(
        model=_folder(config.model.path),
        host=place.hostname or "127.0.0.1",
        port=place.port or 8000,
        name=config.rollout.server.model or "policy",
        dtype="float32" if config.trainer.precision == "float32" else None,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        lora_rank=config.model.lora.r,
        stamped=background.enabled and background.in_flight != "none",
        more=[str(word) for word in options.extra_args],
        environment=server_environment(),
        transfer=server_arguments(on_gpu),
    )


def _folder(path: str) -> str:
    from grpo_toolbox.models.paths import TINY, resolve_model_path

    resolved = resolve_model_path(path)
    if resolved == TINY:
        raise ConfigError(
            "model=tiny is made on the spot and has no folder to serve, and servers have no kernel for heads as narrow "
            "as its: set model=smollm2 or model.path."
        )
    return resolved
