"""Every member of the axis in a short real run from the command line, and called as a function."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from grpo_toolbox.config.source import option_names
from grpo_toolbox.models.tiny import build_tokenizer, tiny_config
from grpo_toolbox.rewards import build_reward
from judge_server import Answer, Serve, said, servers
from sandboxes import sandboxes
from toolbox_runs import SMALL, all_metrics, toolbox_train

WORDS = (*SMALL, "trainer.max_steps=2", "trainer.eval_every=0")

RUNS: dict[str, dict[str, Any]] = {
    "exact_match": {"extract": "whole"},
    "math": {"fallback": "last_number"},
    "numeric": {},
    "format": {"pattern": "'[0-9]'"},
    "json_schema": {"schema": {"type": "integer"}},
    "length_penalty": {"target_chars": 1},
    "soft_overlong": {"max_tokens": 3, "cache": 2},
    "token_cost": {"budget": 1, "cost": 0.1},
    "cosine_length": {"max_tokens": 3, "correct": "numeric"},
    "repetition_penalty": {"ngram": 1},
    "duplicate_penalty": {},
    "language_consistency": {},
    "code": {"concurrency": 1},
    "hack_monitor": {"charge": 0.5},
    "weighted_sum": {"components": [{"name": "numeric"}, {"name": "length_penalty", "target_chars": 1, "weight": 0.1}]},
    "reward_model": {"device": "cpu"},
    "llm_judge": {"model": "judge", "retries": 0},
    "custom": {},
}
ALWAYS = ("exact_match", "cosine_length", "llm_judge", "weighted_sum")
"""Runs of these are made in every test run, of the others with the slow ones."""
NO_WORDS = ("language_consistency",)
"""Much of what the tiny policy writes, digits and signs, is of no language."""
TESTS = "assert double(4) == 8"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with servers(monkeypatch) as start:
        yield start


def judged(body: dict[str, Any]) -> Answer:
    """A judge that likes what has a 1 in it."""
    return said("SCORE: 1" if "1" in re.findall(r"<response-\w+>\n(.*?)\n", str(body))[-1:] else "SCORE: 0")


def options(name: str, folder: Path, serve: Serve) -> dict[str, Any]:
    """The options of a member's run, with the model or the server that it asks."""
    own = dict(RUNS[name])
    if name == "code":
        sandboxes("auto")
    if name == "reward_model":
        config = tiny_config()
        config.num_labels = 1
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        own["path"] = str(folder / "model")
    if name == "llm_judge":
        own["base_url"] = serve(judged).url
    if name == "custom":
        own["name"] = "plugs:digits"
    return own


def written(value: Any) -> str:
    """A value as a word of the command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value)


def test_every_member_has_its_run() -> None:
    assert set(RUNS) == set(option_names("reward"))


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_run_from_the_command_line(name: str, tmp_path: Path, serve: Serve) -> None:
    own = options(name, tmp_path, serve)
    words = [f"reward={name}", *(f"reward.{key}={written(value)}" for key, value in own.items())]
    if name == "code":
        rows = [json.dumps({"prompt": f"{row}+1=", "tests": TESTS}) for row in range(4)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        words += ["data=file", f"data.path={tmp_path / 'rows.jsonl'}", "data.columns.answer=null"]
    assert toolbox_train(*WORDS, *words, f"run_dir={tmp_path / 'run'}") == 0
    lines = all_metrics(tmp_path / "run")
    parts = {key.split("/")[1] for key in lines[0] if re.fullmatch("rewards/.+/scored", key)}
    assert parts == {"weighted_sum": {"numeric", "length_penalty"}, "custom": {"digits"}}.get(name, {name})
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["reward_errors"] == 0
        for part in parts:
            scored, open_ = line[f"rewards/{part}/scored"], line[f"rewards/{part}/not_applicable"]
            assert scored + open_ == 16
            assert open_ == 0 or name in NO_WORDS
        assert math.isfinite(line["loss"])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "custom"])
def test_a_member_called_as_a_function(name: str, tmp_path: Path, serve: Serve) -> None:
    reward = build_reward(name, **options(name, tmp_path, serve))
    texts = ["```python\ndef double(n):\n    return 2 * n\n```", "1", "the 12 of them", "1 + 1 = 2"]
    rows: dict[str, Any] = {"prompts": ["1+1="] * 4, "completions": texts, "completion_ids": [[5, 6]] * 4}
    scores = reward(**rows, answer=["2"] * 4, tests=[TESTS] * 4)
    assert len(scores) == 4
    assert all(one is None or math.isfinite(one) for one in scores)
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    rows |= {"prompts": [[{"role": "user", "content": "1+1="}]] * 4, "completions": conversations}
    if name != "reward_model":  # whose tokenizer has no chat template here
        assert reward(**rows, answer=["2"] * 4, tests=[TESTS] * 4) == scores
