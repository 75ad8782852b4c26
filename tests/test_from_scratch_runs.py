"""The three ways to run the single-file example: the tiny task, `--smoke` and `--full`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from scratch_example import FILE, scratch, settings_of


def test_smoke_learns_under_every_loss(capsys):
    scratch.main(["--smoke"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["grpo", "dapo", "dr_grpo", "grpo"]
    assert all(float(line[line.index("reward") + 1]) > 0.8 for line in lines)
    assert [float(line[-1]) == 0 for line in lines] == [True, True, True, False]  # the KL moves groups without spread


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3 · 24 = 72\n#### 72", 1),
        ("#### 71\nno:\n#### $72.00", 1),
        ("#### 72\nno:\n#### 71", 0),
        ("so \\boxed{72}.", 1),
        ("#### \\boxed{72}", 1),
        ("#### $72$", 1),
        ("the answer is 72", 0),
        ("\\boxed{72", 0),
        ("#### seventy-two", 0),
        ("", 0),
    ],
)
def test_only_what_is_marked_as_the_answer_counts(text, reward):
    value = scratch.final_number(text, "72")
    assert (value, type(value)) == (reward, float)
    assert scratch.final_number("#### 1000", "1,000") == 1


@pytest.fixture(scope="module")
def word_problems(tmp_path_factory) -> tuple[str, str]:
    """A Qwen2 of random weights, a tokenizer with a token per character and one for `####`, and GSM8K-shaped rows."""
    folder = tmp_path_factory.mktemp("full")
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", "<unk>", "####", "1", "2", "a", " "))}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    characters.add_tokens(["####"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=8, eos_token_id=1, **shape, **heads)).save_pretrained(folder / "model")
    rows = [{"question": "a" * n, "answer": f"{n} times <<1*1=1>>\n#### {1 + n % 2}"} for n in range(1, 9)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(folder / "model"), str(folder / "train.jsonl")


SMALL = "--max-steps 2 --max-new-tokens 4 --prompts-per-step 4 --group-size 8 --rows-at-once 16 --mask-truncated 0"


@pytest.fixture
def optimizer_steps() -> Iterator[list[int]]:
    """Grows by one entry with every optimizer step."""
    steps: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    yield steps
    hook.remove()


def _metrics(printed: str) -> list[dict[str, float]]:
    words = [line.split() for line in printed.splitlines() if line.startswith("step")]
    return [dict(zip(line[::2], map(float, line[1::2]), strict=True)) for line in words]


LAB = "--full --model Qwen/Qwen3-1.7B --loss-type {loss} --scale-rewards {scale} --max-steps 300 --report-to trackio"


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_ablation_of_loss_and_scale(loss, scale, word_problems, capsys, optimizer_steps):
    model, data = word_problems
    small = [*SMALL.split(), "--model", model, "--data", data, "--report-to", "none"]
    scratch.main([*LAB.format(loss=loss, scale=scale).split(), *small])
    steps = _metrics(capsys.readouterr().out)
    assert [step["step"] for step in steps] == [1, 2]
    assert len(optimizer_steps) == 2
    assert any(step["reward_mean"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert all(0 < step["completion_tokens"] <= 4 for step in steps)


def test_a_ratio_of_sequences_takes_eight_steps_for_each_batch_of_rollouts(word_problems, capsys, optimizer_steps):
    model, data = word_problems
    scratch.main([*shlex.split(f"--full --model {model} --data {data} --is-level sequence"), *SMALL.split()])
    assert len(_metrics(capsys.readouterr().out)) == 2
    assert len(optimizer_steps) == 2 * 8


def test_adapters_and_a_reference(word_problems, capsys, optimizer_steps):
    model, data = word_problems
    options = f"--full --model {model} --data {data} --lora-r 2 --beta 0.1 --lr 1e-2 {SMALL}"
    scratch.main(shlex.split(options))
    first, second = _metrics(capsys.readouterr().out)
    assert first["kl"] == 0  # adapters begin at zero, so policy and reference are the same model
    assert second["kl"] > 0
    assert len(optimizer_steps) == 2


def test_completions_that_were_cut_off_can_be_left_out(word_problems):
    model, data = word_problems
    settings = settings_of(**scratch.FULL | {"model": model, "data": data, "max_new_tokens": 2, "max_steps": 1})
    parts, tokenizer, examples, reward = scratch.full(settings)
    ((_, _, batch, metrics),) = scratch.train(parts, tokenizer, [examples], reward, settings)
    lengths = batch["mask"].sum(dim=1)
    assert 0 < metrics["clipped_ratio"] < 1
    assert (lengths == 0).float().mean().item() == pytest.approx(metrics["clipped_ratio"])
    ends = batch["ids"][torch.arange(len(lengths)), batch["mask"].long().cumsum(dim=1).argmax(dim=1)]
    assert set(ends[lengths > 0].tolist()) == {tokenizer.eos_token_id}


def test_prompts_go_through_the_chat_template_and_gold_answers_stand_behind_the_marks(word_problems, tmp_path):
    model, data = word_problems
    _, tokenizer, plain, _ = scratch.full(settings_of(model=model, data=data))
    assert [answer for _, answer in plain] == ["2", "1"] * 4
    shutil.copytree(model, tmp_path / "chat")
    tokenizer.chat_template = "1{{ messages[0].content }}{% if add_generation_prompt %}2{% endif %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    _, _, chats, _ = scratch.full(settings_of(model=str(tmp_path / "chat"), data=data))
    before, after = tokenizer.convert_tokens_to_ids(["1", "2"])
    assert chats == [([before, *ids, after], answer) for ids, answer in plain]


def test_it_runs_as_a_script_anywhere_and_logs_to_trackio(tmp_path):
    pytest.importorskip("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, str(FILE), "--max-steps", "1", "--report-to", "trackio"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [*(tmp_path / "trackio").glob("grpo-from-scratch*")]


def test_a_mistyped_flag_or_choice_is_refused(capsys):
    for arguments, message in (("--loss-type gpro", "invalid choice: 'gpro'"), ("--betta 1", "unrecognized arguments")):
        with pytest.raises(SystemExit):
            scratch.main(arguments.split())
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_run_learns_to_add(capsys):
    torch.set_num_threads(2)
    scratch.main([])
    assert _metrics(capsys.readouterr().out)[-1]["reward_mean"] > 0.9
