"""The tasks that need no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_toolbox.data import additions, load_rows, read_rows, word_problems
from grpo_toolbox.errors import ConfigError, DataError

CONF = Path(__file__).parents[1] / "src/grpo_toolbox/conf/data"


def test_additions_are_the_55_with_a_one_digit_sum() -> None:
    rows = additions()
    assert len(rows) == 55  # 10 + 9 + ... + 1
    assert rows[0] == {"prompt": "0+0=", "answer": "0"}
    assert {"prompt": "3+4=", "answer": "7"} in rows
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(row["answer"]) <= 9


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("max_sum=4", 15),  # 5 + 4 + 3 + 2 + 1
        ("max_sum=18", 100),  # all pairs of digits
        ("digits=2&max_sum=99", 5050),  # 100 + 99 + ... + 1
    ],
)
def test_additions_take_options_in_the_path(options: str, count: int) -> None:
    assert len(read_rows(f"builtin:additions?{options}")) == count


def test_additions_can_be_held_out_and_drawn() -> None:
    train, held_out = load_rows(path="builtin:additions", eval_size=10, size=20, seed=3)
    assert (len(train), len(held_out)) == (20, 10)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:addition", "Did you mean builtin:additions"),
        ("builtin:additions?max=4", "'max' is not an option: digits, max_sum"),
        ("builtin:additions?max_sum=-1", "max_sum=-1 must be a whole number of at least 0"),
        ("builtin:additions?digits=two", "digits='two' must be a whole number"),
        ("builtin:word_problems?max_animal=4", "'max_animal' is not an option: .*Did you mean max_animals"),
        ("builtin:word_problems?size=4", "'size' is not an option"),
        ("builtin:word_problems?min_animals=30", "refuses .*max_animals must be >= min_animals"),
        ("builtin:word_problems?min_animals=many", "refuses"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_with_the_right_ones(path: str, message: str) -> None:
    if "word_problems" in path:
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


def test_task_is_checked() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"data\.task='chain_sums' is not an option.*Did you mean chain_sum\?"):
        load_rows(path="builtin:word_problems", task="chain_sums")
    with pytest.raises(ConfigError, match=r"data\.task='chain_sum' is not for builtin:additions"):
        load_rows(path="builtin:additions", task="chain_sum")


def test_word_problems_have_right_answers() -> None:
    pytest.importorskip("reasoning_gym")
    rows = word_problems(size=20, task="chain_sum", options={"min_terms": 2, "max_terms": 2, "max_digits": 1})
    for row in rows:
        a, sign, b = row["prompt"].split(":")[1].removesuffix("=").split()
        assert row["answer"] == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert row["task"] == "chain_sum"
        assert row["difficulty"]["num_terms"] == (2, 2)


@pytest.mark.parametrize("task", ["leg_counting", "chain_sum", "gsm_symbolic"])
def test_word_problems_are_seeded_distinct_and_disjoint_from_the_held_out_ones(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    sizes = {"path": "builtin:word_problems", "task": task, "eval_size": 30}
    train, held_out = load_rows(**sizes, size=150, seed=1)
    questions = {row["prompt"] for row in train}
    assert (len(questions), len({row["prompt"] for row in held_out})) == (150, 30)
    assert not questions & {row["prompt"] for row in held_out}
    assert load_rows(**sizes, size=150, seed=1) == (train, held_out)
    other = {row["prompt"] for row in load_rows(**sizes, size=150, seed=2)[0]}
    assert len(other & questions) < 75  # neighbouring seeds are other data, not the same shifted by one


def test_held_out_word_problems_stay_the_same_with_more_training_data() -> None:
    pytest.importorskip("reasoning_gym")
    small = load_rows(path="builtin:word_problems", size=10, eval_size=10)
    large = load_rows(path="builtin:word_problems", size=40, eval_size=10)
    assert small[1] == large[1]


def test_a_small_task_keeps_held_out_and_training_questions_apart() -> None:
    pytest.importorskip("reasoning_gym")
    # One digit and two terms: a+b and a-b with digits 1 to 9 are 162 questions, so 100 + 50 must often meet.
    path = "builtin:word_problems?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    train, held_out = load_rows(path=path, task="chain_sum", size=100, eval_size=50)
    assert len({row["prompt"] for row in train} | {row["prompt"] for row in held_out}) == 150
    with pytest.raises(DataError, match="different questions to give, not 500"):
        load_rows(path=path, task="chain_sum", size=500)


@pytest.mark.parametrize("name", ["additions", "word_problems", "gsm8k", "file"])
def test_shipped_configurations_have_known_keys_only(name: str) -> None:
    loading = {"path", "subset", "split", "eval_path", "eval_split", "eval_size", "size", "seed", "task", "columns"}
    encoding = {"system_prompt", "chat", "chat_template_kwargs", "max_prompt_tokens", "on_long"}
    shipped = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert set(shipped) <= loading | encoding | {"shuffle"}
    assert "path" in shipped


def test_shipped_word_problems_load() -> None:
    pytest.importorskip("reasoning_gym")
    shipped = yaml.safe_load((CONF / "word_problems.yaml").read_text())
    shipped.pop("chat")
    train, held_out = load_rows(**shipped)
    assert (len(train), len(held_out)) == (shipped["size"], shipped["eval_size"])
