"""Scripts written for TRL run after changing one import, as far as they are at hand as text.

The texts lie beside the repository, in `../shared/seeds`; where they do not, tests/test_trl_scripts.py has the same
paths in code of ours. A small model and data set of this machine's stand in for the hub's names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from chat_model import save_chat_model
from grpo_toolbox.api.trainer import GRPOTrainer
from grpo_toolbox.errors import ConfigError

SEEDS = Path(__file__).parents[2] / "shared" / "seeds"
pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason="the texts are not beside the repository")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def seed(number: str) -> str:
    (path,) = SEEDS.glob(f"{number}_*.txt")
    return path.read_text(encoding="utf-8")


def between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    return text[start : text.index(end, start + len(begin))]


def changed(script: str, model: str) -> str:
    """The script with the one import changed, and the hub's model replaced by the small one."""
    script = re.sub(r"from trl(?=[ .])", "from grpo_toolbox", script)
    return re.sub(r'"(?:Qwen|google)/[^"]+"', repr(model), script)


def conversations(*_: Any, **__: Any) -> Dataset:
    rows = [{"prompt": [{"role": "user", "content": "What is 2+2?"}], "solution": "$4$", "answer": "4", "task": "math"}]
    return Dataset.from_list(rows * 2)


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub: its data set is a small one, dashboards stay on this machine, and two short steps are enough."""
    built = GRPOTrainer._built

    def short(trainer: Any) -> Any:
        trainer._config.rollout.max_new_tokens = min(trainer._config.rollout.max_new_tokens, 24)
        trainer._config.trainer.max_steps = min(trainer._config.trainer.max_steps, 2)
        return built(trainer)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", conversations)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(GRPOTrainer, "_built", short)


def run(script: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "script", **names}
    exec(compile(script, "script", "exec"), space)
    return space


def test_the_quick_start(model: str) -> None:
    script = between(seed("001"), "# train_grpo.py", "accelerate launch")
    trainer = run(changed(script, model))["trainer"]
    assert trainer.state.global_step == 2
    assert "rewards/accuracy_reward/mean" in trainer.state.log_history[0]


def test_training_with_lora(model: str) -> None:
    begin = "from datasets import load_dataset\nfrom trl import GRPOTrainer, GRPOConfig"
    script = between(seed("001"), begin, "Agent training")
    trainer = run(changed(script, model))["trainer"]
    assert trainer.state.global_step == 2
    assert hasattr(trainer.model, "peft_config")


def test_custom_reward_functions(model: str) -> None:
    text = seed("001")
    functions = between(text, "# Reward based on answer correctness", "# Reward based on output format")
    functions += between(text, "# Reward based on output format", "Pass reward functions to the trainer")
    last = text.index("Pass reward functions to the trainer")
    construct = between(text[last:], "trainer = GRPOTrainer(", "Reward functions can be")
    head = "from trl import GRPOTrainer\n"
    rows = conversations().add_column("ground_truth", ["4", "4"])
    plain = [{"prompt": "2+2=", "ground_truth": "4"}]
    space = run(changed(head + functions, model))
    assert space["reward_func"](["so \\boxed{4}", "5"], ["4", "4"]) == [1.0, 0.0]
    both = "[format_reward_func, reward_func]"
    script = changed(head + functions + construct, model).replace(both, "format_reward_func")
    trainer = run(script + "\ntrainer.train()", dataset=rows)["trainer"]
    assert "rewards/format_reward_func/mean" in trainer.state.log_history[0]
    script = script.replace("reward_funcs=format_reward_func", "reward_funcs=reward_func")
    trainer = run(script + "\ntrainer.train()", dataset=Dataset.from_list(plain * 2))["trainer"]
    assert "rewards/reward_func/mean" in trainer.state.log_history[0]


@pytest.mark.parametrize("which", ["Colocate mode", "Server mode"])
def test_vllm_configs(which: str, model: str) -> None:
    text = seed("001")
    start = text.index(which)
    block = text[text.index("from trl import GRPOConfig", start) :]
    args = run(changed(block[: block.index(")\n") + 2], model))["training_args"]
    assert args.use_vllm


def test_tools_are_refused_with_the_word_that_they_come_later(model: str) -> None:
    script = between(seed("001"), "from trl import GRPOTrainer\n\ndef multiply", "Tools must be")
    with pytest.raises(ConfigError, match="tools come later"):
        run(changed(script, model), reward_func=len, dataset=conversations())


def blocks() -> list[str]:
    """The python blocks of the page of recipes, which has lost its line breaks."""
    return re.findall(r"```python (.*?) ```", seed("003"), flags=re.DOTALL)


def arguments(block: str) -> str:
    """The call of a config, without the comments that swallow what follows on their line."""
    call = block[block.index("GRPOConfig(") + len("GRPOConfig(") :]
    pairs = re.findall(r"(\w+)=(\"[^\"]*\"|'[^']*'|[\w.+-]+)(?=,)", call)
    return "GRPOConfig(" + ", ".join(f"{name}={value}" for name, value in pairs) + ")"


@pytest.mark.parametrize("which", [0, 1])
def test_the_recipes_of_configs_run(which: int, model: str) -> None:
    configs = [block for block in blocks() if "training_args = GRPOConfig(" in block]
    assert len(configs) == 2
    call = arguments(configs[which])
    assert ("adamw_8bit" in call, "use_vllm=True" in call) == ((True, False), (False, True))[which]
    script = f"from trl import GRPOConfig, GRPOTrainer\nargs = {call}"
    script += f"\ntrainer = GRPOTrainer(model={model!r}, reward_funcs=len_reward, args=args, train_dataset=data)\n"

    def len_reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(one[0]["content"])) for one in completions]

    space = run(changed(script + "trainer.train()", model), data=conversations(), len_reward=len_reward)
    trainer = space["trainer"]
    assert trainer.state.global_step == 2
    assert space["args"].max_prompt_length in (256, 512)
