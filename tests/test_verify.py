"""`toolbox verify` passes on what is right, leaves no trace, and names the check that catches each of twenty bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import Result, toolbox
from grpo_toolbox import critic as critics
from grpo_toolbox import experience, objectives, update
from grpo_toolbox.batch import micro_batches
from grpo_toolbox.config import build
from grpo_toolbox.critic import Critic
from grpo_toolbox.measure import draw_sample
from grpo_toolbox.models import forward
from grpo_toolbox.models.forward import eval_mode
from grpo_toolbox.ops import Denominators
from grpo_toolbox.rewards import answers, exact, exact_match
from grpo_toolbox.rewards.component import Component
from grpo_toolbox.rewards.selftest import Trial, try_grader
from grpo_toolbox.run import Run
from grpo_toolbox.types import Prompt
from grpo_toolbox.verify import CHECKS, look, verify
from grpo_toolbox.verify import loss as losses
from grpo_toolbox.verify.finding import Finding
from toolbox_runs import SMALL, built_run, differences

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, Run], None]
WARM = "rollout.temperature=0.8"
"""At 1 a forgotten temperature is right."""


@pytest.fixture(autouse=True)
def wide_table_in_an_empty_folder(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr("grpo_toolbox.cli.verify.WIDTH", 400)  # one line per check
    monkeypatch.chdir(tmp_path)


def verified(*overrides: str) -> Result:
    return toolbox("verify", *SMALL, *overrides)


def failed(result: Result) -> set[str]:
    """The checks that the last line names as failed."""
    _, _, names = result.out.splitlines()[-1].partition("failed: ")
    return set(names.split(", ")) - {""}


# ---- what is right passes


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.beta=0.04", WARM],
        ["objective=reinforce", "advantage=rloo"],
        ["objective=gspo", "objective.entropy_coef=0.01", "trainer.packing=false"],
        ["objective=dapo", "objective.correction=token_mask", "rollout.engine=hf", "trainer.ppo_epochs=2"],
        ["objective=dr_grpo", "objective.kl_target=0.1", "objective.beta=0.1", "objective.top_entropy_quantile=0.2"],
        ["model.lora.r=2", "objective.beta=0.04", "objective.kl=k1", "trainer.micro_batch_tokens=8", WARM],
        ["objective=vespo", "rollout.steps_per_generation=2", "data.path=builtin:additions?digits=2&max_sum=99"],
        ["method=gspo", "rollout.prompts_per_step=1", "trainer.precision=bfloat16"],
        ["method=ppo", "rollout.group_size=1"],
        ["method=rloo", "model.lora.r=2", "trainer.ppo_epochs=3", "trainer.precision=bfloat16"],
        ["advantage=rloo", "objective.kl_in=reward", "objective.kl=k3", "objective.beta=0.01", WARM],
    ],
    ids=lambda overrides: overrides[0],
)
def test_right_runs_pass(overrides: list[str]) -> None:
    result = verified(*overrides)
    assert (result.code, failed(result)) == (0, set()), result.out
    assert all(f"  {name} " in result.out for name in CHECKS)
    assert os.listdir() == []  # neither a run folder nor anything else


def test_a_run_is_left_as_it_was(tmp_path: Path) -> None:
    run = built_run(*SMALL, "objective=grpo", f"run_dir={tmp_path / 'run'}")
    assert run.reference is not None
    before = {name: value.clone() for name, value in run.policy.state_dict().items()}
    reference = {name: value.clone() for name, value in run.reference.own_weights().items()}
    random, position, modes = (
        torch.get_rng_state(),
        run.data.state_dict(),
        [one.training for one in run.policy.modules()],
    )
    findings = verify(run)
    assert [finding.name for finding in findings] == [*CHECKS]
    assert differences(before, dict(run.policy.state_dict())) == []
    assert differences(reference, run.reference.state_dict()) == []
    assert all(parameter.grad is None for parameter in run.policy.parameters())
    assert (len(run.optimizer.state), run.moving, run.pending) == (0, False, [])
    assert torch.equal(random, torch.get_rng_state())
    assert run.data.state_dict() == position
    assert [one.training for one in run.policy.modules()] == modes


def test_what_does_not_apply_is_skipped_and_says_why() -> None:
    lines = verified("objective.beta=0", "trainer.packing=false", "rollout.engine=hf", "reward=length_penalty").out
    assert "no reference: objective.beta is 0" in lines
    assert "this run is padded" in lines
    assert "no part of the reward compares with the data" in lines
    assert "there is none: objective.kl_in is loss, or beta 0" in lines
    assert "there are none: every rollout is trained once" in lines
    assert "there is none: the advantage asks for no values" in lines
    assert lines.count("skipped") == 6
    assert "no row is skipped: each has a KL or a bonus" in verified("objective.beta=0.1").out


# ---- planted bugs


def wrap(patch: Patch, module: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Let `module.name(*args)` be `wrong(right, *args)`."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args, **options: wrong(right, *args, **options))


def wrap_method(patch: Patch, owner: type, name: str, wrong: Callable[..., Any]) -> None:
    """Let `owner().name(*args)` be `wrong(right, owner(), *args)`."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: wrong(right, self, *args))


