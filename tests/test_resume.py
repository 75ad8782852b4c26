"""2 + 2 steps equal 4 steps bit for bit, whatever stopped the run between them (cases i01, i07, i08).

Ids such as i08.2 number checked cases. Runs are of the tiny policy, through the command line in this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import plugs
from toolbox_runs import (
    SMALL,
    checkpoints,
    differences,
    metrics,
    one_thread,
    state,
    steps,
    toolbox_train,
)

# six prompts, four a step: the first epoch ends within step 2
STOPPED = {"SIGTERM": 143, "SIGINT": 130}
NOISY = (*SMALL, "reward=custom", "reward.name=plugs:noisy")
EVALUATED = ("data.eval_size=2", "rollout.prompts_per_step=3", "trainer.eval_every=2", "trainer.eval_temperature=1")
FULL = (
    *(*NOISY, *EVALUATED, "callbacks=default", "callbacks.display=null", "callbacks.sample_logger.every=1"),
    *("trainer.ppo_epochs=2", "trainer.schedule=linear", "trainer.warmup_steps=2", "trainer.micro_batch_tokens=40"),
    *("objective.name=plugs:clipped_and_stopping", "objective.beta=0.1"),
)
LORA = (
    *(*NOISY, "callbacks.trace_rollouts={every: 1}", "model.lora.r=2", "model.lora.dropout=0.1"),
    *("trainer.schedule=cosine", "trainer.weight_decay=0.1", "rollout.temperature=0.7"),
)
PLAIN_ENGINE = (*NOISY, "rollout.engine=hf", "trainer.packing=false", "objective=ppo_clip", "advantage=rloo")
VARIANTS = {"full": FULL, "lora": LORA, "plain_engine": PLAIN_ENGINE}


@pytest.fixture(autouse=True)
def _same_sums() -> Any:
    plugs.start_counting()
    with one_thread():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to the folder of its four steps, never stopped."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("whole") / name
            assert toolbox_train(*VARIANTS[name], "trainer.max_steps=4", f"run_dir={folders[name]}") == 0
        return folders[name]

    return of


def assert_same(run_dir: Path, other: Path) -> None:
    assert metrics(run_dir) == metrics(other)
    assert differences(state(run_dir), state(other)) == []
    for name in ("traces/actions.jsonl", "samples.jsonl"):
        assert (run_dir / name).exists() == (other / name).exists()
        if (run_dir / name).exists():
            assert (run_dir / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("name", VARIANTS)
def test_two_and_two_steps_equal_four(name: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, optimizer moments, random states, data position, metrics, traces (i01, i07.1)."""
    monkeypatch.setenv("STOP_AT", "SIGTERM:rollouts:3")
    run_dir = tmp_path / "halves"
    assert toolbox_train(*VARIANTS[name], "trainer.max_steps=4", f"run_dir={run_dir}") == STOPPED["SIGTERM"]
    assert checkpoints(run_dir) == [2]
    assert toolbox_train(f"resume={run_dir}") == 0
    assert steps(run_dir)[-4:] == [1, 2, 3, 4]
    assert_same(run_dir, whole(name))


@pytest.mark.parametrize("how", ["resume={run_dir}", "run_dir={run_dir} trainer.resume=true"])
def test_a_finished_run_is_trained_on(how: str, tmp_path: Path) -> None:
    """Two steps that were all there was, then max_steps=4: both ways to say which run is meant."""
    constant = (*SMALL, "reward=custom", "reward.name=plugs:digits", "trainer.schedule=constant")
    assert toolbox_train(*constant, "trainer.max_steps=4", f"run_dir={tmp_path / 'four'}") == 0
    assert toolbox_train(*constant, "trainer.max_steps=2", f"run_dir={tmp_path / 'two'}") == 0
    assert toolbox_train("trainer.max_steps=4", *how.format(run_dir=tmp_path / "two").split()) == 0
    assert_same(tmp_path / "two", tmp_path / "four")


