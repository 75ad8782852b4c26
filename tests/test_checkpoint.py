"""Checkpoints: what is kept, what is skipped, and what is left after kills and full disks (cases i02–i06)."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_toolbox.checkpoint import (
    capture_rng,
    check_run_dir,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
)
from grpo_toolbox.errors import ConfigError, ToolboxError


def export(folder: Path) -> None:
    save_file({"weight": torch.arange(8.0)}, folder / "model.safetensors")


def save(root: Path, step: int, **options: Any) -> Path:
    state = {"policy": {"w": torch.full((4,), float(step))}, "step": step}
    return save_checkpoint(root, step, **{"state": state, "export": export, **options})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    state = {
        "policy": {"w": torch.tensor([1.5, -2.0])},
        "optimizer": {
            "state": {0: {"exp_avg": torch.tensor([0.25])}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}],
        },
        "data": {"position": 7, "epoch": None},
    }
    path = save(tmp_path / "checkpoints", 12, state=state)
    assert path == tmp_path / "checkpoints" / "step-00000012"
    assert latest_checkpoint(tmp_path / "checkpoints") == path
    loaded = load_checkpoint(path, "cpu")
    assert torch.equal(loaded["policy"].pop("w"), torch.tensor([1.5, -2.0]))
    assert torch.equal(loaded["optimizer"]["state"][0].pop("exp_avg"), torch.tensor([0.25]))
    assert loaded == {
        "policy": {},
        "optimizer": {"state": {0: {}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "data": {"position": 7, "epoch": None},
    }
    assert torch.equal(load_file(path / "model" / "model.safetensors")["weight"], torch.arange(8.0))


def test_marker_vouches_for_every_other_file(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    marker = json.loads((path / "COMPLETE").read_text())
    assert (marker["format"], marker["step"]) == (1, 3)
    assert set(marker["files"]) == {"state.pt", "model/model.safetensors"}
    assert marker["files"]["state.pt"]["bytes"] == (path / "state.pt").stat().st_size


def test_no_checkpoint_where_nothing_was_saved(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_state_that_could_not_be_loaded_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(ToolboxError, match="numpy"):
        save(tmp_path, 1, state={"best": np.float64(0.5)})
    assert names(tmp_path) == []


# ---- damaged checkpoints


def truncate(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(content)


def cut_the_marker(folder: Path) -> None:
    (folder / "COMPLETE").write_text((folder / "COMPLETE").read_text()[:40])


def from_the_future(folder: Path) -> None:
    (folder / "COMPLETE").write_text(json.dumps({"format": 2, "files": {}}))


def rewrite_marker(folder: Path, **changes: object) -> None:
    marker = json.loads((folder / "COMPLETE").read_text())
    (folder / "COMPLETE").write_text(json.dumps(marker | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "model/model.safetensors has"),
        (flip_a_bit, "state.pt does not match its sha256"),
        (cut_the_marker, "COMPLETE is damaged"),
        (from_the_future, "format 2, but this version reads 1"),
        (lambda folder: (folder / "COMPLETE").unlink(), "COMPLETE is missing"),
        (lambda folder: (folder / "COMPLETE").write_bytes(b""), "COMPLETE is damaged"),
        (lambda folder: rewrite_marker(folder, files={}), "COMPLETE is damaged"),
        (lambda folder: rewrite_marker(folder, step="4"), "COMPLETE is damaged"),
        (lambda folder: (folder / "state.pt").unlink(), "state.pt is missing"),
    ],
)
def test_i03_1_damaged_newest_falls_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], said: str
) -> None:
    whole, newest = save(tmp_path, 2), save(tmp_path, 4)
    damage(newest)
    assert latest_checkpoint(tmp_path) == whole
    (warning,) = caplog.messages
    assert f"{newest}: {said}" in warning


def test_after_falling_back_the_next_save_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 2)
    truncate(save(tmp_path, 4))
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_steps_of_an_abandoned_future_go(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_takes_no_place_among_the_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=3)
    truncate(save(tmp_path, 2, keep=3))
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = save(tmp_path, 2, state={"w": torch.tensor(9.0)})
    assert names(tmp_path) == ["step-00000002"]
    assert load_checkpoint(path, "cpu")["w"] == 9


# ---- retention


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):  # numbers, not names, are compared: 9 < 10
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]


def test_i06_2_best_survives_retention(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1, best_step=1)
    save(tmp_path, 2, keep=1, best_step=2)
    save(tmp_path, 3, keep=1, best_step=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_i04_1_the_first_is_there_until_the_second_is_published(tmp_path: Path) -> None:
    first = save(tmp_path, 1, keep=1)
    seen = []

    def look(folder: Path) -> None:
        seen.append(latest_checkpoint(tmp_path))
        export(folder)

    save(tmp_path, 2, keep=1, export=look)
    assert seen == [first]
    assert names(tmp_path) == ["step-00000002"]


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep at least 1"):
        save(tmp_path, 1, keep=0)


# ---- faults: every one of them is real

COMMON = """
import json, os, random, resource, signal, sys, time
from pathlib import Path
import torch
from grpo_toolbox.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from grpo_toolbox.errors import ToolboxError
from safetensors.torch import save_file

