"""Files, folders and hub names to rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_toolbox.data import load_rows, read_rows
from grpo_toolbox.errors import ConfigError, DataError

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_jsonl_is_cut_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt":"left\u2028right\x85","answer":"1"}\r\n'.encode())
    assert read_rows(str(path)) == [{"prompt": "left\u2028right\x85", "answer": "1"}]


def test_jsonl_byte_order_mark_is_no_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt":"a"}')
    assert read_rows(str(path)) == [{"prompt": "a"}]


def test_jsonl_blank_lines_and_a_missing_last_line_feed_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt":"a"}\n\n{"prompt":"b"}')
    assert read_rows(str(path)) == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "b"', r"line 3: not JSON"),
        (b'["b"]', r"line 3: a row must be a JSON object"),
        (b'{"prompt": "\xff"}', r"line 3: not UTF-8"),
        (b'{"prompt": "b",}', r"line 3: not JSON"),
        (b"{'prompt': 'b'}", r"line 3: not JSON"),
        (b'{"prompt": "b", "answer": "1", "answer": "2"}', r"line 3: the key 'answer' stands twice"),
        (b'{"prompt": [{"role": "user", "role": "tool"}]}', r"line 3: the key 'role' stands twice"),
        (b'{"prompt": "b", "answer": ' + b"9" * 5000 + b"}", r"line 3: Exceeds the limit"),
        (b'{"prompt": "b", "answer": ' + b"[" * 100_000 + b"}", r"line 3: maximum recursion depth"),
        (b'{"prompt": "\\ud83d and on"}', r"line 3: '\\ud83d' is half a character"),
    ],
)
def test_a_jsonl_line_that_does_not_parse_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt":"a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, " + message):
        read_rows(str(path))


def test_an_escaped_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\\ud83d\\ude00"}\r\n')
    assert read_rows(str(path)) == [{"prompt": "\U0001f600"}]


def test_csv_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\nday code,007\nnothing,None\n"two\nlines, one cell",1e3\n')
    assert read_rows(str(path)) == [
        {"prompt": "day code", "answer": "007"},
        {"prompt": "nothing", "answer": "None"},
        {"prompt": "two\nlines, one cell", "answer": "1e3"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,1,2\n", "line 2: more fields than columns"),
        ('prompt,answer\n"a,1\nb,2\n', "line 2: not CSV"),
        ("prompt,prompt\na,b\n", "line 1: a column name stands twice"),
        ("prompt;answer\na;1\n", "line 1: the columns are separated by ';', and only commas are read"),
        ("\ufeffprompt\tanswer\r\na\t1\r\n", r"line 1: the columns are separated by '\\t'"),
    ],
)
def test_broken_csv_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows(str(path))


def test_a_short_csv_row_has_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\na,1\nb\n")
    with pytest.raises(DataError, match=r"a\.csv, row 2: no 'answer'"):
        load_rows(path=str(path))


def test_parquet_messages_are_lists_of_dicts_of_text(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = read_rows(str(tmp_path / "a.parquet"))
    assert read == rows
    message = read[0]["prompt"][0]
    assert (type(read[0]["prompt"]), type(message), type(message["content"])) == (list, dict, str)


def test_broken_parquet_is_a_data_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(str(tmp_path / "a.parquet"))


def test_missing_file_and_unknown_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"\.jsonl, \.json, \.csv, \.parquet"):
        read_rows(str(tmp_path / "a.txt"))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'grpo-toolbox\[data\]'"):
        read_rows("some/name")


def test_folder_with_a_file_per_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS[:6])
    (tmp_path / "test.csv").write_text("prompt,answer\nday code,007\n")
    assert read_rows(str(tmp_path)) == ROWS[:6]
    assert read_rows(str(tmp_path), "test") == [{"prompt": "day code", "answer": "007"}]


def test_saved_data_set_with_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": datasets.Dataset.from_list(ROWS[:6]), "test": datasets.Dataset.from_list(ROWS[6:])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert read_rows(str(tmp_path / "saved"), "test") == ROWS[6:]
    with pytest.raises(DataError, match="no split 'dev', found: train, test"):
        read_rows(str(tmp_path / "saved"), "dev")
    datasets.Dataset.from_list(ROWS[:6]).save_to_disk(str(tmp_path / "one"))
    assert read_rows(str(tmp_path / "one")) == ROWS[:6]


@pytest.mark.usefixtures("datasets_cache")
def test_copy_of_a_hub_folder_with_subsets(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for subset, rows in (("main", ROWS[:6]), ("other", ROWS[6:])):
        (tmp_path / "copy" / subset).mkdir(parents=True)
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / "copy" / subset / "train-00000-of-00001.parquet"
        )
    assert read_rows(str(tmp_path / "copy"), "train", subset="other") == ROWS[6:]


@pytest.mark.usefixtures("datasets_cache")
def test_a_split_that_a_folder_has_not_is_a_data_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-1.jsonl", ROWS)
    with pytest.raises(DataError, match=r"split dev.*train"):
        read_rows(str(tmp_path), "dev")


def test_load_holds_rows_out_and_caps_training_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    train, held_out = load_rows(path=path, eval_size=3, size=5, seed=4)
    assert (len(train), len(held_out)) == (5, 3)
    assert not [row for row in train if row in held_out]
    assert load_rows(path=path) == (ROWS, [])


def test_load_takes_evaluation_from_its_own_file(tmp_path: Path) -> None:
    path, other = write_jsonl(tmp_path / "a.jsonl", ROWS[:6]), write_jsonl(tmp_path / "b.jsonl", ROWS[6:])
    assert load_rows(path=path, eval_path=other) == (ROWS[:6], ROWS[6:])
    assert load_rows(path=path, eval_path=other, eval_size=2) == (ROWS[:6], ROWS[6:8])


def test_load_takes_evaluation_from_its_own_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS[:6])
    write_jsonl(tmp_path / "test.jsonl", ROWS[6:])
    assert load_rows(path=str(tmp_path), eval_split="test") == (ROWS[:6], ROWS[6:])


def test_one_file_has_no_evaluation_split_so_rows_are_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    train, held_out = load_rows(path=path, eval_split="test", eval_size=4)
    assert (len(train), len(held_out)) == (6, 4)
    assert "data.eval_split=test is not used" in caplog.text


def test_evaluation_prompts_that_are_trained_on_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = write_jsonl(tmp_path / "a.jsonl", ROWS[:6]), write_jsonl(tmp_path / "b.jsonl", ROWS[4:])
    load_rows(path=path, eval_path=other)
    assert "2 of 6 evaluation prompts are also training prompts" in caplog.text


def test_gsm8k_rows_keep_the_raw_answer(tmp_path: Path) -> None:
    row = {"question": "2 boxes of 36?", "answer": "2 * 36 = <<2*36=72>>72\n#### 72"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    train, _ = load_rows(path=path, prompt_column="question")
    assert train == [{"prompt": row["question"], "answer": row["answer"]}]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"size": 0}, r"data\.size=0"),
        ({"eval_size": -1}, r"data\.eval_size=-1"),
        ({"task": "leg_counting"}, r"data\.task='leg_counting' is only for builtin:"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, setting: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rows(path=write_jsonl(tmp_path / "a.jsonl", ROWS), **setting)


def test_importing_the_data_module_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym'}"
    code = f"import sys, grpo_toolbox.data; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
