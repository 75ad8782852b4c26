"""The single-file example as a module, for the tests of it."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[1] / "examples" / "grpo_from_scratch.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_from_scratch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scratch = _load()


def settings_of(**changes: object) -> Namespace:
    """The tiny task's settings, with some of them changed."""
    return Namespace(**scratch.TINY | changes)
