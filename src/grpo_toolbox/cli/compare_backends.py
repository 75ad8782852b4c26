"""`toolbox compare-backends [group=option] [key=value] …`: one config on the toolbox's trainer and on TRL's."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.backends.compare import BACKENDS, Row, compare, read_side
from grpo_toolbox.cli.train import run_composed
from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:
    from grpo_toolbox.config.schema import RunConfig

_USAGE = """\
usage: toolbox compare-backends [group=option …] [key=value …] [run_dir=DIR] [--config-dir DIR]

Trains the run that `toolbox train` would compose twice, one after the other, each in a process of its own: with the
toolbox's trainer, and with the installed TRL (pip install "grpo-toolbox[trl]"). Both see the same prompts in the same
order, the same reward, model, optimizer and learning rates; completions are drawn by each on its own. A key that TRL
cannot do is refused before anything is trained.

Prints reward curves, seconds and peak memory side by side, and writes them to DIR/comparison.json; the runs stand in
DIR/toolbox and DIR/trl. DIR is runs/compare-<date> where run_dir is not set.

examples
  toolbox compare-backends experiment=grpo_tiny trainer.max_steps=100
  toolbox compare-backends experiment=grpo_tiny method=rloo trainer.max_steps=100"""


def run(argv: Sequence[str]) -> int:
    """Check the config for both, train with both, print the comparison; returns the code of a run that failed."""
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    words, folder = _split(argv)
    code = run_composed("compare-backends", [*words, "trainer.name=trl"], _check)
    if code:
        return code
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"run_dir={folder} is not empty: choose another folder for the two runs.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in BACKENDS:
        print(f"trainer.name={name}", flush=True)
        code = _train(name, words, folder)
        if code:
            print(f"toolbox compare-backends: trainer.name={name} ended with {code}.", file=sys.stderr)
            return code
    rows = compare([read_side(folder / name, folder / f"{name}.json") for name in BACKENDS])
    table = {"backends": BACKENDS, "rows": [asdict(row) for row in rows]}
    (folder / "comparison.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    _print(rows)
    print(f"\nruns and comparison.json in {folder}")
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], Path]:
    """Return the words that both runs are composed of, and the folder of the runs."""
    words, folder = [], Path("runs") / f"compare-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for word in argv:
        key, _, value = word.partition("=")
        if key in ("-m", "--multirun", "resume", "trainer.resume"):
            raise ConfigError(f"{word}: toolbox compare-backends trains two new runs of one config. Leave it out.")
        if key == "run_dir":
            folder = Path(value.strip("'\"")).expanduser()
        elif word == "trainer.algorithm=rloo":
            words.append("method=rloo")  # what it means on TRL; the toolbox composes it
        elif key not in ("trainer.name", "trainer.algorithm"):
            words.append(word)
    return words, folder


def _check(checked: tuple[RunConfig, dict[str, Any]]) -> int:
    from grpo_toolbox.backends.trl_config import check_trl
    from grpo_toolbox.config.inputs import check_inputs

    check_trl(checked[0])
    check_inputs(checked[0])
    return 0


def _train(name: str, words: Sequence[str], folder: Path) -> int:
    command = [sys.executable, "-m", "grpo_toolbox.cli.measured", str(folder / f"{name}.json"), "train", *words]
    child = subprocess.Popen([*command, f"trainer.name={name}", f"run_dir={folder / name}"])
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the terminal has told the run, too, which saves what it has
            continue


def _print(rows: Sequence[Row]) -> None:
    width = max(len(row.label) for row in rows)
    print(f"\n{'':<{width}}" + "".join(f"{name:>12}" for name in BACKENDS))
    for row in rows:
        shown = ["-" if value is None else f"{value:,.{row.digits}f}" for value in row.values]
        print(f"{row.label:<{width}}" + "".join(f"{value:>12}" for value in shown))
