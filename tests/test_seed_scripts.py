"""Scripts written for TRL run as they stand in their texts, after changing one import.

The texts lie beside the repository (`written_scripts.py` reads them); where they do not, tests/test_trl_scripts.py has
the same paths in code of ours. A small model and data set of this machine's stand in for the hub's names, `sdpa` for a
kernel that needs a GPU, and what a text leaves out with `...` is put in.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_model import save_chat_model, save_quick_learner
from grpo_toolbox import GRPOConfig, GRPOTrainer, RLOOConfig
from grpo_toolbox.config.fields import FIELD_MAP
from grpo_toolbox.errors import ConfigError, RewardError
from written_scripts import FRAGMENTS, OUTLINES, TEXTS, block, blocks, fragment, text, uncovered

pytestmark = pytest.mark.skipif(not TEXTS.is_dir(), reason="the texts are not beside the repository")

ROOT = Path(__file__).parents[1]
CHAT = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that `load_dataset` reads as it reads one of the hub's: one problem."""
    folder = tmp_path_factory.mktemp("data")
    Dataset.from_list([{"prompt": CHAT, "solution": "$4$"}]).to_json(folder / "train.jsonl")
    return str(folder)


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("WANDB_MODE", "offline")


def changed(script: str, model: str, data: str = "") -> str:
    """The script with the one import changed, and what is on the hub replaced by what is here."""
    script = re.sub(r"from trl(?=[ .])", "from grpo_toolbox", script)
    script = re.sub(r'"(?:Qwen|google)/[^"]+"', repr(model), script).replace('"flash_attention_2"', '"sdpa"')
    return script.replace('"trl-lib/DeepMath-103K"', repr(data))


def run(script: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "script", **names}
    exec(compile(script, "script", "exec"), space)
    return space


# ---- nothing is left out


def test_every_piece_of_code_in_the_texts_is_a_fragment() -> None:
    assert {number: uncovered(number) for number in ("001", "004")} == {"001": [], "004": []}
    assert [key for key in OUTLINES if not any(key in one for one in blocks())] == []
    assert all(any(key in one for key in OUTLINES) for one in blocks())
    rest = text("003").rpartition("```")[2]
    assert rest.split() == ["python", "class", "AdaptiveReward:"]  # where the text breaks off


def test_every_fragment_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8") + (ROOT / "tests" / "test_seed_server.py").read_text()
    named = set(re.findall(r'(?:fragment|block)\(\s*["\']([^"\']+)["\']', source))
    assert named == {*FRAGMENTS, *OUTLINES}


# ---- the page of the trainer


def test_the_quick_start(model: str, data: str) -> None:
    """And its page's table of metrics: each is in the log history."""
    trainer = run(changed(fragment("quick start"), model, data))["trainer"]
    assert trainer.state.global_step == 3  # one problem, three epochs
    entry = trainer.state.log_history[0]
    assert "rewards/accuracy_reward/mean" in entry
    table = re.findall(r"^([a-z_/]+)\t", text("001")[text("001").index("Logged metrics") :], flags=re.MULTILINE)
    assert {"reward", "entropy", "kl", "clip_ratio/region_mean"} < set(table)
    assert set(table) - set(entry) == {"kl"}  # which comes with beta above 0


def test_the_quick_start_learns(tmp_path: Path) -> None:
    """At TRL's own settings, a rate of 1e-6 among them: the model that stands in moves as far by it as a large one."""
    learner = save_quick_learner(tmp_path / "learner")
    Dataset.from_list([{"prompt": CHAT, "solution": "$4$"}] * 20).to_json(tmp_path / "data" / "train.jsonl")
    trainer = run(changed(fragment("quick start"), learner, str(tmp_path / "data")))["trainer"]
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.args.learning_rate == 1e-6
    assert rewards[0] < 0.4  # means of ten steps each
    assert rewards[-1] > 0.7


def test_its_launch(model: str, data: str, tmp_path: Path) -> None:
    """By the command line as it stands, and by the other page's with GPUs named that are not there."""
    (tmp_path / "train_grpo.py").write_text(changed(fragment("quick start"), model, data))
    _, other = fragment("launch beside vllm").replace("\\\n", " ").strip().splitlines()
    assert other.partition("#")[0].strip() == f"CUDA_VISIBLE_DEVICES=1,2,3 {fragment('launch').strip()}"
    done = shell(other)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "trainer_output" / "metrics.jsonl").read_text().splitlines()) == 3


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in the shell, with the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PATH": path})


def test_its_two_formats_and_rewards(model: str) -> None:
    """The function for text and the one for conversations, each on prompts of its form; together they fit neither."""
    rows = [ast.literal_eval(row) for row in fragment("formats").split("# ")[1:] for row in [row.partition("\n")[2]]]
    texts, chats = (Dataset.from_list([row] * 2) for row in rows)
    head = "from trl import GRPOTrainer\n" + fragment("correctness") + fragment("form")
    space = run(head.replace("trl", "grpo_toolbox"))
    assert space["reward_func"](["so \\boxed{2}", "5"], ["2", "2"]) == [1.0, 0.0]
    both = changed(head + fragment("several rewards"), model)
    for name, dataset in {"reward_func": texts, "format_reward_func": chats}.items():
        one = both.replace("[format_reward_func, reward_func]", name)
        trainer = run(one + "\ntrainer.train()", dataset=dataset)["trainer"]
        assert f"rewards/{name}/mean" in trainer.state.log_history[0]
    with pytest.raises(RewardError, match="reward_func"):
        run(both + "\ntrainer.train()", dataset=chats)


