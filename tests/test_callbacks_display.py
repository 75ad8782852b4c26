"""The display: what is drawn on a terminal, what goes into a pipe, and the summary."""

from __future__ import annotations

import io
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo_toolbox.callbacks.display import Display
from grpo_toolbox.callbacks.progress import Progress, before_after
from grpo_toolbox.callbacks.screen import (
    clock,
    counted,
    headline,
    live_panel,
    one_line,
    plain_line,
    resume_command,
    sparkline,
)
from grpo_toolbox.types import Prompt, Rollout, RunInfo, Scores, Step

METRICS = {
    "kl": 0.00123,
    "entropy": 0.5,
    "completion_tokens": 4.25,
    "completions/clipped_ratio": 0.02,
    "tokens_per_s": 12345.6,
    "time/rollout": 3.0,
    "time/update": 1.0,
}


def run_info(folder: Path = Path("runs/sums"), first_step: int = 1, max_steps: int = 20) -> RunInfo:
    return RunInfo("sums", folder, max_steps, first_step, {})


def make_step(number: int, reward: float, completion: str = "12", **more: float) -> Step:
    rollout = Rollout(Prompt(1, "5+7=", (1,)), (1, 2), (0.0, 0.0), "stop", completion)
    total = torch.tensor([[reward]])  # (1, 1)
    scores = Scores(("exact",), (1.0,), total[..., None], total)
    return Step(number, {"reward_mean": reward, **METRICS, **more}, [rollout], scores, total)


def drawn(progress: Progress, now: float, width: int = 100) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(live_panel(progress, now, width))
    return console.file.getvalue().splitlines()


def test_sparkline_spans_the_bars_between_low_and_high():
    # 8 bars: 0 is the lowest, 1 the full one; 0.5 * 7 = 3.5 rounds to bar 4 (half to even), the fifth
    assert sparkline([0.0, 0.5, 1.0, float("nan"), 2.0], 0.0, 1.0) == "▁▅█ █"
    assert sparkline([0.3, 0.3], 0.3, 0.3) == "▁▁"


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_before_and_after_are_means_of_the_first_and_last_twentieth():
    values = [0.0, 0.2, *[0.5] * 36, 0.8, 1.0]  # 40 values: two at each end
    assert before_after(values) == pytest.approx((0.1, 0.9))
    assert before_after([0.25, float("nan"), 0.75]) == (0.25, 0.75)
    assert before_after([0.5]) is None


def test_time_left_is_the_pace_times_the_steps_to_go():
    progress = Progress(run_info(max_steps=10), now=0.0)
    progress.add(Step(0, {"eval/reward": 0.1}), 100.0)  # the evaluation before training says nothing about the pace
    progress.add(make_step(1, 0.0), 105.0)
    assert progress.seconds_left(105.0) is None
    progress.add(make_step(2, 0.0), 107.0)
    progress.add(make_step(3, 0.0), 109.0)
    assert progress.seconds_left(109.0) == 14.0  # 2 s a step, 7 steps to go
    assert progress.seconds_left(110.5) == 12.5
    assert progress.seconds_left(999.0) == 0.0


def test_a_sample_stays_long_enough_to_be_read():
    progress = Progress(run_info(), now=0.0)
    for number, now in ((1, 1.0), (2, 2.0), (3, 4.5)):
        progress.add(make_step(number, 0.5, f"completion {number}"), now)
        assert progress.sample.completion == ("completion 3" if number == 3 else "completion 1")


def test_the_panel_shows_reward_pace_and_a_sample():
    progress = Progress(run_info(), now=0.0)
    for number in range(1, 11):
        progress.add(make_step(number, number / 10), number * 2.0)
    text = "\n".join(drawn(progress, 20.0))
    for part in ("sums", "step 10/20", "0:20 elapsed · 0:20 left", "reward 1.000  ▁▂▃▃▄▅▆▆▇█", "kl 0.0012"):
        assert part in text
    for part in ("length 4.2", "cut off 2%", "tokens/s 12,346", "rollout 75% · update 25%", "5+7=", "reward 0.9"):
        assert part in text


@pytest.mark.parametrize("width", [24, 40, 60, 100, 200])
def test_no_line_of_the_panel_is_wider_than_the_terminal(width):
    progress = Progress(run_info(), now=0.0)
    for number in range(1, 101):
        progress.add(make_step(number, number / 100, "because of this " * 300), number * 2.0)
    lines = drawn(progress, 300.0, width)
    assert {len(line) for line in lines} == {width}
    assert len(lines) < 22


def test_what_a_policy_samples_cannot_command_the_terminal():
    assert one_line("\x1b[2J one\ntwo\r\x07\ud83d ") == "·[2J one ⏎ two··· ".strip()


