"""`toolbox doctor --engine`: the gap with equal weights, and what it is made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from grpo_toolbox.cli.main import main
from grpo_toolbox.engines.doctor import Drawn, convention_line, draw, examine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.engines.probe import Gap
from grpo_toolbox.engines.teacher import Teacher
from grpo_toolbox.types import Sampling
from small_models import build
from test_probe import ROWS, Copy, nudge


def report(server: Copy, policy: Any) -> dict[str, Any]:
    return {line.what: line for line in examine(server, ROWS, Teacher(policy, packed=True))}


def test_equal_weights_in_equal_precision_are_right() -> None:
    policy = build("llama")
    lines = report(Copy(copy.deepcopy(policy)), policy)
    assert [lines[name].verdict for name in ("template", "gap")] == [True, True]
    assert float(lines["of it, kernels"].measured) < 1e-5
    assert float(lines["of it, precision"].measured) < 1e-5


def test_half_precision_is_called_so() -> None:
    policy = build("llama")
    server = Copy(copy.deepcopy(policy))
    server.half = True
    lines = report(server, policy)
    assert lines["gap"].verdict is True  # what bfloat16 explains
    precision, kernels = (float(lines[f"of it, {name}"].measured) for name in ("precision", "kernels"))
    assert precision > 100 * kernels


def test_other_weights_are_not_right() -> None:
    policy = build("llama")
    server = Copy(copy.deepcopy(policy))
    nudge(server.model)
    assert report(server, policy)["gap"].verdict is False


def test_a_template_around_the_tokens_is_seen() -> None:
    policy = build("llama")
    server = Copy(copy.deepcopy(policy))
    server.seen = [(0, *row) for row in ROWS]
    line = report(server, policy)["template"]
    assert (line.verdict, line.measured) == (False, "41 tokens read of 40 sent")


class Untempered(LocalEngine):
    """Reports log-probs of temperature 1 whatever it draws at."""

    def generate(self, prompts: Any, group_size: Any, sampling: Any, on_finished: Any = None) -> Any:
        from dataclasses import replace

        from small_models import forced_logps

        rollouts = super().generate(prompts, group_size, sampling)
        return [
            replace(one, logps=tuple(forced_logps(self._model, one.prompt.ids, one.ids).tolist())) for one in rollouts
        ]


@pytest.mark.parametrize(("kind", "right"), [(LocalEngine, True), (Untempered, False)])
def test_log_probs_of_another_temperature_are_a_convention(kind: Any, right: bool) -> None:
    policy = build("llama")
    engine = kind(policy, decode=lambda ids, finish: "", stop_ids=[1])
    drawn = draw(engine, ROWS, Teacher(policy, packed=True), Sampling(6, temperature=0.5), 4)
    line = convention_line(drawn, 0.5)
    assert line.verdict is right
    assert line.measured.startswith("tempered" if right else "raw")


def test_at_temperature_one_both_conventions_are_one() -> None:
    assert convention_line(Drawn(Gap(9.0, 9.0), Gap(0.0, 0.0), 1.0), 1.0).verdict is True


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "experiment=grpo_tiny", "rollout.temperature=0.7"]) == 0
    told = capsys.readouterr().out
    assert "tempered (at 0.7" in told
    assert "auto would take none" in told
    assert main(["doctor", "experiment=grpo_tiny"]) == 1
    assert "--engine" in capsys.readouterr().err
    assert torch.is_grad_enabled()