root = Path(sys.argv[1])

def save(step, value, numbers=64, weights=64, keep=1):
    state = {"w": torch.full((numbers,), float(value))}
    export = lambda folder: save_file({"w": torch.full((weights,), float(value))}, folder / "model.safetensors")
    return save_checkpoint(root, step, state=state, export=export, keep=keep)

def value():
    state = load_checkpoint(latest_checkpoint(root), "cpu")["w"]
    assert (state == state[0]).all()
    return state[0].item()
"""

KILLS = """
FILE_EVENTS = ("open", "os.", "shutil.")

def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child

def save_and_die(countdown, step, value):
    def hook(event, arguments):
        nonlocal countdown
        if event.startswith(FILE_EVENTS):
            countdown -= 1
            if countdown == -1:  # once only: the kill is an event, too
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(step, value)

def record(mode, old, new, status):
    print(json.dumps({"mode": mode, "old": old, "new": new, "found": value(), "signal": status & 127,
                      "half": any(root.glob(".tmp-*"))}))

save(1, 1)

# Killed before each single file operation of a save: of the next step, then of the same step once more.
for mode, advance in (("next", 1), ("same", 0)):
    step, status, operation = int(latest_checkpoint(root).name[5:13]), 1, 0
    while status != 0:
        old = value()
        status = os.waitpid(in_child(lambda: save_and_die(operation, step + advance, old + 1)), 0)[1]
        record(mode, old, old + 1, status)
        step, operation = int(latest_checkpoint(root).name[5:13]), operation + 1

# Killed after random delays within a save of 8 MB, most of which goes by inside writes and checksums.
start = time.monotonic()
save(step + 1, value(), numbers=2_000_000)
span = time.monotonic() - start
random.seed(0)
for _ in range(20):
    step, old = int(latest_checkpoint(root).name[5:13]), value()
    child = in_child(lambda: save(step + 1, old + 1, numbers=2_000_000))
    time.sleep(random.uniform(0, span))
    os.kill(child, signal.SIGKILL)
    record("delay", old, old + 1, os.waitpid(child, 0)[1])

save(step + 2, 0)
print(json.dumps(sorted(os.listdir(root))))
"""

FULL = """
if sys.argv[2] == "rlimit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
save(1, 1)
for big in ({"numbers": 1_000_000}, {"weights": 1_000_000}):
    try:
        save(2, 2, **big)
    except ToolboxError as error:
        print(json.dumps({"error": str(error), "left": os.listdir(root), "value": value()}))
