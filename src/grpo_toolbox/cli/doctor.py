"""`toolbox doctor --engine …`: how far a run's engine is from its trainer before training, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_toolbox.cli.train import run_composed
from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:  # `--help` waits for neither OmegaConf nor torch nor rich
    from grpo_toolbox.config.schema import RunConfig
    from grpo_toolbox.engines.doctor import Line as Row

_USAGE = """\
usage: toolbox doctor --engine [group=option …] [key=value …] [--config-dir DIR]

Composes a run exactly as `toolbox train` does, brings its engine the policy's weights, and measures the gap between
their log-probs: of canary prompts, and of completions drawn as in training. It says what the gap is made of (template,
sampling convention, precision, kernels) and what objective.correction=auto would take. Nothing is trained or written.

Exits with 1 where something is not as it must be. docs/engines.md explains the lines.

examples
  toolbox doctor --engine experiment=grpo_tiny
  toolbox doctor --engine experiment=grpo_smollm rollout.engine=vllm rollout.server.urls=http://127.0.0.1:8000"""

_VERDICTS = {True: "ok", False: "NOT RIGHT", None: ""}
_COMPLETIONS = 16
_LENGTH = 64


def run(argv: Sequence[str]) -> int:
    """Compose, build and measure; returns 0, or 1 where something is not right."""
    if "--help" in argv or "-h" in argv:
        print(_USAGE)
        return 0
    if "--engine" not in argv:
        raise ConfigError("say what to look at: toolbox doctor --engine experiment=… (--help says more).")
    return run_composed("doctor", [word for word in argv if word != "--engine"], _doctor)


def _doctor(checked: tuple[RunConfig, dict[str, Any]]) -> int:
    from grpo_toolbox.config.inputs import check_inputs

    config, plain = checked
    # the run's own probe would stop at what is to be explained here, and the background would sample meanwhile
    rollout = dataclasses.replace(
        config.rollout,
        probe=dataclasses.replace(config.rollout.probe, every=0),
        async_=dataclasses.replace(config.rollout.async_, enabled=False),
    )
    asked, config = config.rollout.probe, dataclasses.replace(config, callbacks={}, rollout=rollout)
    inputs = check_inputs(config)
    from grpo_toolbox.config.build import build_run
    from grpo_toolbox.types import RunInfo

    info = RunInfo(config.name, Path(config.run_dir or config.name), config.trainer.max_steps, 1, plain)
    made = build_run(config, inputs, info)
    try:
        made.engine.sync(0)
        lines, chosen = _examined(made, config, asked)
    finally:
        made.engine.close()
    for line in lines:
        print(f"{line.what:<22} {_VERDICTS[line.verdict]:<10} {line.measured}".rstrip())
        if line.meaning:
            print(f"{'':<33} {line.meaning}")
    print(f"{'objective.correction':<22} {'':<10} auto would take {chosen}")
    return int(any(line.verdict is False for line in lines))


def _examined(made: Any, config: RunConfig, asked: Any) -> tuple[list[Row], str]:
    from grpo_toolbox.config.watch import canaries, probe_targets
    from grpo_toolbox.controllers import CorrectionControl
    from grpo_toolbox.engines.doctor import Line, convention_line, draw, examine
    from grpo_toolbox.engines.teacher import Teacher
    from grpo_toolbox.models.forward import plain_model
    from grpo_toolbox.models.load import max_positions

    teacher = Teacher(made.policy, packed=made.settings.packed, autocast_dtype=made.settings.autocast)
    prompts = [prompt.ids for prompt in made.data.next(min(made.prompts_per_step, len(made.data)))]
    rows = canaries(asked, prompts, max_positions(plain_model(made.policy).config))
    lines: list[Row] = []
    for target in probe_targets(made.engine, config.rollout.server.request_timeout_s)():
        lines += [Line(target.name, "", None), *examine(target, rows, teacher)]
    sampling = dataclasses.replace(
        made.sampling, max_new_tokens=min(made.sampling.max_new_tokens, _LENGTH), min_new_tokens=0, drawn_logps=False
    )
    few = [row[: len(row) // 2] for row in rows]  # room for what is drawn
    drawn = draw(made.engine, few, teacher, sampling, max(_COMPLETIONS // len(rows), 1))
    lines.append(convention_line(drawn, sampling.temperature))
    control = CorrectionControl()
    control.observe(drawn.tempered.mean, drawn.tempered.max, drawn.ess)
    return lines, f"{control.value} (rollouts: {drawn.tempered}, effective sample {100 * drawn.ess:.1f} %)"
