"""The previous minor version of TRL, in an environment of its own: gradients and resuming hold there, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from installed import environment, run

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_backend_on_the_previous_version(tmp_path: Path) -> None:
    """Its loss is a Triton kernel; Triton's interpreter stands for the GPU."""
    pytest.importorskip("trl")
    python = environment(tmp_path, "trl==1.15.0", "triton")
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_trl_backend.py",
        "-k",
        "gradients or resumed or shared",
    )
    said = run(python, *words, cwd=ROOT, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT / "src"))
    assert " passed" in said
    assert run(python, "-c", "import trl; print(trl.__version__)").strip() == "1.15.0"
