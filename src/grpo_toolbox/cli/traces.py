"""`toolbox traces`: what the rollouts of a run say, as tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError, DataError

if TYPE_CHECKING:  # `--help` does not wait for rich
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises DataError where there are no traces."""
    args = _parser().parse_args(argv)
    if args.prompts < 1:
        raise ConfigError(f"--prompts {args.prompts} is not an option: it takes a whole number of at least 1.")
    if args.rescore:
        return _rescore(find_actions(args.path), args)
    from grpo_toolbox.callbacks.trace_summary import summarise

    summary = summarise(find_actions(args.path), args.prompts, args.reward)
    if args.json:
        print(json.dumps(summary, ensure_ascii=False, indent=2))
    else:
        print_tables(summary)
    return 0


def _rescore(actions: Path, args: argparse.Namespace) -> int:
    from grpo_toolbox.cli.rescore import change_lines, example_table, named_reward, rescore, run_config

    if args.reward is not None:
        raise ConfigError(f"--reward {args.reward} goes without --rescore: reward=… stands behind --rescore.")
    report = rescore(actions, named_reward(args.rescore, run_config(actions)), args.prompts)
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
        return 0
    console = _console()
    for line in change_lines(report):
        console.print(line, soft_wrap=True, markup=False)
    if report["examples"]:
        console.print()
        console.print(example_table(report))
    return 0


def find_actions(path: Path) -> Path:
    """Return the actions.jsonl that `path` names: the file, its folder, or the run folder. Raises DataError."""
    for candidate in (path, path / "actions.jsonl", path / "traces" / "actions.jsonl"):
        if candidate.is_file():
            return candidate
    what = "holds no actions.jsonl" if path.exists() else "does not exist"
    raise DataError(f"{path} {what}: give runs/<name>/traces of a run trained with callbacks.trace_rollouts.every=1.")


def print_tables(summary: Mapping[str, Any]) -> None:
    """Print a summary (see `summarise`) as tables, a hundred columns wide where stdout is not a terminal."""
    console = _console()
    for line in _overview(summary):
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    console.print(_rewards(summary))
    console.print(_lengths(summary))
    title = "prompts, hardest first" if not summary["easiest"] else "hardest prompts"
    console.print(_prompts(title, summary["hardest"]))
    if summary["easiest"]:
        console.print(_prompts("easiest prompts", summary["easiest"]))
    if summary["repeats"]["texts"]:
        console.print(_repeats(summary))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)
    return console


def _overview(summary: Mapping[str, Any]) -> list[str]:
    lines = [
        summary["path"],
        f"{summary['rollouts']:,} rollouts of {summary['prompts']:,} prompts in {summary['steps']:,} steps "
        f"({summary['first_step']} to {summary['last_step']}): {_share(summary['correct'])} correct, "
        f"{_share(summary['truncated'])} cut off, {_share(summary['repeats']['share'])} repeated within their group",
    ]
    if summary["unreadable_lines"]:
        lines.append(
            f"left out: {summary['unreadable_lines']} unreadable line(s), such as a last one cut off by a kill"
        )
    return lines


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True, min_width=max(len(column), 6))
    return table


def _rewards(summary: Mapping[str, Any]) -> Table:
    table = _table("rewards", "reward", "first fifth", "last fifth", "not applicable")
    for name, row in summary["rewards"].items():
        table.add_row(_cell(name), _number(row["first"]), _number(row["last"]), _share(row["null"]))
    return table


def _lengths(summary: Mapping[str, Any]) -> Table:
    table = _table("length in tokens", "completions", "first fifth", "last fifth")
    for label, row in summary["length"].items():
        table.add_row(label, _number(row["first"], 1), _number(row["last"], 1))
    return table


def _prompts(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(title, "id", "solved", "first -> last seen", "attempts", "tokens")
    table.add_column("prompt", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        change = f"{_share(row['first'])} -> {_share(row['last'])}"
        numbers = (_share(row["solve_rate"]), change, str(row["attempts"]), _number(row["mean_tokens"], 1))
        table.add_row(str(row["prompt_id"]), *numbers, _cell(row["prompt"]))
    return table


def _repeats(summary: Mapping[str, Any]) -> Table:
    table = _table("most repeated completions", "times", "correct")
    table.add_column("completion", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in summary["repeats"]["texts"]:
        table.add_row(str(row["count"]), _share(row["correct"]), _cell(row["text"]))
    return table


def _cell(text: str) -> Text:
    """Return the text as it stands (no markup), on one line."""
    from rich.text import Text

    from grpo_toolbox.callbacks.screen import one_line

    return Text(one_line(text) or "(empty)")


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolbox traces",
        description="Summarise the rollouts of a run: rewards, lengths, prompts by difficulty, repeats.",
    )
    parser.add_argument("path", type=Path, help="runs/<name>/traces, the run folder, or an actions.jsonl")
    parser.add_argument(
        "--prompts", type=int, default=5, metavar="N", help="prompts shown at each end, or examples (default: 5)"
    )
    parser.add_argument(
        "--reward", metavar="NAME", help="component whose value >= 1 means correct (default: the first)"
    )
    parser.add_argument(
        "--rescore",
        nargs="+",
        metavar="reward=…",
        help="score the rollouts again with reward=<name> reward.<key>=<value> (without a name: the run's reward with"
        " other keys) and show what would have changed: rewards, signs of advantages, groups with a spread",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser
