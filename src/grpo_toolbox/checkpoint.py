"""Checkpoints that survive a kill at any instant: written beside, completed by a marker, then renamed.

    <run_dir>/checkpoints/step-00000012/
        state.pt      what training needs to go on: parameters, optimizer, scheduler, RNG, data position, counters
        model/        what a person uses: the folder that `from_pretrained` reads
        COMPLETE      written last: the size and sha256 of every other file

A folder is a checkpoint only while its marker is there and every file agrees with it; anything else is skipped.
One process writes a run's checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.serialization import get_unsafe_globals_in_checkpoint

from grpo_toolbox.errors import ConfigError, ToolboxError

log = logging.getLogger(__name__)

_FORMAT = 1
_MARKER = "COMPLETE"
_STATE = "state.pt"
_MODEL = "model"
_CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.replaced)?")


# ---- writing


def save_checkpoint(
    root: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    export: Callable[[Path], None],
    keep: int = 2,
    best_step: int | None = None,
) -> Path:
    """Publish the checkpoint of `step` under `root` (`<run_dir>/checkpoints`), then delete those no longer kept.

    `state` is a nested dict of tensors and plain values; `export(folder)` writes the user's model files into a folder.
    Kept are the `keep` newest checkpoints up to `step` and that of `best_step`. Saving a step again replaces it.
    Raises ToolboxError when the write fails; the half-written folder is then gone and older checkpoints are untouched.
    """
    if keep < 1:
        raise ConfigError(f"{keep} checkpoints to keep cannot work: keep at least 1.")
    final = root / f"step-{step:08d}"
    partial = root / f".tmp-{final.name}"
    try:
        _remove_leftovers(root)
        (partial / _MODEL).mkdir(parents=True)
        _write_state(partial / _STATE, state)
        export(partial / _MODEL)
        _complete(partial, step)
        _publish(partial, final)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ToolboxError(
            f"checkpoint {final} was not written: {error}. "
            f"Older checkpoints are intact; clear the cause, then go on with resume={root.parent}."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _retire(root, step, keep, best_step)
    return final


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    outer = sys.exception()
    try:
        with path.open("wb") as file:
            torch.save(dict(state), file)
    except RuntimeError as error:
        # torch's zip writer hides what stopped it (a full disk, Ctrl-C) behind a complaint about a file position.
        hidden = error.__context__
        if hidden is None or hidden is outer:
            raise
        raise hidden from None
    if unsafe := get_unsafe_globals_in_checkpoint(str(path)):
        raise ToolboxError(
            f"the state of a checkpoint holds {', '.join(sorted(unsafe))}, which resuming could not load: "
            "turn it into tensors, numbers, strings, tuples, lists and dicts."
        )


def _complete(folder: Path, step: int) -> None:
    """Force every file to the disk, then write the marker that vouches for them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    marker = {
        "format": _FORMAT,
        "step": step,
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        },
    }
    for path in files:
        _fsync(path)
    (folder / _MARKER).write_text(json.dumps(marker, indent=1))
    _fsync(folder / _MARKER)
    for path in folder.rglob("*"):
        if path.is_dir():
            _fsync(path)
    _fsync(folder)


