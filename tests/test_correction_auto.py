"""objective.correction=auto: what it takes for which gap, when it goes back, and that a run trains with it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from grpo_toolbox.controllers import CorrectionControl
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.objectives import build_objective
from grpo_toolbox.surrogates import clipped
from toolbox_runs import SMALL, built_run, metrics, toolbox_train

UP = [
    (0.0, 0.0, 1.0, "none"),
    (0.001, 0.1, 1.0, "none"),
    (0.0011, 0.1, 1.0, "token_truncate"),
    (0.0005, 0.2, 1.0, "token_truncate"),  # one token far off
    (0.02, 0.06, 0.999, "token_truncate"),  # bfloat16 beside float32
    (0.05, 3.0, 0.9, "token_truncate"),
    (0.051, 0.06, 1.0, "sequence_mask"),
    (0.02, 4.0, 0.89, "sequence_mask"),
]


@pytest.mark.parametrize(("mean", "largest", "ess", "taken"), UP)
def test_auto_takes_the_correction_that_the_gap_asks_for(mean: float, largest: float, ess: float, taken: str) -> None:
    control = CorrectionControl()
    control.observe(mean, largest, ess)
    assert control.value == taken


def test_it_goes_back_only_at_half_of_the_threshold() -> None:
    control = CorrectionControl("sequence_mask")
    seen = []
    for mean in (0.04, 0.026, 0.025, 0.0009, 0.00051, 0.0005):
        control.observe(mean, 0.0)
        seen.append(control.value)
    assert seen == ["sequence_mask", "sequence_mask", "token_truncate", "token_truncate", "token_truncate", "none"]


def test_it_says_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CorrectionControl().observe(0.02, 0.06, 0.999)
    assert "token_truncate in place of none" in caplog.text
    assert "0.02 on average and 0.06 at most" in caplog.text


def test_what_is_measured_where_the_draw_is_cut_does_not_move_it() -> None:
    control = CorrectionControl("token_truncate", fixed=True)
    control.observe(2.0, 9.0, 0.1)
    assert control.value == "token_truncate"


def test_its_choice_survives_a_checkpoint() -> None:
    control, again = CorrectionControl("sequence_mask"), CorrectionControl()
    again.load_state_dict(control.state_dict())
    assert (again.value, again.level) == ("sequence_mask", 2.0)


def test_bounds_belong_to_a_named_correction() -> None:
    with pytest.raises(ConfigError, match="belong to a named correction"):
        build_objective(clipped, clip_eps=0.2, correction="auto", correction_max=3.0)


def test_the_objective_of_a_step_has_the_choice_and_its_papers_bounds(tmp_path: Path) -> None:
    run = built_run(*SMALL, "objective.correction=auto", f"run_dir={tmp_path / 'run'}")
    assert run.controlled_objective().make_correction() is None
    run.observe({"sampler/logp_gap_mean": 0.2, "sampler/logp_gap_max": 1.0, "sampler/ess": 0.5}, completions=4)
    correction = run.controlled_objective().make_correction()
    assert correction is not None
    assert (correction.level, correction.drops, correction.high) == ("sequence", True, 3.0)
    assert run.controls()["correction"].state_dict() == {"value": "sequence_mask"}


def test_in_process_nothing_is_corrected(tmp_path: Path) -> None:
    auto, none = tmp_path / "auto", tmp_path / "none"
    for folder in (auto, none):
        arguments = (*SMALL, "trainer.max_steps=2", f"objective.correction={folder.name}", f"run_dir={folder}")
        assert toolbox_train(*arguments) == 0
    seen, plain = metrics(auto), metrics(none)
    assert [line.pop("sampler/correction") for line in seen] == [0.0, 0.0]
    assert seen == plain


def test_a_draw_that_is_cut_has_its_tokens_weighed_for_good(tmp_path: Path) -> None:
    run = built_run(*SMALL, "objective.correction=auto", "rollout.top_k=5", f"run_dir={tmp_path / 'run'}")
    assert run.correction_control == CorrectionControl("token_truncate", fixed=True)
