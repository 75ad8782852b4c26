"""Runs through the command line: the axes combined, the user's own functions, sweeps, resuming, what is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from command_line import SHORT, refused, toolbox, write_module
from grpo_toolbox.config.schema import RewardConfig
from grpo_toolbox.objectives import Objective

TWO_STEPS = ("trainer.max_steps=2", "callbacks=none")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def runs() -> list[Path]:
    return sorted(Path("runs").iterdir())


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def finished_steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# ---- the command lines of the documentation


@pytest.mark.parametrize(
    "words",
    [
        "experiment=grpo_tiny",
        "experiment=grpo_tiny advantage=dr_grpo objective.loss_agg=token_mean",
        "experiment=grpo_tiny advantage=rloo objective=reinforce",
        "experiment=grpo_tiny objective.clip_eps_high=0.28",
        "experiment=grpo_tiny objective=ppo_clip advantage=batch_normalized trainer.ppo_epochs=2",
    ],
)
def test_the_axes_combine_and_train(words: str) -> None:
    assert toolbox("train", *words.split(), *TWO_STEPS).code == 0
    (run_dir,) = runs()
    assert finished_steps(run_dir) == [1, 2]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    chosen = dict(word.split("=") for word in words.split())
    assert config["advantage"]["name"] == chosen.get("advantage", "group_relative")
    assert str(config["objective"].get("clip_eps_high")) == chosen.get("objective.clip_eps_high", "None")


WEIGHTED = """\
# @package _global_
name: mine
reward:
  name: weighted_sum
  components:
    - {name: exact_match, extract: last_number, weight: 1.0}
    - {name: format, pattern: "<answer>.*</answer>", weight: 0.1}
    - {name: length_penalty, target_chars: 300, weight: 0.05}
trainer: {max_steps: 2}
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 3}
callbacks: {trace_rollouts: null, memory_writer: null, display: null}
"""


def experiment(name: str, text: str) -> None:
    Path("conf/experiment").mkdir(parents=True, exist_ok=True)
    Path(f"conf/experiment/{name}.yaml").write_text(dedent(text))


def test_a_users_experiment_chooses_its_reward_as_the_documentation_writes_it() -> None:
    experiment("mine", WEIGHTED)
    assert toolbox("train", "experiment=mine", "--config-dir", "conf").code == 0
    (run_dir,) = runs()
    assert run_dir.name.startswith("mine-")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert set(config["reward"]) == {"components"} | STANDARD["reward"]  # nothing is left of exact_match, the default
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"rewards/{name}/mean" for name in ("exact_match", "format", "length_penalty")} < set(last)


def test_a_users_experiment_builds_on_another_with_another_reward() -> None:
    experiment("mine", "# @package _global_\ndefaults: [grpo_tiny, _self_]\nreward: {name: format}")
    assert toolbox("train", "experiment=mine", "--config-dir", "conf", *SHORT).code == 0
    (run_dir,) = runs()
    written = yaml.safe_load((run_dir / "config.yaml").read_text())["reward"]
    assert written["name"] == "format"
    assert not {"extract", "column", "ignore_case"} & set(written)  # grpo_tiny's, for exact_match


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# @package _global_\ntrainer: {max_step: 2}",
            "experiment/mine.yaml: trainer.max_step is not a setting. Did you",
        ),
        ("# @package _global_\ntrainer: {lr: fast}", "experiment/mine.yaml: trainer.lr='fast' is not a number."),
        ("trainer: {max_steps: 2}", "experiment/mine.yaml: it must begin with the line `# @package _global_`."),
        ("# @package _global_\ntrainer: {max_steps: 2\nname: x", "while parsing a flow mapping in"),
        (
            "# @package _global_\ndefaults: [{override /reward: formt}]",
            "reward=formt is not an option: code, cosine_length, custom",
        ),
        (
            "# @package _global_\nreward: {extrac: boxed}",
            "reward.extrac is not an option of exact_match: extract, pattern",
        ),
        (
            "# @package _global_\nadvantage: {name: dr_grpo, eps: 3}",
            "advantage.eps is not an option of dr_grpo, which takes: n",
        ),
    ],
)
def test_a_mistake_in_a_users_experiment_is_one_line_too(text: str, message: str) -> None:
    experiment("mine", text)
    assert refused("--config-dir", "conf", "experiment=mine").startswith(message)


# ---- the user's own functions, from the working directory


PLUG_INS = """
    import torch

    def halved(rewards, *, scale=0.5):
        return (rewards - rewards.mean(dim=1, keepdim=True)) * scale

    def plain(logps, old_logps, advantages, *, alpha=1.0):
        return -alpha * advantages * logps, torch.zeros_like(logps, dtype=torch.bool)

    def digits(completions, answer, bonus=0.0):
        return [bonus + sum(map(str.isdigit, text)) for text in completions]

    class Digits:
        def __init__(self, factor=1.0):
            self.factor = factor

        def __call__(self, completions):
            return [self.factor * sum(map(str.isdigit, text)) for text in completions]
