"""The previous minor version of TRL, in an environment of its own: gradients, resuming and learning hold there, too.

Its loss is a Triton kernel, without a way round it; Triton's interpreter stands for the GPU, 5 ms a token.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from installed import environment, run
from toolbox_runs import all_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TOOLBOX = ("-m", "grpo_toolbox.cli.main", "train", "experiment=grpo_tiny", "trainer.name=trl", "callbacks=none")
THIS = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
INTERPRETED = {**THIS, "TRITON_INTERPRET": "1"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    made = environment(tmp_path_factory.mktemp("previous"), "trl==1.15.0", "triton")
    assert run(made, "-c", "import trl; print(trl.__version__)").strip() == "1.15.0"
    return made


def test_gradients_and_resumed_runs(python: Path) -> None:
    chosen = ("tests/test_trl_backend.py", "-k", "gradients or resumed or share")
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=ROOT, **INTERPRETED)
    assert " passed" in said
    assert "skipped" not in said


def test_the_tiny_policy_learns(python: Path, tmp_path: Path) -> None:
    """The six additions of a sum of at most 2, in steps of 24 completions of at most two tokens."""
    words = ("data.path='builtin:additions?max_sum=2'", "rollout.prompts_per_step=3", "rollout.group_size=8")
    words += ("rollout.max_new_tokens=2", "trainer.lr=5e-3", "trainer.max_steps=50", "+callbacks.metrics_file={}")
    run(python, *TOOLBOX, *words, f"run_dir={tmp_path}", **INTERPRETED)
    rewards = [line["reward_mean"] for line in all_metrics(tmp_path)]
    assert len(rewards) == 50
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-10:]) / 10 > 0.8


def test_without_a_gpu_it_says_what_to_do(python: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | THIS
    command = [str(python), *TOOLBOX, "trainer.device=cpu", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 1
    assert "trl 1.15.0 computes its loss with Triton on a GPU, and this run is on cpu. Install trl 1.16" in done.stderr
    assert not (tmp_path / "run").exists()
