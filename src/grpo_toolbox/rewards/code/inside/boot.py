"""The first program in a sandbox: it takes the harness from its standard input and starts it.

It is run as text, `python -c <this file> [plan]`, so the harness need not lie anywhere that the sandbox sees.
"""

from __future__ import annotations

import marshal
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PACKAGE = "grpo_toolbox.rewards.code.inside"


class Harness:
    """Finds and loads the modules of the harness: code of this interpreter, or source for any."""

    def __init__(self, modules: dict[str, bytes | str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """What the import system asks first."""
        if name.rpartition(".")[0] != PACKAGE or name.rpartition(".")[2] not in self.modules:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """Leave the making of the module to the import system."""

    def exec_module(self, module: Any) -> None:
        """Run a module of the harness."""
        held = self.modules[module.__name__.rpartition(".")[2]]
        code = (
            marshal.loads(held)
            if isinstance(held, bytes)
            else compile(held, module.__name__, "exec", dont_inherit=True)
        )
        exec(code, module.__dict__)


def read_exactly(size: int) -> bytes:
    """The next `size` bytes of standard input, without a byte of what follows."""
    pieces = []
    while size and (piece := os.read(0, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def go_first() -> None:
    """Where this machine's memory runs out, have the kernel take it from here and not from the run."""
    try:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    except OSError:  # a sandbox that shows no /proc
        pass


def start() -> None:
    """Read the harness, confine this process where a plan says how, and obey the judge."""
    go_first()
    parts = PACKAGE.split(".")
    for end in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = []
        sys.modules[package.__name__] = package
    modules = marshal.loads(read_exactly(int(read_exactly(10))))
    sys.meta_path.insert(0, Harness(modules))
    plan = sys.argv[1:]
    sys.argv[:] = ["solution.py"]
    if plan:
        from grpo_toolbox.rewards.code.inside.namespaces import confine

        confine(eval(plan[0]))
    from grpo_toolbox.rewards.code.inside.worker import main

    main()


if __name__ == "__main__":
    start()