"""


STANDARD = {
    "advantage": {"name"},
    "objective": {"name"} | {field.name for field in dataclasses.fields(Objective)},
    "reward": {"name", *(field.name for field in dataclasses.fields(RewardConfig))},
}
"""Keys that stand beside the options of the function that `name` names."""


@pytest.mark.parametrize(
    ("words", "group", "options"),
    [
        (("advantage.name={}:halved",), "advantage", {}),
        (("advantage.name={}:halved", "+advantage.scale=2"), "advantage", {"scale": 2}),
        (("objective.name={}:plain", "+objective.alpha=0.5", "objective.beta=0"), "objective", {"alpha": 0.5}),
        (("reward.name={}:digits",), "reward", {}),
        (("reward=custom", "reward.name={}:digits", "+reward.bonus=1"), "reward", {"bonus": 1}),
        (("reward=custom", "reward.name={}:Digits", "+reward.factor=3"), "reward", {"factor": 3}),
    ],
)
def test_the_users_functions_plug_in(words: tuple[str, ...], group: str, options: dict) -> None:
    module = write_module(PLUG_INS)
    result = toolbox("train", *SHORT, *(word.format(module) for word in words))
    assert result.code == 0, result.err
    (run_dir,) = runs()
    written = yaml.safe_load((run_dir / "config.yaml").read_text())[group]
    assert {key: value for key, value in written.items() if key not in STANDARD[group]} == options


def test_a_users_callback_sees_every_step() -> None:
    module = write_module("""
        from pathlib import Path
        from grpo_toolbox.callbacks import Callback

        class Counts(Callback):
            def __init__(self, to):
                self.to = Path(to)
            def on_step(self, step):
                with self.to.open("a") as file:
                    file.write(f"{step.number} {len(step.rollouts)}\\n")
    """)
    experiment("mine", f"# @package _global_\ncallbacks: {{'{module}:Counts': {{to: counts.txt}}}}")
    assert toolbox("train", "--config-dir", "conf", "experiment=mine", *SHORT).code == 0
    assert Path("counts.txt").read_text() == "1 4\n2 4\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("reward.name={}:digit",),
            "has no function 'digit'; it has: Digits, digits, halved, plain. Did you mean digits?",
        ),
        (("reward.name={}:digits", "+reward.bonuss=1"), "reward.bonuss is not an option of {}:digits: answer, bonus."),
        (
            ("advantage.name={}:halved", "+advantage.scal=1"),
            "advantage.scal is not an option of {}:halved, which takes: s",
        ),
        (("advantage.name={}:nosuch",), "{} has no function 'nosuch'; it has: Digits, digits, halved, plain."),
        (("objective.name={}:halved",), "the objective function failed on a small probe (TypeError: "),
        (("advantage.name=no_such_module:f",), "importing 'no_such_module' failed (ModuleNotFoundError"),
        (("reward=custom",), "reward.name has no default: set reward.name=… on the command line or in the experiment."),
    ],
)
def test_a_plug_in_that_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    module = write_module(PLUG_INS)
    assert message.format(module) in refused(*SHORT, *(word.format(module) for word in words))
    assert not Path("runs").exists() or runs() == []


# ---- what Hydra's users expect


def test_a_sweep_runs_every_job_in_a_folder_of_its_own_and_writes_nothing_else() -> None:
    result = toolbox("train", "--multirun", "trainer.seed=0,1", *SHORT, "advantage=rloo")
    assert result.code == 0, result.err
    assert [finished_steps(run_dir) for run_dir in runs()] == [[1, 2], [1, 2]]
    configs = [yaml.safe_load((run_dir / "config.yaml").read_text()) for run_dir in runs()]
    assert {config["trainer"]["seed"] for config in configs} == {0, 1}
    named = [line.split()[0] for line in result.out.splitlines() if line.startswith("trainer.seed=")]
    assert named == ["trainer.seed=0", "trainer.seed=1"]
    assert {Path(name).parts[0] for name in files()} == {"runs"}


def test_a_sweep_names_its_folders_after_a_setting() -> None:
    words = ("--multirun", "advantage=rloo,dr_grpo", "run_dir=swept/${advantage.name}")
    assert toolbox("train", *SHORT, *words).code == 0
    assert {path.name for path in Path("swept").iterdir()} == {"rloo", "dr_grpo"}


def test_a_sweep_into_one_folder_is_refused_before_its_first_job() -> None:
    assert "run_dir=same would be the folder of every job" in refused("-m", "trainer.seed=0,1", "run_dir=same", *SHORT)
    assert files() == set()


def test_a_failing_job_of_a_sweep_is_named_and_the_others_run() -> None:
    result = toolbox("train", "--multirun", "rollout.group_size=1,2", *(word for word in SHORT if "group" not in word))
    assert result.code == 1
    assert result.err.startswith("toolbox train: rollout.group_size=1 ")
    assert "leaves nothing to compare with" in result.err
    assert [finished_steps(run_dir) for run_dir in runs()] == [[1, 2]]


def test_a_signal_ends_the_whole_sweep() -> None:
    module = write_module("""
        import os, signal

        def stops(completions):
            os.kill(os.getpid(), signal.SIGTERM)
            return [0.0] * len(completions)
    """)
    assert toolbox("train", "--multirun", "trainer.seed=0,1", *SHORT, f"reward.name={module}:stops").code == 143
    assert runs() == []


def test_a_run_writes_into_its_folder_and_nowhere_else() -> None:
    assert toolbox("train", "name=here", "hydra.verbose=true", *SHORT, "callbacks=default").code == 0
    (run_dir,) = runs()
    assert run_dir.name.startswith("here-")
    assert {Path(name).parts[:2] for name in files()} == {("runs", run_dir.name)}
    kept = {"config.yaml", "metrics.jsonl", "samples.jsonl", "memory.sqlite", "traces/actions.jsonl"}
    assert {str(run_dir / name) for name in kept} <= files()


def test_what_is_taken_out_is_not_there() -> None:
    assert toolbox("train", *SHORT[:-1], "~callbacks.display", "~callbacks.trace_rollouts", "~advantage.eps").code == 0
    (run_dir,) = runs()
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert not {"display", "trace_rollouts"} & set(config["callbacks"])
    assert config["advantage"] == {"name": "group_relative", "std": "sample"}
    assert not (run_dir / "traces").exists()
    assert refused("~advantage").startswith("advantage.name=None: set it to the name of a function")


def test_hydras_own_questions_are_answered() -> None:
    assert "grpo_toolbox.conf" in toolbox("train", "--info", "searchpath").out
    assert toolbox("train", "--cfg", "job", "--package", "trainer", "trainer.seed=8").out.count("seed: 8") == 1
    resolved = toolbox("train", "--cfg", "job", "--resolve", "run_dir=runs/${trainer.seed}")
    assert "run_dir: runs/0\n" in resolved.out
    assert not Path("runs").exists()


def test_the_process_is_left_as_it_was() -> None:
    before = (list(sys.argv), os.environ.get("HYDRA_FULL_ERROR"), os.getcwd())
    refused("trainer.max_step=3")
    toolbox("train", *SHORT)
    assert (sys.argv, os.environ.get("HYDRA_FULL_ERROR"), os.getcwd()) == before


# ---- going on with a run


def test_resume_alone_goes_on_with_the_runs_own_config() -> None:
    experiment("mine", WEIGHTED)
    assert toolbox("train", "--config-dir", "conf", "experiment=mine", "run_dir=a", "advantage=rloo").code == 0
    assert toolbox("train", "resume=a", "trainer.max_steps=3").code == 0
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    assert (config["name"], config["reward"]["name"], config["advantage"]["name"]) == ("mine", "weighted_sum", "rloo")
    assert (config["trainer"]["max_steps"], config["resume"], config["run_dir"]) == (3, "a", None)
    assert finished_steps(Path("a")) == [1, 2, 3]
    # by its other name, from where the folder was moved to
    Path("a").rename("b")
    assert toolbox("train", "trainer.resume=true", "run_dir=b", "trainer.max_steps=4").code == 0
    assert finished_steps(Path("b")) == [1, 2, 3, 4]


def test_a_run_that_cannot_be_resumed_says_why_and_keeps_its_config() -> None:
    assert toolbox("train", *SHORT, "run_dir=a").code == 0
    before = Path("a/config.yaml").read_text()
    assert refused("resume=a").startswith(
        "a has already finished step 2, and trainer.max_steps=2: raise trainer.max_st"
    )
    assert "nosuch has no whole checkpoint" in refused("resume=nosuch")
    assert "the checkpoint's parameters are not this model's" in refused(
        "resume=a", "trainer.max_steps=3", "model.lora.r=2"
    )
    assert refused("resume=a", "run_dir=b").startswith("resume=a and run_dir=b name two folders")
    assert refused("trainer.resume=true").startswith("trainer.resume=true needs run_dir=<the run to go on with>")
    assert Path("a/config.yaml").read_text() == before
    assert files() == {name for name in files() if name.startswith("a/")}


def test_the_end_of_a_run_says_how_to_go_on_with_it() -> None:
    result = toolbox("train", *SHORT[:-1], "run_dir=a", "advantage=rloo")
    command = next(line for line in result.out.splitlines() if "resume=" in line).split("toolbox train ")[1]
    assert command == f"{' '.join(SHORT[1:-1])} advantage=rloo trainer.max_steps=4 resume=a"
    assert toolbox("train", *command.split()).code == 0
    assert finished_steps(Path("a")) == [1, 2, 3, 4]


# ---- signals before there is a step


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_the_run_is_built_leaves_no_folder(name: str, code: int) -> None:
    module = write_module(f"""
        import os, signal

        class Slow:
            def __init__(self):
                os.kill(os.getpid(), signal.{name})
            def __call__(self, completions):
                return [0.0] * len(completions)
    """)
    result = toolbox("train", *SHORT, "run_dir=a", f"reward.name={module}:Slow")
    assert (result.code, result.err) == (code, f"toolbox train: stopped by {name}.\n")
    assert not Path("a").exists()
