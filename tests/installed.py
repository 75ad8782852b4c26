"""Environments of their own for the tests, with the packages of this one beneath what they install themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from venv import EnvBuilder


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment in `folder`, install `packages` into it without their dependencies; return its Python.

    Whatever it does not have itself it finds in the environment of the tests: nothing is downloaded twice. So it does
    not show that the dependencies of a package are complete.
    """
    EnvBuilder(with_pip=False).create(folder)
    python = folder / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
    return python


def run(program: Path, *words: str, cwd: Path | None = None, **variables: str) -> str:
    """Run a program of an environment without this checkout on its path; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *words], capture_output=True, text=True, cwd=cwd, env=inherited | variables, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
