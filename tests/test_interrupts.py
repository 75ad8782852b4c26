"""Signals end a run between two finished steps (cases i08). Every signal here is a real one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grpo_toolbox.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from grpo_toolbox.errors import TrainingError
from grpo_toolbox.interrupts import GracefulStop, Interrupted

STOPS = [signal.SIGTERM, signal.SIGINT]


@contextlib.contextmanager
def started(body: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said "ready"; whatever happens, it is gone afterwards."""
    header = "import os, signal, sys, time\nfrom grpo_toolbox.interrupts import GracefulStop, Interrupted\n"
    command = [sys.executable, "-c", header + body, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


SLEEPING_REWARD = """
with GracefulStop() as stop:
    try:
        try:
            print("ready", flush=True)
            time.sleep(3600)
        except Exception:
            print("swallowed by the reward")
    except Interrupted as interrupted:
        print(interrupted)
        sys.exit(128 + interrupted.received)
"""


@pytest.mark.parametrize("number", STOPS)
def test_a_long_stage_is_given_up_at_once(number: signal.Signals) -> None:
    with started(SLEEPING_REWARD) as process:
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert said == f"stopped by {number.name}\n"
    assert process.returncode == 128 + number


TRAINING = """
import torch
from pathlib import Path
from grpo_toolbox.checkpoint import save_checkpoint

weight, finished = torch.zeros(1), {}
with GracefulStop() as stop:
    try:
        for step in range(1, 10):
            if step == 3:
                print("ready", flush=True)
                time.sleep(3600)
            with stop.protect():
                weight += 1
                finished = {"step": step, "weight": weight.clone()}
    except Interrupted:
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat it: the save must not be hit
        save_checkpoint(Path(sys.argv[1]), finished["step"], state=finished, export=lambda folder: None)
"""


def test_i08_2_sigterm_during_generation_saves_the_last_finished_step(tmp_path: Path) -> None:
    with started(TRAINING, str(tmp_path)) as process:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / "step-00000002"
    assert load_checkpoint(latest, "cpu") == {"step": 2, "weight": torch.tensor([2.0])}


UPDATE = """
try:
    with GracefulStop() as stop:
        with stop.protect():
            print("ready", flush=True)
            sys.stdin.readline()  # answered after the signal was sent
            print("update finished")
        print("next step begun")
except Interrupted as interrupted:
    print(interrupted)
"""


@pytest.mark.parametrize("number", STOPS)
def test_an_update_is_finished_before_the_run_stops(number: signal.Signals) -> None:
    with started(UPDATE) as process:
        process.send_signal(number)
        said, _ = process.communicate("\n", timeout=60)
    assert said == f"update finished\nstopped by {number.name}\n"


SECOND = """
try:
    with GracefulStop() as stop:
        with stop.protect():
            signal.raise_signal(getattr(signal, sys.argv[1]))
            print("ready", flush=True)
            time.sleep(3600)
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("first", STOPS)
def test_ctrl_c_after_the_first_signal_stops_even_an_update(first: signal.Signals) -> None:
    with started(SECOND, first.name) as process:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert said == "KeyboardInterrupt\n"


def test_i08_3_a_step_that_failed_is_not_saved_even_when_a_signal_came_with_it(tmp_path: Path) -> None:
    def run() -> None:
        with GracefulStop() as stop:
            for step in range(1, 10):
                with stop.protect():
                    if step == 5:
                        signal.raise_signal(signal.SIGTERM)
                        raise TrainingError("loss is nan at step 5")
                    save_checkpoint(tmp_path, step, state={"step": step}, export=lambda folder: None)

    with pytest.raises(TrainingError, match="nan at step 5"):
        run()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_a_stop_that_a_stage_swallowed_comes_before_the_update() -> None:
    updated = []
    with GracefulStop() as stop:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted), stop.protect():
            updated.append(1)
    assert updated == []


def test_only_the_outermost_protected_block_gives_way() -> None:
    done = []

    def step(stop: GracefulStop) -> None:
        with stop.protect():
            with stop.protect():
                signal.raise_signal(signal.SIGTERM)
            done.append("outer")

    with GracefulStop() as stop, pytest.raises(Interrupted):
        step(stop)
    assert done == ["outer"]


def test_an_event_loop_lets_the_stop_through() -> None:
    async def judge() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        await asyncio.sleep(60)

    with GracefulStop(), pytest.raises(Interrupted):
        asyncio.run(judge())


# ---- handlers


def run_quietly() -> None:
    with GracefulStop():
        pass


def run_stopped() -> None:
    with GracefulStop():
        signal.raise_signal(signal.SIGTERM)


def run_failing() -> None:
    with GracefulStop():
        raise TrainingError("loss is nan")


@pytest.mark.parametrize("run", [run_quietly, run_stopped, run_failing])
def test_former_handlers_are_restored(run: Callable[[], None]) -> None:
    def own(number: int, frame: object) -> None: ...

    before = {number: signal.signal(number, own) for number in STOPS}
    try:
        with contextlib.suppress(Interrupted, TrainingError):
            run()
        assert [signal.getsignal(number) for number in STOPS] == [own, own]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_other_threads_leave_the_handlers_alone() -> None:
    seen = []

    def run() -> None:
        with GracefulStop() as stop, stop.protect():
            seen.append([signal.getsignal(number) for number in STOPS])

    before = [signal.getsignal(number) for number in STOPS]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