print(json.dumps(save(3, 3).name))
"""


def run_script(body: str, *arguments: str, prefix: tuple[str, ...] = ()) -> list[Any]:
    command = [*prefix, sys.executable, "-c", COMMON + body, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_script(KILLS, str(tmp_path_factory.mktemp("kills")))


@pytest.mark.parametrize(("mode", "at_least"), [("next", 20), ("same", 20), ("delay", 20)])
def test_i03_2_i04_1_a_kill_at_any_instant_leaves_a_whole_checkpoint(
    kills: list[Any], mode: str, at_least: int
) -> None:
    records = [record for record in kills[:-1] if record["mode"] == mode]
    assert len(records) >= at_least
    assert {record["signal"] for record in records} <= {0, signal.SIGKILL}
    assert all(record["found"] in (record["old"], record["new"]) for record in records)
    if mode != "delay":  # the sweep goes from before the first operation to after the last
        assert records[0]["found"] == records[0]["old"]
        assert all(record["signal"] == signal.SIGKILL for record in records[:-1])
        assert (records[-1]["signal"], records[-1]["found"]) == (0, records[-1]["new"])
        assert any(record["half"] for record in records)


def test_half_folders_of_killed_runs_are_removed_by_the_next_save(kills: list[Any]) -> None:
    (only,) = kills[-1]
    assert only.startswith("step-")


@pytest.mark.parametrize(("limit", "reason"), [("tmpfs", "No space left on device"), ("rlimit", "File too large")])
def test_i04_4_full_disk_is_reported_and_leaves_the_older_checkpoint(tmp_path: Path, limit: str, reason: str) -> None:
    prefix: tuple[str, ...] = ()
    if limit == "tmpfs":
        mount = f'mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec "$0" "$@"'
        prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount)
        if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
            pytest.skip("this machine lets no one mount a small disk")
    *failures, after = run_script(FULL, str(tmp_path / "checkpoints"), limit, prefix=prefix)
    assert len(failures) == 2
    for failure in failures:
        assert reason in failure["error"]
        assert str(tmp_path / "checkpoints" / "step-00000002") in failure["error"]
        assert failure["left"] == ["step-00000001"]
        assert failure["value"] == 1
    assert after == "step-00000003"


def test_an_export_that_is_interrupted_leaves_no_half_folder(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, export=interrupted)
    assert names(tmp_path) == ["step-00000001"]


# ---- random number generators


def draw() -> list[float]:
    """One draw of each kind whose generator keeps a state of its own; the Gaussians keep a spare value, too."""
    devices = [torch.rand(1, device=f"cuda:{index}").item() for index in range(torch.cuda.device_count())]
    return [random.random(), random.gauss(), np.random.random(), np.random.normal(), torch.rand(1).item(), *devices]


def test_i02_2_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    sampler = torch.Generator().manual_seed(5)
    draw()
    state = {"rng": capture_rng(), "sampler": sampler.get_state()}
    path = save(tmp_path, 1, state=state)
    expected = [*draw(), *draw(), torch.rand(1, generator=sampler).item()]
    other = torch.Generator().manual_seed(6)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert draw() != expected[: len(draw())]
    loaded = load_checkpoint(path, "cpu")
    assert set(loaded["rng"]) == {"python", "numpy", "torch", "cuda"}
    restore_rng(loaded["rng"])
    other.set_state(loaded["sampler"])
    assert [*draw(), *draw(), torch.rand(1, generator=other).item()] == expected


def test_another_number_of_devices_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = capture_rng()
    restore_rng(state)
    assert caplog.messages == []
    restore_rng({**state, "cuda": [*state["cuda"], torch.zeros(16, dtype=torch.uint8)]})
    assert "CUDA devices" in caplog.text


# ---- the run folder


def test_a_new_run_folder_is_created(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "runs" / "a", resuming=False)
    check_run_dir(tmp_path / "runs" / "a", resuming=False)
    assert names(tmp_path / "runs" / "a") == []


@pytest.mark.parametrize("trace", ["metrics.jsonl", "config.yaml", "checkpoints"])
def test_a_folder_of_another_run_is_refused(tmp_path: Path, trace: str) -> None:
    save(tmp_path / "checkpoints", 1)
    if trace != "checkpoints":
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        (tmp_path / trace).touch()
    with pytest.raises(ConfigError, match=rf"run_dir=.*{trace}.*another run_dir=.*resume={tmp_path}"):
        check_run_dir(tmp_path, resuming=False)


def test_resuming_needs_a_whole_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1)
    check_run_dir(tmp_path, resuming=True)
    truncate(path)
    with pytest.raises(ConfigError, match=rf"resume={tmp_path} has no whole .*step-00000001: model/model.safetensors"):
        check_run_dir(tmp_path, resuming=True)
    with pytest.raises(ConfigError, match=rf"resume={tmp_path}/missing has no whole"):
        check_run_dir(tmp_path / "missing", resuming=True)
    assert not (tmp_path / "missing").exists()


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=f"run_dir={folder} cannot be written"):
            check_run_dir(folder, resuming=False)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a file system in which not even root creates files")
@pytest.mark.parametrize("folder", ["/sys/kernel", "/sys/kernel/run"])
def test_a_folder_that_cannot_be_written_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"run_dir={folder} cannot be written"):
        check_run_dir(Path(folder), resuming=False)
