"""Keep a run's learning curve: a small jsonl and a PNG out of its metrics.jsonl.

    python benchmarks/draw_curve.py runs/<name> docs/benchmarks/<name>

Needs the `plot` extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KEPT = ("reward_mean", "eval/reward", "eval/pass@1", "entropy", "completion_tokens", "grad_norm", "time/step")


def main(run_dir: str, target: str) -> None:
    """Write `<target>.jsonl` and `<target>.png`."""
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = 0.0
    curve = []
    for row in rows:
        seconds += row.get("time/step") or 0.0
        kept = {key: round(row[key], 4) for key in KEPT if row.get(key) is not None}
        curve.append({"step": row["step"], "seconds": round(seconds, 1)} | kept)
    Path(f"{target}.jsonl").write_text("".join(json.dumps(point) + "\n" for point in curve), encoding="utf-8")
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    trained = [point for point in curve if "reward_mean" in point]
    evaluated = [point for point in curve if "eval/reward" in point]
    axes.plot(
        [point["step"] for point in trained],
        [point["reward_mean"] for point in trained],
        color="#9db4c8",
        label="training reward, sampled at temperature 1",
    )
    axes.plot(
        [point["step"] for point in evaluated],
        [point["eval/reward"] for point in evaluated],
        color="#b3402a",
        marker="o",
        label="held-out accuracy, greedy",
    )
    axes.set(xlabel="optimizer step", ylim=(0, 1), title=Path(target).name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(f"{target}.png", dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