def denominators_of_the_micro_batch(patch: Patch, run: Run) -> None:
    def wrong(right: Any, objective: Any, *, mask: Any, denominators: Denominators, **rest: Any) -> Any:
        own = Denominators(len(mask), float(mask.sum()), denominators.length)
        return right(objective, mask=mask, denominators=own, **rest)

    wrap(patch, update, "loss_and_terms", wrong)


def predictor_one_too_early(patch: Patch, run: Run) -> None:
    wrap(patch, forward, "_predictors", lambda right, *args: right(*args) - 1)


def mask_without_the_stop_token(patch: Patch, run: Run) -> None:
    def wrong(right: Any, rollouts: Any, *args: Any, **options: Any) -> Any:
        batch = right(rollouts, *args, **options)
        mask = batch.mask.clone()
        for row, one in enumerate(rollouts):
            if one.finish_reason == "stop":  # as where the padding token is the stop token
                mask[row, len(one.ids) - 1] = False
        return replace(batch, mask=mask)

    wrap(patch, experience, "collate", wrong)


def kl_that_is_only_logged(patch: Patch, run: Run) -> None:
    def wrong(right: Any, objective: Any, **rest: Any) -> Any:
        _, terms = right(objective, **rest)
        loss, _ = right(replace(objective, beta=0.0), **rest)
        return loss, terms

    wrap(patch, update, "loss_and_terms", wrong)


def bonus_that_is_only_logged(patch: Patch, run: Run) -> None:
    def wrong(right: Any, objective: Any, *, entropy: Any, **rest: Any) -> Any:
        return right(objective, entropy=entropy.detach(), **rest)

    wrap(patch, update, "loss_and_terms", wrong)


def trainer_at_temperature_1(patch: Patch, run: Run) -> None:
    wrap(
        patch,
        update,
        "completion_logps",
        lambda right, *args, **options: right(*args, **options | {"temperature": 1.0}),
    )


def completions_behind_the_next_prompt(patch: Patch, run: Run) -> None:
    def wrong(right: Any, prompts: Any, lengths: Any, group: list[int], device: Any, **options: Any) -> Any:
        return right(prompts, lengths, [(one + 1) % len(prompts) for one in group], device, **options)

    wrap(patch, forward, "_layout", wrong)


def padding_of_prompts_is_seen(patch: Patch, run: Run) -> None:
    def wrong(right: Any, *args: Any, **options: Any) -> Any:
        layout = right(*args, **options)
        mask = layout.mask.clone()
        mask[..., : layout.prompt_index.shape[1]] = True
        return replace(layout, mask=mask)

    patch.setattr(forward, "_SHORT_GROUP", 0)
    wrap(patch, forward, "packed_layout", wrong)


def positions_that_do_not_start_again(patch: Patch, run: Run) -> None:
    def wrong(right: Any, model: nn.Module) -> Any:
        def call(position_ids: torch.Tensor, **rest: Any) -> Any:
            return right(model)(position_ids=torch.arange(position_ids.shape[1]).unsqueeze(0), **rest)

        return call

    wrap(patch, forward, "decoder", wrong)


def engine_reports_temperature_1(patch: Patch, run: Run) -> None:
    def wrong(right: Any, *args: Any) -> Any:
        def plain(one: Any) -> Any:
            with torch.no_grad():
                logits = run.policy(torch.tensor([[*one.prompt.ids, *one.ids]])).logits[0]
            logps = logits[len(one.prompt.ids) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])
            return replace(one, logps=tuple(logps.flatten().tolist()))

        return [plain(one) for one in right(*args)]

    wrap(patch, run.engine, "generate", wrong)


