"""Rows: what is refused, how it is said, what is renamed."""

from __future__ import annotations

import logging

import pytest

from grpo_toolbox.data import RESERVED_COLUMNS, check_rows, split_rows
from grpo_toolbox.errors import ConfigError, DataError


def test_columns_are_renamed_and_the_others_kept() -> None:
    rows = check_rows([{"q": "1+1", "gold": "2", "level": 3}], prompt_column="q", answer_column="gold")
    assert rows == [{"prompt": "1+1", "answer": "2", "level": 3}]


def test_missing_prompt_column_names_the_columns_and_the_likely_one() -> None:
    with pytest.raises(DataError) as caught:
        check_rows([{"question": "1+1", "answer": "2"}])
    assert str(caught.value) == (
        "data needs column 'prompt', found: question, answer. Set data.columns.prompt=question"
    )


def test_missing_prompt_column_suggests_the_nearest_spelling() -> None:
    with pytest.raises(DataError, match="Did you mean promt"):
        check_rows([{"promt": "1+1", "answer": "2"}])


def test_missing_answer_names_its_row() -> None:
    with pytest.raises(DataError, match=r"train\.jsonl, row 2: no 'answer'"):
        check_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], source="train.jsonl")


@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_empty_answer_is_a_missing_answer(answer: str | None) -> None:
    with pytest.raises(DataError, match="row 1: no 'answer'"):
        check_rows([{"prompt": "a", "answer": answer}])


def test_answers_that_are_false_values_are_answers() -> None:
    assert [row["answer"] for row in check_rows([{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": "0"}])] == [
        0,
        "0",
    ]


def test_data_without_any_answer_is_fine_unless_the_column_was_named() -> None:
    assert check_rows([{"prompt": "a"}]) == [{"prompt": "a"}]
    with pytest.raises(DataError, match=r"no column 'sollution'.*found: prompt, solution\. Did you mean solution\?"):
        check_rows([{"prompt": "a", "solution": "1"}], answer_column="sollution")


def test_answer_check_can_be_turned_off() -> None:
    rows = check_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], answer_column=None)
    assert [row["answer"] for row in rows] == ["1", None]


def test_every_row_gets_every_column() -> None:
    rows = check_rows([{"prompt": "a"}, {"prompt": "b", "hint": "x"}])
    assert [row["hint"] for row in rows] == [None, "x"]


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"reserved name: {name}"):
        check_rows([{"prompt": "a", name: "x"}])


def test_a_reserved_name_may_be_the_prompt_column_since_it_is_renamed() -> None:
    assert check_rows([{"prompts": "a"}], prompt_column="prompts") == [{"prompt": "a"}]


def test_a_column_that_stands_where_a_renamed_one_goes_gives_way_aloud(caplog: pytest.LogCaptureFixture) -> None:
    rows = check_rows([{"prompt": "a", "answer": "because ... 4", "final": "4"}], answer_column="final")
    assert rows == [{"prompt": "a", "answer": "4"}]
    assert "column 'answer' gives way" in caplog.text


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "   \n",
        [],
        [{"role": "user", "content": "  "}],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": " "}]}],
    ],
)
def test_empty_or_blank_prompt_names_its_row(prompt: object) -> None:
    with pytest.raises(DataError, match="row 2: the prompt is empty or blank"):
        check_rows([{"prompt": "fine"}, {"prompt": prompt}])


def test_message_with_null_content_names_its_row() -> None:
    with pytest.raises(DataError, match=r"row 1: a message of role 'user' has no content"):
        check_rows([{"prompt": [{"role": "user", "content": None}]}])


@pytest.mark.parametrize("content", [5, True, {"type": "text", "text": "a"}])
def test_message_content_is_text_or_parts(content: object) -> None:
    with pytest.raises(DataError, match=r"row 1: the content of a message is text or a list of parts"):
        check_rows([{"prompt": [{"role": "user", "content": content}]}])
    parts = [{"role": "user", "content": [{"type": "text", "text": " "}, {"type": "image", "image": "a.png"}]}]
    assert check_rows([{"prompt": parts}])[0]["prompt"] == parts


def test_an_assistant_that_calls_a_tool_may_have_no_content() -> None:
    prompt = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
    ]
    assert check_rows([{"prompt": prompt}])[0]["prompt"] == prompt


def test_none_entries_of_messages_are_dropped() -> None:
    prompt = [{"role": "user", "content": "a", "name": None}]
    assert check_rows([{"prompt": prompt}])[0]["prompt"] == [{"role": "user", "content": "a"}]
    assert prompt == [{"role": "user", "content": "a", "name": None}]


@pytest.mark.parametrize("prompt", [7, None, {"role": "user"}, ["a"]])
def test_a_prompt_is_text_or_messages(prompt: object) -> None:
    with pytest.raises(DataError, match="row 1: a prompt is text or a list of messages"):
        check_rows([{"prompt": prompt}])


@pytest.mark.parametrize("role", [{}, {"role": None}, {"role": 1}, {"role": " "}])
def test_a_message_needs_a_role(role: dict[str, object]) -> None:
    with pytest.raises(DataError, match="row 1: a message has no role"):
        check_rows([{"prompt": [role | {"content": "a"}]}])


def test_no_rows_are_an_error() -> None:
    with pytest.raises(DataError, match="is empty"):
        check_rows([])


def test_equal_prompts_stay_separate_rows() -> None:
    rows = check_rows([{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}])
    assert [row["answer"] for row in rows] == ["1", "2"]


def test_split_is_disjoint_complete_ordered_and_seeded() -> None:
    rows = [{"prompt": str(number)} for number in range(20)]
    train, held_out = split_rows(rows, 5, seed=1)
    assert len(held_out) == 5
    assert sorted(train + held_out, key=lambda row: int(row["prompt"])) == rows
    assert train == [row for row in rows if row in train]
    assert split_rows(rows, 5, seed=1) == (train, held_out)
    assert split_rows(rows, 5, seed=2) != (train, held_out)


@pytest.mark.parametrize("eval_size", [-1, 3, 4])
def test_split_leaves_something_to_train_on(eval_size: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_size=.* cannot be held out of 3 rows: 0 to 2 can"):
        split_rows([{"prompt": "a"}] * 3, eval_size, seed=0)


def test_checked_rows_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        check_rows([{"question": "a", "answer": "1", "extra": 2}], prompt_column="question")
    assert caplog.text == ""
