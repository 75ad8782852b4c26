"""The package as users get it: built into a wheel, installed into another environment, run outside the checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from installed import environment, run

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "grpo_toolbox"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source)], check=True)
    (found,) = built.iterdir()
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("environment"), str(wheel))


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT / "src").as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert names == there
    assert "grpo_toolbox/py.typed" in names
    assert "grpo_toolbox/conf/experiment/grpo_tiny.yaml" in names


def test_its_metadata_names_the_command_the_licence_and_the_extras(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "toolbox = grpo_toolbox.cli.main:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    extras = re.findall(r"^Provides-Extra: (.*)$", texts["METADATA"], flags=re.MULTILINE)
    assert sorted(extras) == sorted(project["optional-dependencies"])


def test_toolbox_train_runs_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import grpo_toolbox; print(grpo_toolbox.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    toolbox = python.parent / "toolbox"
    said = run(toolbox, "train", "experiment=grpo_tiny", "trainer.max_steps=3", "run_dir=first", cwd=tmp_path)
    assert "finished 3 steps" in said
    assert (tmp_path / "first" / "checkpoints" / "step-00000003" / "model" / "model.safetensors").is_file()
    assert "rollouts" in run(toolbox, "traces", "first", cwd=tmp_path)


def test_the_example_runs_outside_the_checkout(python: Path, tmp_path: Path) -> None:
    example = (ROOT / "examples" / "train_grpo.py").read_text(encoding="utf-8")
    assert example.count("max_steps=300") == 1
    (tmp_path / "train_grpo.py").write_text(example.replace("max_steps=300", "max_steps=2"), encoding="utf-8")
    run(python, "train_grpo.py", cwd=tmp_path)
    assert (tmp_path / "runs" / "train_grpo" / "metrics.jsonl").read_text().count("\n") == 2


def test_a_plain_run_imports_nothing_that_only_an_extra_brings(python: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = set(map(_name, project["dependencies"]))
    extra = {_name(one) for listed in project["optional-dependencies"].values() for one in listed} - needed
    extra -= {"accelerate", "grpo-toolbox"}  # peft needs the one, dev names the other
    assert {"datasets", "trl", "wandb", "math-verify", "jsonschema"} <= extra
    modules = [top for top, owners in packages_distributions().items() if {_name(one) for one in owners} & extra]
    program = (
        "import sys; from grpo_toolbox.cli.main import main; "
        "code = main(['train', 'experiment=grpo_tiny', 'trainer.max_steps=1', 'run_dir=run']); "
        f"print(); print(code, sorted(set({modules}) & set(sys.modules)))"
    )
    assert run(python, "-c", program, cwd=tmp_path).splitlines()[-1] == "0 []"


def test_extras_stand_beside_hydra_in_this_very_environment() -> None:
    """Hydra pins antlr 4.9, for which math-verify has an extra; TRL and all but a GPU's stand here beside them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (own,) = (one for one in map(Requirement, extras["dev"]) if one.name == "grpo-toolbox")
    assert set(extras) - own.extras <= {"dev", "quant"}
    asked = [*project["dependencies"], *(one for name in own.extras for one in extras[name])]
    asked += [*(requires("hydra-core") or []), *(requires("latex2sympy2_extended") or [])]
    wanted = [
        one for one in map(Requirement, asked) if one.marker is None or one.marker.evaluate({"extra": "antlr4_9_3"})
    ]
    assert any(one.name == "antlr4-python3-runtime" and "4.9.3" in str(one.specifier) for one in wanted)
    unmet = [str(one) for one in wanted if not one.specifier.contains(version(one.name), prereleases=True)]
    assert unmet == []
    assert version("antlr4-python3-runtime") == "4.9.3"


def _name(requirement: str) -> str:
    """The distribution that a requirement asks for, as indexes compare names."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()
