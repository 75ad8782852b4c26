"""The experiments end to end: grpo_tiny learns, and the others run on small models of the same shape.

What a hub or a fetch would bring is made here: a Qwen2-shaped and a Llama-shaped model with random weights, Qwen's
tokenizer without merges, and a few rows as GSM8K has them.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.utils.logging import enable_progress_bar

from grpo_toolbox.models.load import load_model
from toolbox_runs import built_run, checkpoints, metrics, steps, toolbox_train

# ---- grpo_tiny learns

COMMAND_LINES = {
    "grpo": "experiment=grpo_tiny",
    "dr_grpo": "experiment=grpo_tiny advantage=dr_grpo objective.loss_agg=token_mean",
    "rloo": "experiment=grpo_tiny advantage=rloo objective=reinforce",
    "clip_higher": "experiment=grpo_tiny objective.clip_eps_high=0.28",
}


def rewards(run_dir: Path) -> list[float]:
    return [line["reward_mean"] for line in metrics(run_dir)]


def test_a_hundred_and_twenty_steps_get_well_above_luck(tmp_path: Path) -> None:
    """The untrained policy is right once in some hundred tries."""
    given = ("experiment=grpo_tiny", "callbacks=none", "trainer.max_steps=120")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    reward = rewards(tmp_path / "run")
    assert fmean(reward[:5]) < 0.05
    assert fmean(reward[-10:]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_documented_command_line_learns(name: str, seed: int, tmp_path: Path) -> None:
    given = (*COMMAND_LINES[name].split(), "callbacks=none", f"trainer.seed={seed}")
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    assert fmean(rewards(tmp_path / "run")[-20:]) >= (0.9 if name == "grpo" else 0.85)


# ---- small models with a chat template

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> Qwen2Tokenizer:
    """Qwen's tokenizer without merges: one token per byte; turns end with <|im_end|>."""
    tokens = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def small_model(folder: Path, model: type, config: type) -> Path:
    """Write a model with random weights, hidden size 32, two layers and a tied head, and its tokenizer."""
    tokenizer = chat_tokenizer()
    shape = config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model(shape).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("qwen"), Qwen2ForCausalLM, Qwen2Config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("llama"), LlamaForCausalLM, LlamaConfig)