def test_its_function_for_one_task_of_several(model: str) -> None:
    """`for ...` is put in; the text compares a list with a name, so that it is of no task."""
    written = fragment("several tasks")
    whole = written.replace("for ...]", 'for task, correct in zip(task, kwargs["right"])]')
    assert whole != written
    rewards = [run(whole)["math_reward_func"], lambda completions, **_: [0.5] * len(completions)]
    rows = [{"prompt": "1+1=", "task": "math", "right": True}, {"prompt": "x", "task": "code", "right": True}]
    args = GRPOConfig(max_steps=1, per_device_train_batch_size=16, max_completion_length=4)
    trainer = GRPOTrainer(model, rewards, args, Dataset.from_list(rows))
    trainer.train()
    entry = trainer.state.log_history[0]
    assert (entry["rewards/math_reward_func/mean"], entry["reward"]) == (1.0, 1.0)  # 1.5 and 0.5
    assert entry["rewards/math_reward_func/not_applicable"] == 8


def test_its_adapter(model: str, data: str) -> None:
    trainer = run(changed(fragment("lora"), model, data))["trainer"]
    assert trainer.state.global_step == 3
    assert hasattr(trainer.model, "peft_config")


def test_its_tools_are_refused_with_the_word_that_they_come_later(model: str) -> None:
    with pytest.raises(ConfigError, match="tools come later"):
        run(changed(fragment("tools"), model), reward_func=len, dataset=[{"prompt": "3*4"}])


def test_its_colocated_vllm_trains(model: str, data: str) -> None:
    args = run(changed(fragment("vllm, colocated"), model))["training_args"]
    assert args.use_vllm
    script = fragment("quick start").replace("train_dataset=", "args=args, train_dataset=")
    assert run(changed(script, model, data), args=args)["trainer"].state.global_step == 3


def test_the_defaults_that_it_names() -> None:
    """But for the length of completions, which TRL has doubled since."""
    named = dict(re.findall(r'^(\w+) · [^\n]* · default: "([^"]+)"', text("001"), flags=re.MULTILINE))
    assert len(named) > 10
    values = {
        name: ast.literal_eval(value.capitalize()) if value == "false" else value for name, value in named.items()
    }
    differing = {name for name, value in values.items() if str(getattr(GRPOConfig(), name)) != str(value)}
    assert differing == {"max_completion_length"}


# ---- the page of recipes


def test_recipes_from_data_to_stages(model: str) -> None:
    """One reader who follows it all: data, rewards, the config for a small GPU, the standard setup, two stages."""
    given = {"extract_answer": lambda raw: raw.split("#### ")[1], "extract_final_answer": lambda said: said}
    space = run(changed(block("SYSTEM_PROMPT"), model), **given)
    raw = Dataset.from_list([{"question": "1+1?", "raw_answer": "so #### 2"}] * 2)
    space["dataset"] = space["prepare_dataset"](raw)
    assert [one["role"] for one in space["dataset"][0]["prompt"]] == ["system", "user"]
    scripts = [block("def correctness_reward"), block("def format_reward"), block("def incremental_format_reward")]
    space = run(changed("\n".join([*scripts, block("warmup_ratio"), block("peft_config=peft_config")]), model), **space)
    trainer = space["trainer"]
    assert trainer.state.global_step == 2
    rewards = ("correctness_reward", "format_reward", "incremental_format_reward")
    assert {f"rewards/{name}/mean" for name in rewards} <= set(trainer.state.log_history[0])
    assert Path("final_model/adapter_config.json").is_file()
    stages = block("trainer_stage1").replace(
        "...", "processing_class=tokenizer, args=training_args, train_dataset=dataset"
    )
    space = run(stages, **space)
    assert space["trainer_stage2"].state.global_step == 2
    assert space["trainer_stage1"].run_dir != space["trainer_stage2"].run_dir


def test_recipe_for_a_large_gpu(model: str) -> None:
    args = run("from grpo_toolbox import GRPOConfig\n" + block("use_vllm=True"))["training_args"]
    rewards = run(block("def incremental_format_reward"))["incremental_format_reward"]
    trainer = GRPOTrainer(model, rewards, args, Dataset.from_list([{"prompt": CHAT}]))
    trainer.train()
    assert trainer.state.global_step == 1
    assert (trainer.args.max_prompt_length, trainer.args.use_vllm) == (512, True)


