"""`toolbox reward check [group=option] [key=value] …`: a run's reward on trial, on the run's data, without a model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_toolbox.cli.train import run_composed
from grpo_toolbox.errors import ConfigError, suggest

if TYPE_CHECKING:  # `--help` waits for neither OmegaConf nor rich
    from rich.console import Console

    from grpo_toolbox.config.schema import RunConfig
    from grpo_toolbox.rewards.check import PartReport
    from grpo_toolbox.types import Prompt

_USAGE = """\
usage: toolbox reward check [group=option …] [key=value …] [--n ROWS] [--config-dir DIR]

Composes a run exactly as `toolbox train` does, reads its data, and shows its reward completions whose worth is known:
the rows' gold answers in the form that the reward reads, the same with another sign, digit, unit or form, other rows'
gold answers, nothing, the prompt itself, 10,000 characters; then the same from several threads. No model is loaded,
nothing is written.

Prints a table per part of the reward: what was tried, what must become of it, what did. Exits with 1 where wrong
answers are paid, right ones are not, a call fails or does not come back, or threads disturb each other; with examples.

  --n ROWS        rows tried, spread over the data (default: 200)

examples
  toolbox reward check experiment=grpo_smollm
  toolbox reward check data=file data.path=problems.jsonl reward=custom reward.name=my_module:my_fn --n 50"""

WIDTH = 120
"""Columns of the table where stdout is not a terminal."""
_MUST = {"accept": "accepted", "reject": "rejected", "reject most": "mostly rejected", "": "as its rules say"}


def run(argv: Sequence[str]) -> int:
    """Compose, read the data and try the reward; returns 0, 1 where something is wrong with it, 2 for no subcommand."""
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    if not argv or argv[0] != "check":
        said = f"{argv[0]!r} is not a subcommand: check.{suggest(argv[0], ['check'])}" if argv else "give one: check."
        print(f"toolbox reward: {said} See toolbox reward --help", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="toolbox reward check", add_help=False, allow_abbrev=False)
    parser.add_argument("--n", default="200")
    args, rest = parser.parse_known_args(argv[1:])
    if not args.n.isascii() or not args.n.isdigit() or int(args.n) < 2:
        raise ConfigError(f"--n {args.n} is not an option: it takes a whole number of at least 2.")
    return run_composed("reward check", rest, lambda checked: _check(checked, int(args.n)))


def _check(checked: tuple[RunConfig, dict[str, Any]], n: int) -> int:
    from grpo_toolbox.config.inputs import fitting_reward, read_data
    from grpo_toolbox.rewards.check import check_reward

    config, left_out = _without_models(checked[0])
    rows, eval_rows = read_data(config.data)
    reward = fitting_reward(config, [*rows, *eval_rows])
    prompts = _prompts(rows, n, config)
    console = _console()
    with console.status("trying the reward") as status:  # shown on a terminal alone
        reports = check_reward(reward, prompts, lambda name: status.update(f"trying: {name}"))
    for name in left_out:
        console.print(f"{name} loads a model and was left out", markup=False)
    print_reports(console, reports, f"{len(prompts)} of {len(rows)} rows")
    return int(any(report.problems for report in reports))


def _without_models(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Take the reward models out of a sum, and name them. ConfigError where nothing else is there."""
    options = dict(config.reward)
    if options["name"] == "reward_model":
        raise ConfigError("reward=reward_model is the score of a model: there is nothing to check without one.")
    if options["name"] != "weighted_sum":
        return config, []
    kept = [part for part in options["components"] if part["name"] != "reward_model"]
    dropped = ["reward_model"] * (len(options["components"]) - len(kept))
    if not kept:
        raise ConfigError("reward.components are all reward_model: there is nothing to check without a model.")
    return dataclasses.replace(config, reward={**options, "components": kept}), dropped


def _prompts(rows: Sequence[Mapping[str, Any]], n: int, config: RunConfig) -> list[Prompt]:
    """The prompts of `n` rows, spread over the data, as a run would hand them to the reward, but for the token ids."""
    from grpo_toolbox.data.encoding import conversation
    from grpo_toolbox.types import Prompt

    size = min(n, len(rows))
    chosen = [rows[index * len(rows) // size] for index in range(size)]
    return [
        Prompt(
            index,
            conversation(row["prompt"], config.data.chat, config.data.system_prompt),
            (),
            {name: value for name, value in row.items() if name != "prompt"},
        )
        for index, row in enumerate(chosen)
    ]


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def print_reports(console: Console, reports: Sequence[PartReport], tried: str) -> None:
    """Print what became of each part of a reward as a table, then the problems with examples, and their number."""
    for report in reports:
        _print_part(console, report)
    for report in reports:
        for problem in report.problems:
            console.print(f"{report.name}: {problem}", style="bold red", markup=False, soft_wrap=True)
            for one in report.examples.get(problem, []):
                said = f"  {_short(one.completion)} earned {one.score} for the prompt {_short(one.prompt)}"
                console.print(said, markup=False, soft_wrap=True)
    problems = sum(len(report.problems) for report in reports)
    named = ", ".join(report.name for report in reports if report.problems)
    ended = f"{problems} problem{'s' * (problems > 1)}: {named}" if problems else "nothing wrong was found"
    console.print(f"{tried}; {ended}", markup=False, soft_wrap=True)


def _print_part(console: Console, report: PartReport) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"{report.name}    columns: {report.columns}    threads: {report.threads}"
    if report.kinds:
        table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for place, column in enumerate(
            ("completions", "must be", "tried", "accepted", "rejected", "failed", "slowest call")
        ):
            table.add_column(column, justify="left" if place < 2 else "right", no_wrap=True)
        for kind in report.kinds:
            scored = max(1, kind.accepted + kind.rejected)
            shares = (f"{kind.accepted / scored:.1%}", f"{kind.rejected / scored:.1%}")
            if not kind.accepted + kind.rejected:
                shares = ("-", "-")  # not applicable to any row
            table.add_row(
                Text(kind.name), _MUST[kind.must], str(kind.rows), *shares, str(kind.failed), f"{kind.slowest:.3f} s"
            )
        console.print(table)
    else:
        console.print(title, style="bold", markup=False)
    for note in report.notes:
        console.print(f"  {note}", markup=False, soft_wrap=True)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}… ({len(text)} characters)"