def gsm8k_rows(first: int, count: int) -> str:
    """Rows in GSM8K's form: the working, a calculator mark, and the answer after ####."""
    rows = [
        {
            "question": f"Ann has {n} apples and buys {n + 1} more. How many apples has she now?",
            "answer": f"She has {n}+{n + 1}=<<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n#### {2 * n + 1}",
        }
        for n in range(first, first + count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local copy: a folder with both splits."""
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "train.jsonl").write_text(gsm8k_rows(1, 12))
    (folder / "test.jsonl").write_text(gsm8k_rows(50, 5))
    return folder


SHORT = (
    *("callbacks=none", "trainer.max_steps=2", "trainer.eval_every=2", "trainer.save_every=1"),
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8"),
)
WITH_SPREAD = (  # random weights never write "#### 7": digits alone give some completions more than others
    "reward=weighted_sum",
    "reward.components=[{name: exact_match, extract: hash}, {name: 'plugs:digits', weight: 0.5}]",
    "trainer.lr=0.01",
    "trainer.warmup_steps=0",
)


# ---- grpo_qwen_gsm8k


@pytest.mark.parametrize("place", ["folder", "file"])
def test_gsm8k_from_local_folders(place: str, qwen: Path, gsm8k: Path, tmp_path: Path) -> None:
    """As the experiment stands, but for the download, the length and the size; the test split is evaluated on."""
    data = gsm8k if place == "folder" else gsm8k / "train.jsonl"
    given = ("experiment=grpo_qwen_gsm8k", f"model.path={qwen}", f"data.path={data}", "data.eval_size=3", *SHORT)
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    before, first, second = metrics(tmp_path / "run")
    assert (before["step"], before["eval/pass@1"], second["eval/pass@1"]) == (0, 0, 0)
    assert first["rewards/exact_match/mean"] == 0
    assert first["invalid_format_rate"] == 1  # no ####
    assert first["kl"] == 0
    assert checkpoints(tmp_path / "run") == [1, 2]


def test_a_pipe_gets_plain_lines(
    qwen: Path, gsm8k: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    enable_progress_bar()  # as it is in a new process: weights are loaded under a bar
    given = ("experiment=grpo_qwen_gsm8k", f"model.path={qwen}", f"data.path={gsm8k}", *SHORT[1:])
    assert toolbox_train(*given, f"run_dir={tmp_path / 'run'}") == 0
    printed = "".join(capfd.readouterr())
    assert "step 2/2" in printed
    assert not {"\r", "\x1b", "\b"} & {*printed}
    assert not [one for one in recwarn if "is_gradient_checkpointing" in str(one.message)]


def test_gsm8k_trains_the_adapter_alone(qwen: Path, gsm8k: Path, tmp_path: Path) -> None:
    """The checkpoint's model folder holds an adapter that PEFT loads on the untouched base: the policy as trained."""
    base = load_file(qwen / "model.safetensors")
    given = ("experiment=grpo_qwen_gsm8k", f"model.path={qwen}", f"data.path={gsm8k}", "data.eval_size=3", *SHORT)
    run_dir = tmp_path / "run"
    assert toolbox_train(*given, *WITH_SPREAD, f"run_dir={run_dir}") == 0
    assert [line["rewards/exact_match/mean"] for line in metrics(run_dir)[1:]] == [0, 0]
    folder = run_dir / "checkpoints" / "step-00000002" / "model"
    adapter = load_file(folder / "adapter_model.safetensors")
    assert adapter.keys() == {
        f"base_model.model.model.layers.{layer}.{part}_proj.lora_{side}.weight"
        for layer in range(2)
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        for side in "AB"
    }
    assert {adapter[name].shape[0] for name in adapter if "lora_A" in name} == {16}
    assert all(adapter[name].abs().max() > 0 for name in adapter)  # B is 0 before the first step
    assert not list(folder.glob("model*.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(qwen)
    assert all(torch.equal(value, base[name]) for name, value in plain.state_dict().items() if name in base)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("2+2=")["input_ids"]])
    with torch.no_grad():
        untrained = plain(ids).logits
        trained = PeftModel.from_pretrained(plain, folder)(ids).logits
        reloaded = load_model(str(folder))(ids).logits
    assert (trained - untrained).abs().max() > 1e-3
    assert torch.allclose(trained, reloaded, atol=1e-5)


def test_gsm8k_rewards_the_number_after_the_marker(qwen: Path, gsm8k: Path, tmp_path: Path) -> None:
    given = ("experiment=grpo_qwen_gsm8k", f"model.path={qwen}", f"data.path={gsm8k}", *SHORT)
    reward = built_run(*given, f"run_dir={tmp_path / 'run'}").reward
    verdicts = {
        "12 + 30 = 42\n#### 42": 1,
        "It is #### 42.": 1,
        "#### 41\nNo, wait.\n#### 42": 1,
        "12 + 30 = 42\n#### 43": 0,
        "The answer is 42": 0,
        "": 0,
    }
    said = [[{"role": "assistant", "content": text}] for text in verdicts]
    gold = "Twelve and thirty are <<12+30=42>>42.\n#### 42"
    assert reward(completions=said, answer=[gold] * len(said)) == [*verdicts.values()]


def test_gsm8k_prompts_are_questions_in_the_chat_template(qwen: Path, gsm8k: Path, tmp_path: Path) -> None:
    given = ("experiment=grpo_qwen_gsm8k", f"model.path={qwen}", f"data.path={gsm8k}", "data.eval_size=3", *SHORT)
    run = built_run(*given, "data.shuffle=false", f"run_dir={tmp_path / 'run'}")
    text = AutoTokenizer.from_pretrained(qwen).decode(run.data.next()[0].ids)
    assert text.startswith("<|im_start|>system\nSolve the problem step by step.")
    assert text.endswith(
        "#### <number><|im_end|>\n<|im_start|>user\nAnn has 1 apples and buys 2 more. How many apples has she now?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [prompt.columns["answer"][-4:] for prompt in run.eval_prompts] == [" 101", " 103", " 105"]


# ---- grpo_smollm


@pytest.mark.parametrize("lora", [0, 4])
def test_word_problems_with_an_adapter_and_without(lora: int, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    run_dir = tmp_path / "run"
    given = (
        "experiment=grpo_smollm",
        f"model.path={llama}",
        f"model.lora.r={lora}",
        "data.size=20",
        "data.eval_size=4",
    )
    assert toolbox_train(*given, *SHORT, *WITH_SPREAD, f"run_dir={run_dir}") == 0
    assert steps(run_dir) == [0, 1, 2]
    assert metrics(run_dir)[2]["eval/reward"] >= 0
    folder = run_dir / "checkpoints" / "step-00000002" / "model"
    assert (folder / "adapter_model.safetensors").exists() == (lora > 0)
    assert (folder / "model.safetensors").exists() == (lora == 0)
    ids = torch.tensor([[10, 20, 30]])
    with torch.no_grad():
        moved: Any = load_model(str(folder))(ids).logits - load_model(str(llama))(ids).logits
    assert moved.abs().max() > 1e-3


def test_without_smollm2_the_experiment_says_which_command_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_TOOLBOX_CACHE", str(tmp_path / "cache"))
    assert toolbox_train("experiment=grpo_smollm", f"run_dir={tmp_path / 'run'}") == 1
    said = capsys.readouterr().err
    assert "`make smollm` or `toolbox models get smollm2`" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