def reference_that_is_the_policy(patch: Patch, run: Run) -> None:
    @contextmanager
    def model() -> Iterator[nn.Module]:
        yield run.policy

    patch.setattr(run.reference, "model", model)


def adapter_that_does_not_start_at_zero(patch: Patch, run: Run) -> None:
    with torch.no_grad():
        for name, parameter in run.policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)


def rows_with_a_gradient_are_skipped(patch: Patch, run: Run) -> None:
    wrap(patch, update, "rows_with_gradient", lambda right, batch: right(batch)[:-1])


def every_pass_starts_from_its_own_policy(patch: Patch, run: Run) -> None:
    def wrong(right: Any, objective: Any, *, old_logps: Any, **rest: Any) -> Any:
        return right(objective, old_logps=None, **rest)

    wrap(patch, update, "loss_and_terms", wrong)


def later_passes_have_the_log_probs_of_other_rows(patch: Patch, run: Run) -> None:
    def wrong(right: Any, objective: Any, *, old_logps: Any, **rest: Any) -> Any:
        return right(objective, old_logps=None if old_logps is None else old_logps.flip(0), **rest)

    wrap(patch, update, "loss_and_terms", wrong)


def later_portions_have_the_log_probs_of_other_rows(patch: Patch, run: Run) -> None:
    def wrong(right: Any, run: Run, learnt: Any) -> Any:
        batch = right(run, learnt)
        return replace(batch, old_logps=batch.old_logps.flip(0)) if learnt.off_policy else batch

    wrap(patch, losses, "batch_of", wrong)


def kl_of_the_token_before(patch: Patch, run: Run) -> None:
    wrap(patch, update, "kl_penalty", lambda right, *args: right(*args).roll(1, dims=1))


def kl_without_its_weight(patch: Patch, run: Run) -> None:
    wrap(patch, update, "kl_penalty", lambda right, objective, *args: right(objective, *args) / objective.beta)


def kl_that_the_estimator_does_not_see(patch: Patch, run: Run) -> None:
    right = run.advantage
    run.advantage = lambda rewards, components: right(components.sum(-1))


def parameters_that_never_move(patch: Patch, run: Run) -> None:
    run.policy.register_parameter("forgotten", nn.Parameter(torch.ones(3)))


def advantages_of_other_rows(patch: Patch, run: Run) -> None:
    def wrong(right: Any, rollouts: Any, advantages: torch.Tensor, **options: Any) -> Any:
        return right(rollouts, advantages.sort(dim=1).values, **options)

    wrap(patch, experience, "collate", wrong)


def nan_gets_through_the_mask(patch: Patch, run: Run) -> None:
    patch.setattr(objectives, "masked", lambda values, mask: values * mask)


def critic_of_the_micro_batch(patch: Patch, run: Run) -> None:
    def wrong(right: Any, self: Any, batch: Any, tokens: int) -> Any:
        losses = [right(self, batch.select(rows), tokens) for rows in micro_batches(batch, range(len(batch)), tokens)]
        return [sum(one) for one in zip(*losses, strict=True)]

    wrap_method(patch, Critic, "backward", wrong)


def critic_whose_decoder_never_learns(patch: Patch, run: Run) -> None:
    wrap(patch, critics, "completion_hidden", lambda right, *args, **options: right(*args, **options).detach())


def critic_that_reads_the_token_itself(patch: Patch, run: Run) -> None:
    wrap(patch, critics, "spread", lambda right, values, batch: right(values.roll(-1), batch))


def grader_that_finds_nothing(patch: Patch, run: Run) -> None:
    patch.setattr(exact, "without_stop_tokens", lambda text: "")


def grader_that_accepts_anything(patch: Patch, run: Run) -> None:
    patch.setattr(answers, "as_number", lambda text: 1)


def nothing(patch: Patch, run: Run) -> None:
    """The bug is in the settings."""


