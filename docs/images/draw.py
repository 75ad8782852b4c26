"""Draw a finished run: python docs/images/draw.py runs/<name> SECONDS PICTURE.svg, the seconds of its own summary."""

import json
import re
import sys
from io import StringIO
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from grpo_toolbox.callbacks.progress import Progress, Sample
from grpo_toolbox.callbacks.screen import closing_lines, headline, live_panel
from grpo_toolbox.types import RunInfo, Step

run_dir, total, picture = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
config = yaml.safe_load((run_dir / "config.yaml").read_text())
metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
pace = total / sum(line.get("time/step", 0.0) for line in metrics)
shown = next(line["step"] for line in metrics if line.get("reward_mean", 0.0) > 0.75)

console = Console(record=True, width=100, file=StringIO(), highlight=False)
console.print(Text.assemble(("$ ", "dim"), "toolbox train"))
progress, seconds = Progress(RunInfo(config["name"], run_dir, config["trainer"]["max_steps"], 1, config), now=0.0), 0.0
for line in metrics:
    seconds += pace * line.get("time/step", 0.0)
    progress.add(Step(line["step"], line), seconds)
    if line["step"] == shown:
        with (run_dir / "traces" / "actions.jsonl").open() as file:
            one = next(action for action in map(json.loads, file) if action["step"] == shown)
        progress.sample = Sample(*(one[f] for f in ("step", "prompt", "completion", "finish_reason", "reward")))
        console.print(live_panel(progress, seconds, console.width))
console.print(Text(f"\n{headline(progress, {'seconds': seconds})}", style="bold"))
for label, value in closing_lines(progress, {}, ["toolbox", "train"]):
    console.print(Text.assemble((f"  {label:<12}", "dim"), value))
console.print()
svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="toolbox train"), flags=re.DOTALL)
picture.write_text(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"))  # the reader's fonts; none is fetched
