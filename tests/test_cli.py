"""The command line as a newcomer, a hurried typist and a Hydra user meet it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

import grpo_toolbox
from command_line import toolbox
from grpo_toolbox.cli.main import COMMANDS
from grpo_toolbox.config.source import option_names


@pytest.mark.parametrize(
    "value",
    [
        "builtin:additions?digits=2&max_sum=99",
        "~/data/prompts.jsonl",
        "<answer>(.*)</answer>",
        r"Answer: (\S+)",
        r"\boxed{(.*)}",
        "it's, well: 100% 'new'",
        "ends with a backslash<\\",
        "a=b",
        "three plain words",
    ],
)
def test_values_of_any_text_need_no_quotes_beside_the_shells(value: str) -> None:
    shown = toolbox("train", "--cfg", "job", "--package", "data", f"data.path={value}")
    assert yaml.safe_load(shown.out)["path"] == value


# ---- what answers without torch

NAMES = ("train", "verify", "traces", "memory", "models")
HELPS = ["", "--help", "-h", "--version", *(f"{one} --help" for one in NAMES)]
HELPS += ["train --help reward", "train trainer.lr=1 --help", "train --help nosuch", "nosuch", "launch experiment=x"]
MISTYPED = {
    "trainer.max_step=3": "trainer.max_step is not a setting. Did you mean trainer.max_steps?",
    "trainr.max_steps=3": "trainr is not a setting. Did you mean trainer?",
    "max_steps=3": "max_steps is not a setting. Did you mean trainer.max_steps?",
    "model.lora.rank=3": "model.lora.rank is not a setting. model.lora has: r, alpha, dropout, target_modules.",
    "+trainer.max_step=3": "trainer.max_step is not a setting. Did you mean trainer.max_steps?",
    "objective.clip_ep=0.1": "objective.clip_ep is not a setting. Did you mean objective.clip_eps?",
    "advantage=dr_grpo advantage.eps=1": "advantage.eps is not a setting. advantage has: name.",
    "+advantage.epsilon=1": "advantage.epsilon is not an option of group_relative, which takes: std, eps.",
    "reward.extrac=boxed": "reward.extrac is not a setting. Did you mean reward.extract?",
    "reward.extract=boxd": "reward.extract='boxd' is not an option: boxed, hash, last_number, regex, whole.",
    "callbacks.sample_logger.evry=2": "callbacks.sample_logger.evry is not a setting. Did you mean",
    "+callbacks.sample_loger={}": "callbacks='sample_loger' is not an option: … Did you mean sample_logger?",
    "advantage=rlo": "advantage=rlo is not an option: … rloo. Did you mean rloo?",
    "rewrd=format": "rewrd is not a setting. Did you mean reward?",
    "experiment=grpo_tin": "experiment=grpo_tin is not an option: … grpo_tiny. Did you mean grpo_tiny?",
    "trainer.max_steps=many": "trainer.max_steps='many' is not a whole number.",
    "trainer.lr=fast": "trainer.lr='fast' is not a number.",
    "trainer.packing=maybe": "trainer.packing='maybe' is not true or false.",
    "objective.clip_eps=wide": "objective.clip_eps='wide' is not a number.",
    "objective.loss_agg=token": "objective.loss_agg='token' is not an option: … Did you mean token_mean?",
    "objective.kl=k4": "objective.kl='k4' is not an option: k1, k2, k3.",
    "advantage.std=samples": "advantage.std='samples' is not an option: population, sample. Did you mean sample?",
    "trainer.schedule=cosin": "trainer.schedule='cosin' is not an option: constant, cosine, linear. Did you mean",
    "trainer.max_steps": "cannot read the override 'trainer.max_steps': write key=value",
    "trainer.max_steps=[1": "cannot read the override 'trainer.max_steps=[1': write key=value",
    "trainer.seed=0,1": "trainer.seed=0,1 is a sweep: add --multirun, or write trainer.seed=[0,1] for a list.",
    "~trainer.lr": "~trainer.lr: a setting cannot be taken out, only set: trainer.lr=….",
    "--config-dir nowhere": "Additional config directory",
    "model.path=builtin:tinny": "model.path='builtin:tinny' is not an option: builtin:smollm2, builtin:tiny.",
    "data.path=nowhere.jsonl": "data.path='nowhere.jsonl': there is no such file.",
}
RUNNER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from grpo_toolbox.cli.main import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = ended.code
    names = ("torch", "transformers", "peft", "datasets", "httpx", "rich", "hydra")
    heavy = [name for name in names if name in sys.modules]
    print(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue(), "heavy": heavy}))
"""
Answers = dict[str, dict]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What a fresh interpreter says to each line, and what it had to import up to then."""
    lines = [*HELPS, *(f"train {words}" for words in MISTYPED), "train --cfg job", "train --cfg hydra"]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("answers"),
    )
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("line", HELPS)
def test_help_loads_neither_torch_nor_hydra_nor_rich(answers: Answers, line: str) -> None:
    assert answers[line]["heavy"] == []


@pytest.mark.parametrize("words", MISTYPED)
def test_a_mistake_is_answered_with_one_line_and_without_torch(answers: Answers, words: str) -> None:
    answer = answers[f"train {words}"]
    start, *parts = MISTYPED[words].split(" … ")
    assert answer["err"].startswith(f"toolbox train: {start}"), answer["err"]
    assert all(part in answer["err"] for part in parts), answer["err"]
    assert (answer["code"], answer["out"], answer["err"].count("\n")) == (1, "", 1)
    assert set(answer["heavy"]) <= {"hydra", "rich"}


def test_cfg_prints_the_config_without_torch_and_without_training(answers: Answers) -> None:
    answer = answers["train --cfg job"]
    assert answer["code"] == 0
    assert set(answer["heavy"]) <= {"hydra", "rich"}
    config = yaml.safe_load(answer["out"])
    assert (config["name"], config["advantage"]["name"], config["trainer"]["seed"]) == (
        "grpo_tiny",
        "group_relative",
        0,
    )
    assert answers["train --cfg hydra"]["out"].startswith("hydra:")


def test_a_refused_command_leaves_nothing_behind(answers: Answers, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = next(path for path in tmp_path_factory.getbasetemp().iterdir() if path.name.startswith("answers"))
    assert list(folder.iterdir()) == []


def test_help_lists_commands_groups_and_options(answers: Answers) -> None:
    assert answers[""]["out"] == answers["--help"]["out"] == answers["-h"]["out"]
    assert all(f"  {one} " in answers["--help"]["out"] for one in NAMES)
    in_one_line = " ".join(answers["train --help"]["out"].split())  # it wraps at the edge of the terminal
    assert f" advantage {', '.join(option_names('advantage'))} callbacks " in in_one_line
    assert answers["train trainer.lr=1 --help"]["out"] == answers["train --help"]["out"]
    assert (
        "extract: last_number      # last_number | boxed | hash | regex | whole"
        in answers["train --help reward"]["out"]
    )
    assert answers["--version"]["out"].strip() == grpo_toolbox.__version__


def test_an_unknown_command_or_help_topic_names_what_there_is(answers: Answers) -> None:
    assert (answers["nosuch"]["code"], answers["launch experiment=x"]["code"]) == (2, 2)
    launch = f"toolbox: 'launch' is not a command: {', '.join(COMMANDS)}.\n"
    assert answers["launch experiment=x"]["err"] == launch
    listed = "--help='nosuch' is not an option: advantage, callbacks, critic, data"
    assert listed in answers["train --help nosuch"]["err"]


def test_an_unknown_flag_is_a_usage_error() -> None:
    result = toolbox("train", "--mulitrun")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("toolbox train: --mulitrun is not a flag of toolbox train. Did you mean --multirun?")
    assert result.err.count("\n") == 1
    assert toolbox("train", "--cfg", "job", "--multirun").code == 2