BUGS: list[tuple[Plant, list[str], set[str]]] = [
    (denominators_of_the_micro_batch, [], {"micro-batches"}),
    (predictor_one_too_early, [], {"log-probs", "packing"}),
    (mask_without_the_stop_token, [], {"masks"}),
    (kl_that_is_only_logged, ["objective.beta=0.04"], {"gradient"}),
    (bonus_that_is_only_logged, ["objective.beta=0", "objective.entropy_coef=0.01"], {"gradient"}),
    (trainer_at_temperature_1, [WARM], {"log-probs", "sampler"}),
    (completions_behind_the_next_prompt, [], {"packing", "log-probs"}),
    (padding_of_prompts_is_seen, [], {"padding", "packing"}),
    (positions_that_do_not_start_again, [], {"packing", "log-probs"}),
    (engine_reports_temperature_1, [WARM], {"sampler"}),
    (reference_that_is_the_policy, ["objective.beta=0.04"], {"reference"}),
    (adapter_that_does_not_start_at_zero, ["model.lora.r=2", "objective.beta=0.04"], {"reference"}),
    (rows_with_a_gradient_are_skipped, ["objective.beta=0"], {"zero advantage"}),
    (parameters_that_never_move, [], {"gradient"}),
    (advantages_of_other_rows, [], {"order"}),
    (nan_gets_through_the_mask, [], {"masks"}),
    (every_pass_starts_from_its_own_policy, ["trainer.ppo_epochs=2"], {"later steps"}),
    (every_pass_starts_from_its_own_policy, ["method=gspo", "rollout.prompts_per_step=1"], {"later steps"}),
    (every_pass_starts_from_its_own_policy, ["trainer.ppo_epochs=2", "trainer.precision=bfloat16"], {"later steps"}),
    (later_passes_have_the_log_probs_of_other_rows, ["trainer.ppo_epochs=2"], {"later steps"}),
    (later_portions_have_the_log_probs_of_other_rows, ["method=gspo", "rollout.prompts_per_step=1"], {"later steps"}),
    (engine_reports_temperature_1, [WARM, "method=gspo", "rollout.prompts_per_step=1"], {"sampler", "later steps"}),
    (kl_of_the_token_before, ["method=rloo"], {"KL in the reward"}),
    (kl_without_its_weight, ["method=reinforce_pp"], {"KL in the reward"}),
    (kl_that_the_estimator_does_not_see, ["method=rloo"], {"KL in the reward"}),
    (reference_that_is_the_policy, ["method=rloo"], {"reference"}),
    (critic_of_the_micro_batch, ["method=ppo"], {"critic"}),
    (critic_whose_decoder_never_learns, ["method=ppo"], {"critic"}),
    (critic_that_reads_the_token_itself, ["method=ppo"], {"critic"}),
    (grader_that_finds_nothing, [], {"grader"}),
    (grader_that_accepts_anything, [], {"grader"}),
    (nothing, ["reward.extract=regex", r"reward.pattern='= *(\d+) *eggs'"], {"grader"}),
    (nothing, ["model.lora.r=2", "model.lora.dropout=0.5"], {"repeat"}),
]


@pytest.mark.parametrize(
    ("plant", "overrides", "caught_by"), BUGS, ids=[f"{one.__name__} {two}" for one, two, _ in BUGS]
)
def test_a_planted_bug_is_caught(
    monkeypatch: Patch, tmp_path: Path, plant: Plant, overrides: list[str], caught_by: set[str]
) -> None:
    """Planted after the build, which tries the packed layout and would give way to padding."""
    run = built_run(*SMALL, *overrides, f"run_dir={tmp_path / 'run'}")
    plant(monkeypatch, run)
    with eval_mode(run.policy):
        sample = draw_sample(run)
        findings = [look(name, run, sample) for name in sorted(caught_by)]
    assert [finding.passed for finding in findings] == [False] * len(caught_by), findings


def test_a_failure_is_the_commands(monkeypatch: Patch) -> None:
    wrap(monkeypatch, build, "build_run", lambda right, *args: _without_the_stop_token(monkeypatch, right(*args)))
    result = verified()
    assert (result.code, failed(result)) == (1, {"masks"}), result.out


def _without_the_stop_token(patch: Patch, run: Run) -> Run:
    mask_without_the_stop_token(patch, run)
    return run


def test_bugs_of_one_place_are_caught_there_alone(monkeypatch: Patch) -> None:
    """What is failed says where to look: these touch nothing else."""
    wrap(monkeypatch, build, "build_run", lambda right, *args: _broken(monkeypatch, right(*args)))
    assert failed(verified("objective.beta=0.04", WARM)) == {"reference", "grader", "sampler"}


