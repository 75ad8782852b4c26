"""How a run looks: the live panel, the plain line, the summary. Pure functions from `Progress` to text."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_toolbox.callbacks.progress import Progress, Sample, before_after

BARS = "▁▂▃▄▅▆▇█"
TREND = 60
"""How many of the last steps the sparkline shows."""
PLAIN = ("kl", "entropy", "length", "held-out", "hacking", "tokens/s")
"""The numbers of a plain line, beside the reward."""


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return one bar per value between `low` (lowest bar) and `high` (full bar); a gap where it is not a number."""
    span = (high - low) or 1.0
    scaled = [round((v - low) / span * (len(BARS) - 1)) if math.isfinite(v) else None for v in values]
    return "".join(" " if s is None else BARS[min(max(s, 0), len(BARS) - 1)] for s in scaled)


def one_line(text: str) -> str:
    """Return the text on one line without anything that a terminal would obey: a policy may sample an escape code."""
    flat = text.strip().replace("\n", " ⏎ ")
    return "".join(c if c.isprintable() else "·" for c in flat)


def clock(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def counted(steps: int) -> str:
    """Return a number of steps in words."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def live_panel(progress: Progress, now: float, width: int) -> RenderableType:
    """Return the panel that a terminal of `width` columns shows while the run goes on."""
    parts: list[RenderableType] = [_bar(progress, now), Text(), _reward(progress, width)]
    parts += [_pairs(pairs) for pairs in _numbers(progress.metrics) if pairs]
    if progress.sample is not None:
        parts += [Text(), _sample(progress.sample, max(width - 16, 8))]
    title = Text(one_line(progress.run.name), style="bold")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def plain_line(progress: Progress, now: float) -> str:
    """Return the run's state as one line without control characters, for files and pipes."""
    total = str(progress.run.max_steps)
    pairs = [pair for row in _numbers(progress.metrics) for pair in row]
    shown = [f"step {progress.number:>{len(total)}}/{total}"]
    if "reward_mean" in progress.metrics:
        shown.append(f"reward {progress.metrics['reward_mean']:.3f}")
    shown += [f"{label} {value}".strip() for label, value in pairs if label in PLAIN]
    if progress.evals:
        shown.append(f"eval {progress.evals[-1]:.3f}")
    left = progress.seconds_left(now)
    if left is not None and progress.number < progress.run.max_steps:
        shown.append(f"{clock(left)} left")
    return "  ".join(shown)


def closing_lines(progress: Progress, ended: Mapping[str, float], argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the end as (label, value): what was reached, where the files are, what to do next.

    `argv` is the command line of this process; the command to go on with the run is made from it.
    """
    for label, values in (("reward", progress.rewards), ("eval reward", progress.evals)):
        if change := before_after(values):
            yield label, f"{change[0]:.3f} -> {change[1]:.3f}"
    if progress.number == 0:  # such a run leaves no folder behind
        return
    folder = progress.run.run_dir
    files = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "rollouts": "traces/actions.jsonl"}
    for label, name in {**files, "checkpoints": "checkpoints"}.items():
        if (folder / name).exists():
            yield label, _shown(folder / name)
    best = folder / "checkpoints" / f"step-{int(ended.get('best_step', 0)):08d}"
    if best.is_dir():
        yield "best", _shown(best)
    commands = list(_next_commands(progress, argv))
    for i, command in enumerate(commands):
        yield "" if i else "next", command


def headline(progress: Progress, ended: Mapping[str, float]) -> str:
    """Return the first line of the summary: the run's name and how it ended."""
    number, last = progress.number, progress.run.max_steps
    resumed_at = progress.run.first_step - 1
    part = f", the last {number - resumed_at}" if resumed_at else ""
    time = f"{part} in {_duration(ended['seconds'])}" if "seconds" in ended else ""
    if number >= last:
        return f"{progress.run.name}: finished {counted(last)}{time}"
    how = "interrupted" if ended.get("interrupted") else "stopped"
    return f"{progress.run.name}: {how} after step {number} of {last}{time}"


def resume_command(argv: Sequence[str], run_dir: str, more_steps: int | None) -> str | None:
    """Return the `toolbox train` line that goes on with this run, None when the run was not started by one.

    It repeats the overrides of `argv`; `more_steps` sets a higher trainer.max_steps, for a run that has finished.
    """
    if list(argv[1:2]) != ["train"]:
        return None
    replaced = ["run_dir", "resume", "trainer.resume"] + (["trainer.max_steps"] if more_steps else [])
    kept = [arg for arg in argv[2:] if arg.split("=")[0].lstrip("+") not in replaced]
    extra = [f"trainer.max_steps={more_steps}"] if more_steps else []
    return shlex.join(["toolbox", "train", *kept, *extra, f"resume={run_dir}"])


def _bar(progress: Progress, now: float) -> RenderableType:
    number, last = progress.number, progress.run.max_steps
    left = progress.seconds_left(now)
    times = f"{clock(now - progress.started)} elapsed" + (f" · {clock(left)} left" if left is not None else "")
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=last, completed=number, complete_style="cyan", finished_style="green")
    row.add_row(Text.assemble("step ", (f"{number}", "bold"), f"/{last}"), bar, Text(times))
    return row


def _reward(progress: Progress, width: int) -> Text:
    rewards = progress.rewards
    if not rewards:
        return Text("the first step is on its way", style="dim")
    recent = rewards[-min(TREND, max(width - 40, 8)) :]
    known = [r for r in rewards if math.isfinite(r)] or [0.0]
    line = Text.assemble(("reward ", "dim"), (f"{rewards[-1]:.3f}", "bold green"), "  ")
    line.append(sparkline(recent, min(known), max(known)), style="green")
    if progress.evals:
        line.append("  eval ", style="dim").append(f"{progress.evals[-1]:.3f}", style="bold")
    line.truncate(width - 4)
    return line


def _numbers(metrics: Mapping[str, float]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (label, value) pairs in two rows: what the policy does, and how fast."""
    formats = {
        "pass_rate": ("pass rate", "{:.0%}"),
        "kl": ("kl", "{:.4f}"),
        "entropy": ("entropy", "{:.2f}"),
        "completion_tokens": ("length", "{:.1f}"),
        "completions/clipped_ratio": ("cut off", "{:.0%}"),
        "grad_norm": ("grad norm", "{:.2f}"),
        "heldout/score": ("held-out", "{:.3f}"),
    }
    policy = [(label, form.format(metrics[name])) for name, (label, form) in formats.items() if name in metrics]
    if metrics.get("heldout/suspected"):
        policy.append(("hacking", "suspected"))
    speed = [("tokens/s", f"{metrics['tokens_per_s']:,.0f}")] if "tokens_per_s" in metrics else []
    times = {name: metrics[f"time/{name}"] for name in ("rollout", "reward", "update") if f"time/{name}" in metrics}
    whole = sum(times.values())
    if whole > 0:
        speed.append(("time", " · ".join(f"{name} {seconds / whole:.0%}" for name, seconds in times.items())))
    return policy, speed


def _pairs(pairs: Sequence[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for i, (label, value) in enumerate(pairs):
        line.append(f"   {label} " if i else f"{label} ", style="dim").append(value)
    return line


def _sample(sample: Sample, width: int) -> RenderableType:
    tone = "green" if sample.reward >= 1 else "yellow"
    cut = " · cut off" if sample.finish_reason == "length" else ""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("sample", Text.assemble(f"step {sample.step} · reward ", (f"{sample.reward:.3g}", tone), cut))
    table.add_row("prompt", Text(one_line(_clip(sample.prompt.strip(), 2 * width))))
    table.add_row("completion", Text(one_line(_clip(sample.completion.strip(), 4 * width)) or "(empty)", style=tone))
    return table


def _clip(text: str, limit: int) -> str:
    """Return at most `limit` characters: the beginning and, after an ellipsis, the end, where the answer stands."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]} … {text[-tail:]}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def _next_commands(progress: Progress, argv: Sequence[str]) -> Iterator[str]:
    folder = progress.run.run_dir
    if (folder / "traces" / "actions.jsonl").exists():
        yield shlex.join(["toolbox", "traces", _shown(folder)])
    if (folder / "memory.sqlite").exists():
        yield shlex.join(["toolbox", "memory", "export", _shown(folder)])
    if (folder / "checkpoints").exists():
        finished = progress.number >= progress.run.max_steps
        command = resume_command(argv, _shown(folder), 2 * progress.run.max_steps if finished else None)
        yield from [command] if command else []


def _shown(path: Path) -> str:
    """Return the path as a person in this folder would type it."""
    path = path.resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