def test_a_cut_off_checkpoint_falls_back_to_the_older_one(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "cut"
    monkeypatch.setenv("STOP_AT", "SIGTERM:rollouts:4")
    assert toolbox_train(*FULL, "trainer.max_steps=4", "trainer.save_every=2", f"run_dir={run_dir}") == 143
    assert checkpoints(run_dir) == [2, 3]
    assert steps(run_dir) == [0, 1, 2, 3]
    newest = run_dir / "checkpoints" / "step-00000003" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert toolbox_train(f"resume={run_dir}") == 0
    assert caplog.text.count("step-00000003: state.pt has") == 1
    assert steps(run_dir) == [0, 1, 2, 3, 4]  # the line of step 3 was dropped and written again
    assert_same(run_dir, whole("full"))


def test_other_data_starts_at_its_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A position belongs to the data it was counted in (i01.2); shorter data never runs dry (i01.3)."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"9-{n}=", "answer": str(9 - n)}) + "\n" for n in range(5)))
    run_dir = tmp_path / "run"
    assert toolbox_train(*SMALL, "data.shuffle=false", "trainer.max_steps=2", f"run_dir={run_dir}") == 0
    same = f"data.path={other}", "trainer.max_steps=4", "callbacks.trace_rollouts={every: 1}"
    assert toolbox_train(f"resume={run_dir}", *same) == 0
    assert "its position is dropped, the data starts at 0" in caplog.text
    assert [prompts(run_dir, step) for step in (3, 4)] == [[0, 1, 2, 3], [4, 0, 1, 2]]


def prompts(run_dir: Path, step: int) -> list[int]:
    lines = map(json.loads, (run_dir / "traces" / "actions.jsonl").read_text().splitlines())
    return [line["prompt_id"] for line in lines if line["step"] == step and line["index"] == 0]


@pytest.mark.parametrize("lora", [0, 2])
def test_the_reference_of_a_resumed_run_is_the_model_it_started_from(lora: int, tmp_path: Path) -> None:
    """Steps 3 and 4 measure their KL from step 0, not from step 2: there it would be 0 at step 3."""
    given = (*SMALL, "reward=custom", "reward.name=plugs:digits", "trainer.schedule=constant", "trainer.lr=0.01")
    given = (*given, f"model.lora.r={lora}")
    assert toolbox_train(*given, "trainer.max_steps=3", f"run_dir={tmp_path / 'whole'}") == 0
    assert toolbox_train(*given, "trainer.max_steps=2", f"run_dir={tmp_path / 'halves'}") == 0
    assert toolbox_train(f"resume={tmp_path / 'halves'}", "trainer.max_steps=3") == 0
    kl = [line["kl"] for line in metrics(tmp_path / "halves")]
    assert kl == [line["kl"] for line in metrics(tmp_path / "whole")]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[2] > kl[1] > 1e-5


def test_a_generation_outlives_the_stop_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps share a generation: the first serves steps 1 to 4, the second 5 to 8, stopped or not (i05.1)."""
    given = (
        *NOISY,
        "rollout.steps_per_generation=4",
        "rollout.prompts_per_step=1",
        "callbacks.trace_rollouts={every: 1}",
    )
    monkeypatch.setenv("STOP_AT", "SIGTERM:update:3")
    given = (*given, "objective.name=plugs:clipped_and_stopping", "trainer.max_steps=8")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'halves'}") == 143
    assert checkpoints(tmp_path / "halves") == [2]
    assert toolbox_train(f"resume={tmp_path / 'halves'}") == 0
    assert toolbox_train(*given, f"run_dir={tmp_path / 'whole'}") == 0
    lines = map(json.loads, (tmp_path / "halves" / "traces" / "actions.jsonl").read_text().splitlines())
    sampled_by = {line["step"]: line["weights_version"] for line in lines}
    assert sampled_by == {1: 0, 2: 0, 3: 0, 4: 0, 5: 4, 6: 4, 7: 4, 8: 4}
    assert_same(tmp_path / "halves", tmp_path / "whole")


def test_the_optimizer_can_be_left_behind(tmp_path: Path) -> None:
    """load_optimizer=false starts the moments from zero (i07.3), in that resume alone: the next one has them again.

    The k-th moment of AdamW counts its own steps, so after two steps of the second run it says 2 and not 4.
    """
    run_dir = tmp_path / "run"
    given = (*SMALL, "reward=custom", "reward.name=plugs:digits", "trainer.schedule=constant")
    assert toolbox_train(*given, "trainer.max_steps=2", f"run_dir={run_dir}") == 0
    for flag, finished, counted in (("false", 4, 2), ("true", 5, 3), (None, 6, 4)):
        load = [] if flag is None else [f"trainer.load_optimizer={flag}"]
        assert toolbox_train(f"resume={run_dir}", f"trainer.max_steps={finished}", *load) == 0
        moments = state(run_dir)["optimizer"]["state"].values()
        assert {int(one["step"]) for one in moments} == {counted}


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert toolbox_train(*SMALL, "model.lora.r=2", "trainer.max_steps=1", f"run_dir={run_dir}") == 0
    before = metrics(run_dir)
    for lora in (0, 4):
        assert toolbox_train(f"resume={run_dir}", f"model.lora.r={lora}", "trainer.max_steps=2") == 1
        assert "resume with the model.* settings the run was started with" in capsys.readouterr().err
    assert metrics(run_dir) == before
    assert checkpoints(run_dir) == [1]


# ---- signals, from within, so that each hits the stage it is meant for


@pytest.mark.parametrize("stage", ["rollouts:3", "update:8", "evaluation:2", "evaluation:3"])
@pytest.mark.parametrize("name", STOPPED)
def test_a_signal_in_any_stage_changes_nothing(
    name: str, stage: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with 128 + n and the last finished step saved; resumed, it is as if it had never stopped (i08.2).

    Evaluations come before step 1 and after steps 2 and 4. The surrogate is called by the probe before the run, then by
    2 epochs × 2 micro-batches in each step: call 8 is in the second epoch of step 2, which is finished first.
    """
    finished = {"rollouts:3": 2, "update:8": 2, "evaluation:2": 2, "evaluation:3": 4}[stage]
    monkeypatch.setenv("STOP_AT", f"{name}:{stage}")
    run_dir = tmp_path / "run"
    assert toolbox_train(*FULL, "trainer.max_steps=4", f"run_dir={run_dir}") == STOPPED[name]
    assert checkpoints(run_dir) == [finished]
    assert steps(run_dir)[-1] == finished
    assert toolbox_train(f"resume={run_dir}") == 0
    assert_same(run_dir, whole("full"))


# ---- signals from outside, to processes of their own


def environment() -> dict[str, str]:
    """Ours, with the plug-ins on the path and one thread, as in this process."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A `toolbox train` of its own; whatever happens, it is gone afterwards."""
    command = [sys.executable, "-m", "grpo_toolbox.cli.main", "train", *overrides]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_process_exits_with_its_signal(name: str, tmp_path: Path) -> None:
    given = (*NOISY, "trainer.schedule=constant", "callbacks.display={mode: plain}")
    run_dir = tmp_path / "run"
    with started(*given, "trainer.max_steps=100000", f"run_dir={run_dir}") as process:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(steps(run_dir)) > 2, process)
        process.send_signal(signal.Signals[name])
        said, complained = process.communicate(timeout=300)
    assert process.returncode == STOPPED[name]
    assert "Traceback" not in complained
    assert f"resume={run_dir}" in said
    finished = steps(run_dir)[-1]
    assert checkpoints(run_dir) == [finished]
    assert toolbox_train(f"resume={run_dir}", f"trainer.max_steps={finished + 2}") == 0
    assert toolbox_train(*given, f"trainer.max_steps={finished + 2}", f"run_dir={tmp_path / 'whole'}") == 0
    assert_same(run_dir, tmp_path / "whole")


