"""What scripts written for TRL do, in code of ours: each path of its pages once, on a small chat model."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_model import save_chat_model
from grpo_toolbox import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from grpo_toolbox.rewards import (
    AdaptiveReward,
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_grpo.py"
QUICK: dict[str, Any] = {
    "max_completion_length": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "logging_steps": 1,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def settings(folder: Path, **more: Any) -> Any:
    return GRPOConfig(output_dir=str(folder / "run"), **QUICK | more)


def chats() -> Dataset:
    system = {"role": "system", "content": "Answer in <reasoning> and <answer>."}
    rows = [
        {"prompt": [system, {"role": "user", "content": f"{a}+1?"}], "answer": str(a + 1), "solution": f"${a + 1}$"}
        for a in range(4)
    ]
    return Dataset.from_list(rows)


def said(completions: list[Any]) -> list[str]:
    return [one[0]["content"] for one in completions]


def well_formed(completions: list[Any], **kwargs: Any) -> list[float]:
    return [
        float(bool(re.search(r"<reasoning>.*</reasoning>\s*<answer>.*</answer>", one))) for one in said(completions)
    ]


def tags(completions: list[Any], **kwargs: Any) -> list[float]:
    """Partial credit, in quarters, less a little for what follows."""
    names = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [sum(0.25 for name in names if name in one) - 0.001 * len(one) for one in said(completions)]


def right(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    assert len(prompts) == len(completions) == len(answer)
    return [2.0 if gold in one else 0.0 for one, gold in zip(said(completions), answer, strict=True)]


def test_the_standard_setup(model: str, tmp_path: Path) -> None:
    """A loaded model in bfloat16, its tokenizer, an adapter, three rewards, and the model saved at the end."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    peft_config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
        lora_dropout=0.05,
    )
    trainer = GRPOTrainer(
        model=loaded,
        processing_class=tokenizer,
        reward_funcs=[tags, well_formed, right],
        args=settings(tmp_path, report_to="none", bf16=True),
        train_dataset=chats(),
        peft_config=peft_config,
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora" in name for name in moved)
    trainer.save_model(str(tmp_path / "final_model"))
    assert (tmp_path / "final_model" / "adapter_config.json").is_file()
    entry = trainer.state.log_history[0]
    assert {f"rewards/{name}/mean" for name in ("tags", "well_formed", "right")} <= set(entry)


def test_prompts_of_text_and_of_messages(model: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.append((prompts[0], completions[0], completion_ids[0]))
        assert {"trainer_state", "log_extra", "log_metric"} <= set(kwargs)
        return [float(len(ids)) for ids in completion_ids]

    for name, data in {"text": [{"prompt": "1+1="}] * 2, "chat": chats()}.items():
        GRPOTrainer(model, look, settings(tmp_path / name, max_steps=1), data).train()
    (text, plain, ids), (messages, turns, _) = seen
    assert (text, isinstance(plain, str)) == ("1+1=", True)
    assert isinstance(ids[0], int)
    assert [one["role"] for one in messages] == ["system", "user"]
    assert turns[0]["role"] == "assistant"


def test_async_rewards_wait_at_the_same_time(model: str, tmp_path: Path) -> None:
    waiting = {"now": 0, "most": 0}

    async def wait(completions: list[Any], **kwargs: Any) -> list[float]:
        waiting["now"] += 1
        waiting["most"] = max(waiting.values())
        await asyncio.sleep(0.2)
        waiting["now"] -= 1
        return [1.0] * len(completions)

    async def also(completions: list[Any], **kwargs: Any) -> list[float]:
        return await wait(completions)

    GRPOTrainer(model, [wait, also], settings(tmp_path, max_steps=1), chats()).train()
    assert waiting["most"] >= 2


def test_several_tasks_by_none(model: str, tmp_path: Path) -> None:
    """A reward that is not for a row says None, and the others alone decide."""

    def maths(completions: list[Any], task: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if one == "math" else None for one in task]

    def code(completions: list[Any], task: list[str], **kwargs: Any) -> list[float | None]:
        return [0.5 if one == "code" else None for one in task]

    data = [{"prompt": f"{task} 1", "task": task} for task in ("math", "code")]
    args = settings(tmp_path, per_device_train_batch_size=8, max_steps=1)
    trainer = GRPOTrainer(model, [maths, code], args, Dataset.from_list(data))
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["reward"] == 0.75
    assert (entry["rewards/maths/mean"], entry["rewards/code/mean"]) == (1.0, 0.5)


def test_what_rewards_log_and_when_they_run(model: str, tmp_path: Path) -> None:
    steps: list[int] = []

    def scheduled(completions: list[Any], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        log_metric("shown", 3.0)
        log_extra("length", [len(one[0]["content"]) for one in completions])
        return [float(len(one[0]["content"])) for one in completions]

    args = settings(tmp_path, log_completions=True)
    trainer = GRPOTrainer(model, scheduled, args, chats())
    trainer.train()
    assert sorted(set(steps)) == [0, 1]
    assert trainer.state.log_history[0]["shown"] == 3.0
    samples = (trainer.run_dir / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 8  # one prompt of four completions in each of two steps
    assert json.loads(samples[0])["step"] == 1


def test_stages_by_the_same_model(model: str, tmp_path: Path) -> None:
    """Form first, then correctness: each trains the model that the one before has left, in a folder of its own."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = settings(tmp_path, learning_rate=1e-2)
    first = GRPOTrainer(loaded, [tags, well_formed], args, chats(), processing_class=tokenizer)
    first.train()
    between = [value.clone() for value in loaded.parameters()]
    second = GRPOTrainer(loaded, [well_formed, tags], args, chats(), processing_class=tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(between, second.model.parameters(), strict=True))
    second.train()
    assert second.run_dir == tmp_path / "run-2"
    assert not all(torch.equal(a, b) for a, b in zip(between, loaded.parameters(), strict=True))


def test_rewards_that_adapt(model: str, tmp_path: Path) -> None:
    """An object that remembers, as scripts write it, and ours whose state is kept in checkpoints."""

    class Adaptive:
        def __init__(self) -> None:
            self.weight = 1.0
            self.__name__ = "adaptive"

        def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
            scores = [self.weight * len(one[0]["content"]) for one in completions]
            self.weight *= 0.5
            return scores

    mine = Adaptive()
    ours = AdaptiveReward(tags)
    trainer = GRPOTrainer(model, [mine, ours], settings(tmp_path), chats())
    trainer.train()
    assert mine.weight == 0.25
    assert "rewards/adaptive/mean" in trainer.state.log_history[0]
    assert "rewards/tags/weight" in trainer.state.log_history[0]


def test_the_methods_of_the_literature_as_configs(model: str, tmp_path: Path) -> None:
    methods = {
        "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": False},
        "dapo": {"epsilon_high": 0.28, "mask_truncated_completions": True, "overrides": {"rollout.max_empty_steps": 9}},
        "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "scalerl": {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "cast_lm_head_to_fp32": True},
        "sapo": {"loss_type": "sapo"},
        "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
        "entropy": {"use_adaptive_entropy": True, "top_entropy_quantile": 0.2},
        "kl": {"beta": 0.001, "num_iterations": 2, "steps_per_generation": 1},
    }
    for name, fields in methods.items():
        more = {"max_steps": 1} | fields
        trainer = GRPOTrainer(model, [tags, right], settings(tmp_path / name, **more), chats())
        assert trainer.train().global_step == more.get("num_iterations", 1), name
    plus_plus = RLOOConfig(output_dir=str(tmp_path / "rloo"), **QUICK | {"normalize_advantages": True})
    RLOOTrainer(model, tags, plus_plus, chats()).train()


def test_a_frozen_classifier_as_a_reward(model: str, tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    from reward_checkpoints import checkpoint

    path = checkpoint(tmp_path / "judge")
    judge, tokenizer = LlamaForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    args = settings(tmp_path, max_steps=1)
    trainer = GRPOTrainer(model, [judge, tags], args, chats(), reward_processing_classes=[tokenizer, None])
    trainer.train()
    assert "rewards/judge/mean" in trainer.state.log_history[0]


# ---- TRL's rewards


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_accuracy_is_of_the_last_answer_in_text_or_chat() -> None:
    completions = [r"\boxed{42}", "The answer is 42", chat(r"first \boxed{41}, then \boxed{42}"), chat("$41$")]
    assert accuracy_reward(completions, solution=["$42$"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert accuracy_reward([chat(r"\boxed{\frac{2}{4}}")], solution=["0.5"]) == [1.0]


def test_reasoning_accuracy_is_of_what_follows_the_thinking() -> None:
    completions = [r"<think>\boxed{1}</think>\boxed{2}", r"\boxed{2}", r"a|\boxed{2}"]
    assert reasoning_accuracy_reward(completions, solution=["2"] * 3) == [1.0, 0.0, 0.0]
    assert reasoning_accuracy_reward(completions[2:], ["2"], reasoning_delimiters=["|"]) == [1.0]


def test_the_form_of_thinking() -> None:
    texts = ["<think>a</think>b", "<think></think>b", "b", "<think>a</think><think>b</think>c"]
    assert think_format_reward([chat(one) for one in texts]) == [1.0, 0.0, 0.0, 0.0]


def test_what_length_and_repetition_cost() -> None:
    overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    assert overlong(completion_ids=[[1] * n for n in (6, 8, 10, 11)], other=1) == [0.0, -0.5, -1.0, -1.0]
    repeated = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    assert repeated(completion_ids=[[1, 2, 3], [1, 1, 1, 1]]) == pytest.approx([0.0, -2.0 * 2 / 3])
    cosine = get_cosine_scaled_reward(max_len=4)
    ids = [[0] * 4, [], [0] * 4]
    paid = cosine(completions=[r"\boxed{2}", r"\boxed{2}", r"\boxed{3}"], solution=["2"] * 3, completion_ids=ids)
    assert paid == pytest.approx([0.5, 1.0, -0.5])
    names = {one.__name__ for one in (overlong, repeated, cosine)}
    assert names == {"soft_overlong_punishment_reward", "repetition_penalty_reward", "cosine_scaled_reward"}


# ---- launched


def test_the_example_is_thirty_lines_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    short = source.replace("max_steps=300", "max_steps=2")
    assert short != source
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(short, str(EXAMPLE), "exec"), space)
    assert space["trainer"].state.global_step == 2


def test_accelerate_launch(model: str, tmp_path: Path) -> None:
    script = tmp_path / "train_grpo.py"
    script.write_text(
        "from grpo_toolbox import GRPOConfig, GRPOTrainer\n"
        "def length(completions, **kwargs):\n    return [float(len(one)) for one in completions]\n"
        f"args = GRPOConfig(output_dir={str(tmp_path / 'run')!r}, max_steps=1, max_completion_length=4)\n"
        f"trainer = GRPOTrainer({model!r}, length, args, [{{'prompt': '1+1='}}] * 2)\n"
        "trainer.train()\nprint('steps', trainer.state.global_step)\n"
    )
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "steps 1" in done.stdout


def test_what_differs_is_said(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = settings(tmp_path, max_prompt_length=256, use_vllm=True, per_device_train_batch_size=1, loss_type="bnpo")
    with caplog.at_level(logging.WARNING):
        GRPOTrainer(model, tags, args, chats())
    for words in (
        "longer prompts are left out",
        "rollout.engine=local",
        "a step takes 1 whole group",
        "loss_type='dapo'",
    ):
        assert words in caplog.text