def test_plain_output_has_first_and_last_line_and_no_control_characters(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/toolbox", "train", "experiment=sums", f"run_dir={tmp_path}"])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    display = Display()
    display.on_start(run_info(tmp_path))
    display.on_step(Step(0, {"eval/reward": 0.125}))
    for number in range(1, 21):
        display.on_step(make_step(number, number / 20, **({"eval/reward": 0.75} if number == 20 else {})))
    display.on_end({"seconds": 12.34, "steps": 20.0, "interrupted": 0.0})
    out = capsys.readouterr().out
    assert all(c == "\n" or c.isprintable() for c in out)
    lines = out.splitlines()
    assert lines[0] == "sums: 20 steps"
    numbers = "kl 0.0012  entropy 0.50  length 4.2  tokens/s 12,346"
    assert [line for line in lines if line.startswith("step")] == [
        "step  0/20  eval 0.125",
        f"step  1/20  reward 0.050  {numbers}  eval 0.125",
        f"step 20/20  reward 1.000  {numbers}  eval 0.750",
    ]
    assert lines[lines.index("") + 1 :] == [
        "sums: finished 20 steps in 12.3 s",
        "  reward      0.050 -> 1.000",
        "  eval reward 0.125 -> 0.750",
        f"  metrics     {tmp_path}/metrics.jsonl",
        f"  checkpoints {tmp_path}/checkpoints",
        f"  next        toolbox train experiment=sums trainer.max_steps=40 resume={tmp_path}",
    ]


def test_an_interrupted_run_says_where_it_stopped_and_prints_its_last_step(tmp_path, capsys):
    display = Display(mode="plain")
    display.on_start(run_info(tmp_path))
    for number in range(1, 8):
        display.on_step(make_step(number, 0.5))
    display.on_end({"seconds": 75.0, "steps": 7.0, "interrupted": 1.0})
    out = capsys.readouterr().out
    assert "step  7/20" in out
    assert "sums: interrupted after step 7 of 20 in 1:15\n" in out


def test_a_run_that_fails_before_its_first_step_still_ends(tmp_path, capsys):
    display = Display(mode="plain")
    display.on_start(run_info(tmp_path))
    display.on_end({"seconds": 0.5, "steps": 0.0, "interrupted": 0.0})
    assert capsys.readouterr().out.splitlines()[-1] == "sums: stopped after step 0 of 20 in 0.5 s"


def test_a_resumed_run_knows_its_earlier_rewards(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/reward": 0.1}\n{"step": 1, "reward_mean": 0.2}\n{"step": 2, "reward_mean": null}\n'
    )
    progress = Progress(run_info(tmp_path, first_step=3), now=0.0)
    progress.add(make_step(3, 0.9), 1.0)
    assert (progress.rewards, progress.evals) == ([0.2, 0.9], [0.1])
    assert plain_line(progress, 1.0).startswith("step  3/20  reward 0.900")
    assert headline(progress, {"seconds": 4.0}) == "sums: stopped after step 3 of 20, the last 1 in 4.0 s"


def test_one_step_is_no_steps():
    assert (counted(1), counted(2)) == ("1 step", "2 steps")


def test_the_resume_command_repeats_the_overrides():
    argv = ["toolbox", "train", "experiment=x", "trainer.max_steps=9", "run_dir=old", "resume=old", "reward={name: a}"]
    kept = "toolbox train experiment=x trainer.max_steps=9 'reward={name: a}' resume=runs/a"
    assert resume_command(argv, "runs/a", None) == kept
    longer = "toolbox train experiment=x 'reward={name: a}' trainer.max_steps=18 'resume=runs/a b'"
    assert resume_command(argv, "runs/a b", 18) == longer
    assert resume_command(["pytest", "-q"], "runs/a", None) is None


def test_on_a_terminal_the_panel_is_drawn_and_cleared_and_the_cursor_comes_back(tmp_path, monkeypatch):
    master, slave = pty.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        while chunk := _read(master):
            chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with open(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        display = Display()
        display.on_start(run_info(tmp_path))
        display.on_step(make_step(1, 0.5, "\x1b]0;owned\x07 12"))
        display._live.refresh()
        display.on_end({"seconds": 1.0, "steps": 1.0, "interrupted": 0.0})
        monkeypatch.undo()
    reader.join(timeout=10)
    os.close(master)
    out = b"".join(chunks).decode()
    assert "step \x1b[1m1\x1b[0m/20" in out
    assert "\x1b]0" not in out
    assert out.index("\x1b[?25l") < out.index("\x1b[?25h") < out.index("stopped after step 1 of 20")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # a terminal without a writer ends in an I/O error, not in an empty read
        return b""
