"""The first steps of grpo_tiny against numbers on file: whatever changes training by accident shows here."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_toolbox.trainer import train
from toolbox_runs import built_run, metrics, one_thread

GOLDEN = Path(__file__).parent / "golden" / "grpo_tiny.json"
NAMES = ("reward_mean", "loss", "kl", "entropy", "grad_norm", "completion_tokens")
STEPS = 5


def first_steps(run_dir: Path) -> list[dict[str, float]]:
    """Train as `toolbox train experiment=grpo_tiny` does, and stop after five steps."""
    run = built_run("experiment=grpo_tiny", "callbacks=none", f"run_dir={run_dir}")
    run.info = replace(run.info, max_steps=STEPS)
    with one_thread():
        train(run)
    return [{name: line[name] for name in NAMES} for line in metrics(run_dir)]


def test_the_first_five_steps_are_those_on_file(tmp_path: Path) -> None:
    """A change that means to move these numbers writes them anew and says why: `python tests/test_golden.py`.

    Other sums of the same terms (padded rows, other micro-batches, another processor) move them by up to 6e-6 of their
    size; 1e-3 leaves room for that and for nothing else. The first rollouts come from untrained weights, so
    their numbers are exact. The loss of step 1 is 0 up to rounding.
    """
    golden = json.loads(GOLDEN.read_text())
    steps = first_steps(tmp_path / "run")
    for name in ("reward_mean", "completion_tokens"):
        assert steps[0][name] == golden[0][name]
    assert steps == [pytest.approx(line, rel=1e-3, abs=1e-6) for line in golden]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines = first_steps(Path(folder) / "run")
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(lines, indent=1) + "\n")
    sys.stdout.write(GOLDEN.read_text())