FORKING = """
import os, random, signal, sys, time
from pathlib import Path
import grpo_toolbox.config.build, peft, plugs
from grpo_toolbox.cli.main import main

def run(*argv):
    child = os.fork()
    if not child:
        os._exit(main(["train", *argv]))
    return child

folder, last, *given = sys.argv[1:]
checkpoints = Path(folder, "checkpoints")
draw, kills = random.Random(0), 0
child = run(f"run_dir={folder}", *given)
while not list(checkpoints.glob("step-*")):
    time.sleep(0.001)
while True:
    time.sleep(draw.uniform(0, 0.3) * (kills + 1))  # in the end one gets through
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    kills += os.WIFSIGNALED(status)
    if os.WIFEXITED(status) or Path(checkpoints, f"step-{last:0>8}").exists():
        break
    child = run(f"resume={folder}")
print(kills, os.WEXITSTATUS(status))
"""


@pytest.mark.slow
def test_kills_at_random_instants_change_nothing(tmp_path: Path) -> None:
    """A process that imports everything forks one `toolbox train` after the other and kills each somewhere."""
    given = (*NOISY, *EVALUATED, "trainer.max_steps=25", "trainer.save_every=1", "callbacks.trace_rollouts={every: 1}")
    command = [sys.executable, "-c", FORKING, str(tmp_path / "killed"), "25", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    kills, code = map(int, done.stdout.split())
    assert code == 0, done.stderr
    assert kills >= 3
    assert toolbox_train(*given, f"run_dir={tmp_path / 'whole'}") == 0
    assert_same(tmp_path / "killed", tmp_path / "whole")
