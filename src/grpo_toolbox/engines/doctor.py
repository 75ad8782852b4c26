"""The gap between an engine's log-probs and the trainer's with equal weights, and what it is made of.

Mean |Δ log-prob| is taken apart from the outside in: tokens that are read otherwise than they were sent, a sampling
convention that the trainer does not mean, a precision that explains part of it; what is left is the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.probe import FLOOR_MEAN, Expected, Gap, Reading, Row, Target
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import Prompt, Rollout, Sampling


@dataclass(frozen=True)
class Line:
    """One row of the report."""

    what: str
    measured: str
    verdict: bool | None
    """None: a measurement, and no more."""
    meaning: str = ""


@dataclass(frozen=True)
class Drawn:
    """Rollouts under the run's sampling, against the trainer at its temperature and at temperature 1."""

    tempered: Gap
    raw: Gap
    ess: float
    """Effective share of the sample, by the trainer's log-probs at the sampling temperature."""

    @property
    def convention(self) -> str:
        """Of which distribution the reported log-probs are, by which is nearer."""
        return "raw" if self.raw.mean < self.tempered.mean else "tempered"


def draw(engine: Engine, rows: Sequence[Row], teacher: Teacher, sampling: Sampling, group_size: int) -> Drawn:
    """Sample groups behind the rows and compare what is reported with the trainer's log-probs."""
    prompts = [Prompt(index, "", row) for index, row in enumerate(rows)]
    rollouts = engine.generate(prompts, group_size, sampling)
    temperature = sampling.temperature or 1.0
    tempered, raw = (_differences(rollouts, teacher, at) for at in (temperature, 1.0))
    weights = torch.cat(tempered).double().neg().exp()  # π_trainer / π_sampler
    ess = float(weights.sum().square() / (len(weights) * weights.square().sum()))
    return Drawn(Gap.of(tempered), Gap.of(raw), ess)


def examine(target: Target, rows: Sequence[Row], teacher: Teacher) -> list[Line]:
    """Take a target's gap apart."""
    reading, again = target.read(rows), target.read(rows)
    if reading is None or again is None:
        raise EngineError(f"{target.name} went away while it was asked.")
    now = teacher.next_logps(rows)
    expected = Expected(now, half=teacher.next_half_logps(rows))
    drawn = Gap.of(_of_reading(reading, rows, teacher))
    lines = [_tokens_line(reading, rows)]
    if reading.scored is None or again.scored is None:
        return [*lines, Line("gap", f"drawn tokens: {drawn}", None, "the engine cannot score given tokens")]
    scored, repeated = Gap.of_scores(reading.scored, now), _between(reading, again)
    half = Gap.of_scores(reading.scored, expected.half) if expected.half is not None else scored
    precision = max(scored.mean - half.mean, 0.0)
    kernel = scored.mean - precision
    lines += [
        Line("gap", f"scored tokens: {scored}; drawn ones: {drawn}", scored.within(expected.half_gap().limit())),
        Line("of it, precision", f"{precision:.2g}", None, f"against the trainer in bfloat16: {half}"),
        Line("of it, kernels", f"{kernel:.2g}", None, "what no other cause explains: order of sums, other kernels"),
        Line("asked twice", f"{repeated}", None, "how far the engine is from itself"),
    ]
    return lines


def convention_line(drawn: Drawn, temperature: float) -> Line:
    """Say of which distribution the log-probs are that rollouts bring."""
    if temperature in (0.0, 1.0):
        return Line("sampling convention", f"temperature {temperature:g}: raw and tempered are one", True)
    wrong = drawn.tempered.mean - min(drawn.tempered.mean, drawn.raw.mean)
    told = f"{drawn.convention} (at {temperature:g}: {drawn.tempered}; at 1: {drawn.raw})"
    meaning = f"{wrong:.2g} of the gap: let the server report log-probs after the temperature" if wrong else ""
    return Line("sampling convention", told, wrong <= FLOOR_MEAN, meaning)


def _tokens_line(reading: Reading, rows: Sequence[Row]) -> Line:
    if reading.seen is None:
        return Line("template", "token ids are sent; the engine does not say what it read", None)
    same = list(reading.seen) == list(rows)
    told = "read as sent" if same else f"{len(reading.seen[0])} tokens read of {len(rows[0])} sent"
    return Line("template", told, same, "" if same else "a template or a start token is put around what is sent")


def _differences(rollouts: Sequence[Rollout], teacher: Teacher, temperature: float) -> list[Tensor]:
    rows = [(*one.prompt.ids, *one.ids) for one in rollouts]
    ours = teacher.logps(rows, [len(one.prompt.ids) for one in rollouts], temperature=temperature)
    return [torch.tensor(one.logps) - logps for one, logps in zip(rollouts, ours, strict=True)]


def _of_reading(reading: Reading, rows: Sequence[Row], teacher: Teacher) -> list[Tensor]:
    whole = [(*row, *ids) for row, (ids, _) in zip(rows, reading.drawn, strict=True)]
    ours = teacher.logps(whole, [len(row) for row in rows])
    return [torch.tensor(logps) - one for (_, logps), one in zip(reading.drawn, ours, strict=True)]


def _between(reading: Reading, again: Reading) -> Gap:
    pairs = zip(reading.scored or (), again.scored or (), strict=True)
    shared = [[one[token] - two[token] for token in one if token in two] for one, two in pairs]
    return Gap.of([torch.tensor(differences) for differences in shared])
