"""`toolbox verify [group=option] [key=value] …`: the checks of `verify.py` on what `toolbox train` would train."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.cli.train import run_composed

if TYPE_CHECKING:  # `--help` waits for neither OmegaConf nor torch nor rich
    from rich.console import Console

    from grpo_toolbox.config.schema import RunConfig
    from grpo_toolbox.verify import Finding

_USAGE = """\
usage: toolbox verify [group=option …] [key=value …] [--config-dir DIR]

Composes a run exactly as `toolbox train` does and checks it before the first step: a few completions are sampled, the
gradient of one update is taken in several ways that must agree, log-probs are compared with a plain Hugging Face
forward and with the engine's, and the grader is shown right and wrong answers. Nothing is trained or written.

Prints a table: check, what must hold, what was measured (and what is allowed), verdict; below it what a failure means.
Exits with 1 if a check fails. Limits are those of rounding: 1e-3 for gradients and log-probs in float32, 5e-2 and 0.3
in half precision.

`toolbox train --help` lists groups and keys. `resume=runs/<name>` takes that run's settings, at its start.

examples
  toolbox verify experiment=grpo_smollm
  toolbox verify model.path=/models/mine data=file data.path=problems.jsonl reward.extract=boxed"""

_VERDICTS = {True: "[green]ok[/green]", False: "[bold red]FAILED[/bold red]", None: "[dim]skipped[/dim]"}
WIDTH = 140
"""Columns of the table where stdout is not a terminal."""


def run(argv: Sequence[str]) -> int:
    """Compose, build and check; returns 0, or 1 where a check fails."""
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    return run_composed("verify", argv, _verify)


def _verify(checked: tuple[RunConfig, dict[str, Any]]) -> int:
    from grpo_toolbox.config.inputs import check_inputs

    config, plain = checked
    config = dataclasses.replace(config, callbacks={})
    inputs = check_inputs(config)
    from grpo_toolbox.config.build import build_run
    from grpo_toolbox.types import RunInfo
    from grpo_toolbox.verify import verify

    info = RunInfo(config.name, Path(config.run_dir or config.name), config.trainer.max_steps, 1, plain)
    console = _console()
    with console.status("loading the model") as status:  # shown on a terminal alone
        made = build_run(config, inputs, info)
        findings = verify(made, lambda name: status.update(f"checking: {name}"))
    print_findings(console, findings)
    return int(any(finding.passed is False for finding in findings))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings as a table, what each failure means, and how many there are."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from grpo_toolbox.verify import claim

    table = Table(box=box.SIMPLE_HEAD, show_lines=False)
    for column in ("check", "what must hold", "measured (allowed)", "verdict"):
        table.add_column(column, no_wrap=column in ("check", "verdict"), overflow="fold")
    for finding in findings:
        measured = f"{finding.measured} ({finding.allowed})" if finding.allowed else finding.measured
        texts = [escape(text) for text in (finding.name, claim(finding.name), measured)]
        table.add_row(*texts, _VERDICTS[finding.passed])
    console.print(table)
    failed = [finding for finding in findings if finding.passed is False]
    for finding in failed:
        console.print(f"[bold red]{escape(finding.name)}[/bold red]: {escape(finding.meaning)}")
    said = f"{len(findings)} checks, {len(failed)} failed"
    said += f": {', '.join(finding.name for finding in failed)}" if failed else ""
    console.print(escape(said), soft_wrap=True)
