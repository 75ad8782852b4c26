"""`toolbox memory export`: the completions that memory_writer kept, as rows for supervised fine-tuning."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_toolbox.callbacks.memory_writer import export_sft


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises DataError where the run kept no completions."""
    args = _parser().parse_args(argv)
    store = args.run / "memory.sqlite" if args.run.is_dir() else args.run
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in export_sft(store)]
    if str(args.out) == "-":
        sys.stdout.writelines(lines)
        return 0
    out = args.out or store.with_name("sft.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)
    print(f"{len(lines)} verified completions -> {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolbox memory",
        description="Work with the best verified completions that a run kept (callback memory_writer).",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    export = commands.add_parser(
        "export",
        help="write the completions as rows for supervised fine-tuning",
        description="Write one JSON line per completion: prompt and completion, or messages for conversations.",
    )
    export.add_argument("run", type=Path, help="run folder (runs/<name>), or the SQLite file itself")
    export.add_argument("--out", type=Path, metavar="FILE", help="default: sft.jsonl beside the store; - for stdout")
    return parser