def test_recipe_s_template_of_a_reward(model: str) -> None:
    function = run(block("def reward_function_name"), compute_score=lambda said: float(len(said)))
    args = GRPOConfig(max_steps=1, max_completion_length=4)
    trainer = GRPOTrainer(model, function["reward_function_name"], args, [{"prompt": CHAT, "answer": "4"}])
    trainer.train()
    assert trainer.state.log_history[0]["rewards/reward_function_name/mean"] > 0


def test_recipe_with_unsloth(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package needs a GPU: this holds its place. What it makes is a model with an adapter, which is taken."""

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(model_name: str, load_in_4bit: bool, **_: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)

        @staticmethod
        def get_peft_model(model: Any, r: int, target_modules: Sequence[str], lora_alpha: int, **_: Any) -> Any:
            return get_peft_model(model, LoraConfig(r=r, target_modules=list(target_modules), lora_alpha=lora_alpha))

    monkeypatch.setitem(sys.modules, "unsloth", _module("unsloth", FastLanguageModel=FastLanguageModel))
    rest = "processing_class=tokenizer, reward_funcs=digits, args=args, train_dataset=dataset"
    script = "from trl import GRPOTrainer\n" + block("FastLanguageModel").replace("...", rest)
    args = GRPOConfig(max_steps=1, max_completion_length=4)
    given = {"digits": lambda completions, **_: [float(len(str(one))) for one in completions]}
    trainer = run(changed(script, model), args=args, dataset=[{"prompt": CHAT}], **given)["trainer"]
    assert trainer.state.global_step == 1


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


# ---- the course


@pytest.mark.parametrize(
    "check",
    [
        lambda: fragment("check of the KL"),
        lambda: fragment("check of advantages"),
        lambda: fragment("check of weights"),
        lambda: fragment("check of ratios"),
    ],
)
def test_its_checks_hold(check: Callable[[], str], capsys: pytest.CaptureFixture[str]) -> None:
    run(check())
    assert capsys.readouterr().out.endswith("verified\n")


def test_its_reward_for_a_schema(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser stands in another of its files: strip, unwrap one fence, json.loads, a dict or None."""
    import json

    def parse_prediction(said: str) -> dict[str, Any] | None:
        try:
            found = json.loads(re.sub(r"^```json\s*(.*?)\s*```$", r"\1", said.strip(), flags=re.DOTALL))
        except json.JSONDecodeError:
            return None
        return found if isinstance(found, dict) else None

    monkeypatch.setitem(sys.modules, "fit_or_not_baseline", _module("m", parse_prediction=parse_prediction))
    schema_reward = run(fragment("schema"))["schema_reward"]
    right = {"customer_name": "A", "order_id": "ORD-12345", "issue_type": "refund", "sentiment": "neutral"}
    right |= {"refund_requested": True}
    said = [json.dumps(right), json.dumps(right | {"order_id": "ORD-1"}), "no", json.dumps(right)]
    assert schema_reward(said, ["email_json"] * 3 + ["other"]) == [1.0, 0.0, 0.0, None]
    rows = [{"prompt": CHAT, "task": "email_json"}, {"prompt": CHAT, "task": "chat"}]
    args = GRPOConfig(max_steps=1, per_device_train_batch_size=16, max_completion_length=4)
    trainer = GRPOTrainer(model, schema_reward, args, Dataset.from_list(rows))
    trainer.train()
    assert trainer.state.log_history[0]["rewards/schema_reward/not_applicable"] == 8


def test_its_command_lines_are_those_of_the_examples() -> None:
    """The example's own tests run the long ones, at two steps."""
    lines = [
        line.replace("content/courses/finetuning/code/", f"{ROOT}/examples/") for line in fragment("smoke").split("\n")
    ]
    done = shell(lines[1])
    assert done.returncode == 0, done.stderr
    loop = fragment("ablation").replace("content/courses/finetuning/code/", "")
    words = shlex.split(loop.replace("\\\n", " ").replace(";", " "))
    flags = [word for word in words if word.startswith("--")]
    assert flags == ["--full", "--model", "--loss-type", "--scale-rewards", "--max-steps", "--report-to"]
    from scratch_example import scratch

    shown = subprocess.run([sys.executable, str(scratch.__file__), "--help"], capture_output=True, text=True).stdout
    assert all(flag in shown for flag in [*flags, "--is-level", "--smoke"])
    assert lines[0].endswith("grpo_from_scratch.py --smoke")  # which its own test runs


def test_every_setting_that_the_texts_name_is_taken() -> None:
    """Whatever is written `field=value` in one of them."""
    taken = {}
    for number in ("001", "003", "004"):
        for name, value in re.findall(r"\b([a-z]\w+)=(\"[^\"]*\"|'[^']*'|[\w.+-]*[\w])", text(number)):
            if name in FIELD_MAP:
                taken[name, value] = number
    assert len(taken) > 40
    assert len({name for name, _ in taken}) > 35
    for name, value in taken:
        given = {name: ast.literal_eval(value)}
        config = GRPOConfig if "grpo" in FIELD_MAP[name].algorithms else RLOOConfig
        assert getattr(config(**given), name) == given[name]