def _publish(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`; an older folder of that name stays readable until the new one is in place."""
    if final.exists():
        replaced = final.with_name(f"{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _fsync(final.parent)


def _retire(root: Path, step: int, keep: int, best_step: int | None) -> None:
    """Delete what is neither among the `keep` newest nor the best, once the checkpoint of `step` is published.

    Steps after `step` go too: they are of a run that went back to an earlier checkpoint, and a resume must not jump to
    them. A cut-off folder takes nobody's place.
    """
    current: dict[int, Path] = {}
    for number, path in _newest_first(root):
        if number <= step and _fault(path, hashes=False) is None:
            current.setdefault(number, path)
    kept = {*list(current.values())[:keep], current.get(step if best_step is None else best_step)}
    for _, path in _newest_first(root):
        if path not in kept:
            # Renamed first, so that a kill in the middle of the deletion leaves no half checkpoint in view.
            retired = path.rename(root / f".tmp-retired-{path.name}")
            shutil.rmtree(retired, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading


def latest_checkpoint(root: Path, *, warn: bool = True) -> Path | None:
    """Return the newest whole checkpoint under `root`, or None; `warn` names every newer, damaged one."""
    newest, faults = _newest_whole(root)
    for fault in faults if warn else ():
        log.warning("skipping checkpoint %s", fault)
    return newest


def load_checkpoint(path: Path, map_location: str | torch.device) -> dict[str, Any]:
    """Return the state saved in the whole checkpoint `path`, its tensors on `map_location`; no code in it is run."""
    state: dict[str, Any] = torch.load(path / _STATE, map_location=map_location, weights_only=True)
    return state


def finished_step(path: Path) -> int:
    """Return the step that a whole checkpoint was written after; its folder's name may be that of a replaced one."""
    return int(json.loads((path / _MARKER).read_text())["step"])


def _newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with each that is newer."""
    faults: list[str] = []
    for _, path in _newest_first(root):
        fault = _fault(path, hashes=True)
        if fault is None:
            return path, faults
        faults.append(f"{path}: {fault}")
    return None, faults


def _newest_first(root: Path) -> list[tuple[int, Path]]:
    """Published folders with their steps; a replaced folder comes after the one that replaces it."""
    found = []
    for path in root.glob("step-*"):
        if name := _CHECKPOINT_NAME.fullmatch(path.name):
            found.append((int(name[1]), name[2] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def _fault(folder: Path, *, hashes: bool) -> str | None:
    """Say what is wrong with a checkpoint, or None. Sizes are always checked, contents only with `hashes`."""
    try:
        marker = json.loads((folder / _MARKER).read_bytes())
        if marker["format"] != _FORMAT:
            return f"format {marker['format']}, but this version reads {_FORMAT}"
        if not isinstance(marker["step"], int) or _STATE not in marker["files"]:
            return f"{_MARKER} is damaged"
        for name, wanted in marker["files"].items():
            size = (folder / name).stat().st_size
            if size != wanted["bytes"]:
                return f"{name} has {size} bytes, not {wanted['bytes']}"
            if hashes and _sha256(folder / name) != wanted["sha256"]:
                return f"{name} does not match its sha256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except OSError as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MARKER} is damaged"
    return None


# ---- random number generators


def seed_rng(seed: int) -> None:
    """Start Python's, numpy's and torch's generators anew, so that a reward that draws from any of them repeats."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def copy_parameters(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], whose: str, keys: str) -> None:
    """Put saved parameters back; a ToolboxError for other names or shapes says which settings, `keys`, to keep."""
    foreign = {(name, value.shape) for name, value in saved.items()} ^ {
        (name, value.shape) for name, value in own.items()
    }
    if foreign:
        raise ToolboxError(
            f"the checkpoint's parameters are not this {whose}'s (first difference: {min(foreign)[0]}): resume with "
            f"the {keys} the run was started with."
        )
    with torch.no_grad():
        for name, value in saved.items():
            own[name].copy_(value)


def capture_rng() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's CPU and every CUDA device's generator, as plain values."""
    name, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every generator to what `capture_rng` saw; warns where the number of CUDA devices has changed."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    devices = torch.cuda.device_count()
    if devices != len(state["cuda"]):
        log.warning(
            "the checkpoint was written with %d CUDA devices and is resumed with %d: random draws on them will differ",
            len(state["cuda"]),
            devices,
        )
    for device, device_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(device_state.cpu(), device)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Put every generator back to where it was before the block."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


# ---- the run folder


def check_run_dir(run_dir: Path, *, resuming: bool) -> None:
    """Create the run folder and make sure that it can be written and that no other run is overwritten.

    Raises ConfigError for a folder that holds another run (unless `resuming`), that cannot be written, or that is to be
    resumed but has no whole checkpoint.
    """
    if resuming:
        newest, faults = _newest_whole(run_dir / "checkpoints")
        if newest is None:
            raise ConfigError(
                f"resume={run_dir} has no whole checkpoint in {run_dir / 'checkpoints'}"
                f"{''.join(f' ({fault})' for fault in faults)}. Start a new run with another run_dir=."
            )
    else:
        taken = [name for name in ("metrics.jsonl", "config.yaml", "checkpoints") if (run_dir / name).exists()]
        if taken:
            raise ConfigError(
                f"run_dir={run_dir} already holds a run ({', '.join(taken)}). "
                f"Choose another run_dir=, or go on with that run: resume={run_dir}."
            )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"{'resume' if resuming else 'run_dir'}={run_dir} cannot be written ({error.strerror}): "
            "choose a folder below one that you may write to."
        ) from error
