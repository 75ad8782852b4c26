"""Who may know whom: imports go downwards, heavy packages stay in their rooms, methods are named in presets only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_toolbox
from grpo_toolbox.config.options import REGISTRIES
from grpo_toolbox.config.source import option_names, registry

ROOT = Path(grpo_toolbox.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

LAYERS = (
    ("types", "errors", "onednn", "gradients", "allocator"),
    ("ops", "plugins", "schedule", "interrupts", "metrics", "controllers", "clock", "staleness"),
    ("surrogates", "ratios", "selection", "advantages", "batch"),
    # models stand above batch: their forward pass takes one
    ("objectives", "rewards", "data", "models", "callbacks", "checkpoint"),
    ("engines", "critic", "mismatch"),
    ("rollout", "run", "meter"),
    ("update",),
    ("experience",),
    ("evaluation", "source"),
    ("trainer", "measure"),
    ("verify",),
    ("config",),
    ("api", "backends"),
    ("cli",),
)
"""From the bottom up. A room may import from the layers below it, never from its own layer or from above."""
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

ROOMS_OF = {
    "torch": None,  # checked below, by what importing a module loads
    "transformers": {"engines/hf.py", "models/attention.py", "backends/trl_steps.py"},
    "hydra": {"cli/overrides.py"},
    "omegaconf": {
        *("api/translate.py", "cli/overrides.py"),
        *("config/schema.py", "config/stages.py", "config/typed.py"),
    },
    "rich": {"callbacks/display.py", "callbacks/screen.py"},
    "safetensors": {"checkpoint.py"},
    "numpy": {"checkpoint.py", "engines/sampling.py"},
    "vllm": {"engines/sync/on_server/toolbox_vllm.py"},  # which runs in vLLM's environment
    "yaml": {"cli/overrides.py", "config/folder.py"},
}
"""Packages that may be imported at a module's top, and where; all others only inside the function that needs them."""

WITHOUT_TORCH = (
    *(
        "types",
        "errors",
        "plugins",
        "schedule",
        "interrupts",
        "data",
        "rewards",
        "callbacks",
        "models.paths",
        "models.lora",
    ),
    *("callbacks.display", "callbacks.memory_writer", "callbacks.trace_summary", "models.load"),
    *("config.schema", "config.source", "config.keys", "config.options", "config.check", "config.typed"),
    *("config.inputs", "config.folder", "config.fields", "api.configs", "api.translate"),
    *("engines.server",),
    *("cli.main", "cli.train", "cli.verify", "cli.doctor", "cli.traces", "cli.memory", "cli.models"),
    *("cli.reward", "cli.rescore", "cli.compare_backends", "backends.compare", "backends.trl_config"),
    *("cli.help", "cli.overrides", "cli.compose"),
)

METHODS = {name for group, place in REGISTRIES.items() for name in (*registry(*place), *option_names(group))}
METHODS |= {"grpo", "dapo", "ppo"}
BLIND = (
    *("trainer", "run", "update", "critic", "experience", "controllers", "batch", "rollout", "evaluation", "metrics"),
    *("checkpoint", "engines", "models", "data", "ops"),
)
"""Rooms that work the same whatever the method."""


def room(module: str) -> str:
    """The file or folder directly below the package that a module belongs to."""
    return module.removeprefix("grpo_toolbox").strip(".").partition(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def top_level(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: neither what stands in functions nor what only a type checker sees."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from imported(node)


@pytest.mark.parametrize("name", FILES)
def test_imports_go_downwards(name: str) -> None:
    here = name.removesuffix(".py").partition("/")[0]
    if here == "__init__" or here == "conf":
        return
    assert here in LEVEL, f"{here} stands on no layer: give it one"
    for module in imported(ast.parse(FILES[name].read_text())):
        if module.partition(".")[0] != "grpo_toolbox" or room(module) in ("", here):
            continue
        assert LEVEL[room(module)] < LEVEL[here], f"{name} imports {module}"


@pytest.mark.parametrize("name", FILES)
def test_heavy_packages_are_imported_at_the_top_in_their_rooms_only(name: str) -> None:
    for module in top_level(ast.parse(FILES[name].read_text())):
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names or package == "grpo_toolbox":
            continue
        assert package in ROOMS_OF, f"{name} imports {package} at its top: import it where it is needed"
        rooms = ROOMS_OF[package]
        assert rooms is None or name in rooms, f"{name} imports {package} at its top"


def test_what_the_command_line_checks_with_loads_no_torch() -> None:
    modules = "; ".join(f"import grpo_toolbox.{module}" for module in WITHOUT_TORCH)
    heavy = ("torch", "transformers", "peft", "datasets", "httpx", "reasoning_gym", "wandb", "trackio", "matplotlib")
    program = f"import sys; {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in FILES if name.removesuffix(".py").partition("/")[0] in BLIND])
def test_no_method_is_named_outside_its_registry_and_its_preset(name: str) -> None:
    code = re.sub(r"grpo[-_]toolbox", "", FILES[name].read_text(), flags=re.IGNORECASE)
    words = {word.lower() for word in re.findall(r"\w+", _without_docstrings(code))}
    plain_words = {"clipped", "constant"}  # names of surrogates that are also English
    assert words & METHODS - plain_words == set()


def _without_docstrings(code: str) -> str:
    """The code alone: a docstring may say where a formula comes from."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def test_the_run_config_is_seen_by_those_who_build_from_it_only() -> None:
    seen_by = {"config", "api", "backends", "cli"}
    for name, path in FILES.items():
        if name.removesuffix(".py").partition("/")[0] not in seen_by:
            assert "RunConfig" not in path.read_text(), name