def _broken(patch: Patch, run: Run) -> Run:
    for plant in (reference_that_is_the_policy, grader_that_finds_nothing, engine_reports_temperature_1):
        plant(patch, run)
    return run


def test_where_no_completion_ends_one_is_ended(tmp_path: Path) -> None:
    """Completions are cut short here: of answers of hundreds of tokens none would show whether stopping is trained."""
    run = built_run(*SMALL, f"run_dir={tmp_path / 'run'}")
    run.sampling = replace(run.sampling, max_new_tokens=8, min_new_tokens=8)
    with eval_mode(run.policy):
        sample = draw_sample(run)
    (ended,) = [one for one in sample.rollouts if one.finish_reason == "stop"]
    model: Any = run.policy
    assert (len(ended.ids), ended.ids[-1]) == (5, model.generation_config.eos_token_id)  # half of eight, and an end
    assert torch.allclose(sample.logps[0, :5], torch.tensor(ended.logps), atol=1e-5)


def test_what_a_failure_means_stands_below_the_table(monkeypatch: Patch) -> None:
    monkeypatch.setattr(exact, "without_stop_tokens", lambda text: "")
    *_, meaning, last = verified().out.splitlines()
    assert meaning.startswith("grader: the reward does not tell right answers from wrong ones")
    assert last == "15 checks, 1 failed: grader"


def test_a_failure_is_explained(monkeypatch: Patch) -> None:
    run = built_run(*SMALL, "run_dir=run")
    monkeypatch.setattr(exact, "without_stop_tokens", lambda text: "")
    finding = CHECKS["grader"](run, draw_sample(run))
    assert finding == Finding(
        "grader",
        "no form of the answer, empty text 0%, the prompt 0%, another row's answer 0%",
        "a form > 50%; empty text, the prompt, another row's answer ≤ 25%",
        False,
        "the reward does not tell right answers from wrong ones: nothing, or something else, is learned",
    )


# ---- the grader's trial


def grader(**options: Any) -> Component:
    return Component("exact_match", 1.0, exact_match(**options))


def problems(*answers: Any) -> list[Prompt]:
    return [Prompt(row, f"{answer} + 0 is", (5,), {"answer": answer}) for row, answer in enumerate(answers)]


def test_shares_of_a_trial_by_hand() -> None:
    # of "1 + 0 is", "2 + 0 is", "0 + 0 is" the last number, 0, is the third answer; each other answer differs
    trial = try_grader(grader(), problems("so #### 1", "#### 2", "0"))
    assert isinstance(trial, Trial)
    assert trial.right == dict.fromkeys(("as in the data", "bare", "boxed", "hash", "sentence", "label", "tags"), 1.0)
    assert trial.wrong == {"empty text": 0.0, "the prompt": pytest.approx(1 / 3), "another row's answer": 0.0}
    boxed = try_grader(grader(extract="boxed"), problems("1", "2"))
    assert isinstance(boxed, Trial)
    assert {name for name, share in boxed.right.items() if share} == {"boxed"}


def test_without_another_answer_there_is_no_other_rows() -> None:
    trial = try_grader(grader(), problems("7", 7))
    assert isinstance(trial, Trial)
    assert list(trial.wrong) == ["empty text", "the prompt"]


def test_answers_that_cannot_be_written_say_so() -> None:
    assert try_grader(grader(), problems(["a", "b"])) == "column 'answer' is neither text nor numbers"
    assert try_grader(grader(column="gold"), problems("1")) == "column 'gold' is empty"


# ---- the command


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from grpo_toolbox.cli.main import main; assert main(['verify', '--help']) == 0; "
        "print([name for name in ('torch', 'hydra', 'omegaconf', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: toolbox verify [group=option …] [key=value …]")
    assert done.stdout.splitlines()[-1] == "[]"


def test_mistakes_are_those_of_the_command() -> None:
    result = toolbox("verify", "trainer.max_step=3")
    assert result.code == 1
    assert result.err.startswith("toolbox verify: trainer.max_step is not a setting. Did you mean trainer.max_steps?")
    result = toolbox("verify", "--fast")
    assert result.code == 2
    assert result.err.startswith("toolbox verify: --fast is not a flag of toolbox verify.")
