"""From a path to rows: jsonl, csv and parquet files, Hugging Face folders and hub names, built-in tasks."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grpo_toolbox.data.builtin import PREFIX, builtin_rows
from grpo_toolbox.data.extras import import_extra
from grpo_toolbox.data.rows import Row, check_rows, split_rows
from grpo_toolbox.errors import ConfigError, DataError

log = logging.getLogger(__name__)


def load_rows(
    *,
    path: str,
    subset: str | None = None,
    split: str = "train",
    eval_path: str | None = None,
    eval_split: str | None = None,
    eval_size: int = 0,
    size: int | None = None,
    seed: int = 0,
    task: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
) -> tuple[list[Row], list[Row]]:
    """Read, check and split the data of a run. Returns (train, eval), eval empty when none was asked for.

    Evaluation rows come from `eval_path`, else from `eval_split` of `path`, else `eval_size` rows are held out of
    training; in the first two cases `eval_size` caps them (0 takes all). `size` caps the training rows; for built-in
    tasks it is the number made. `seed` draws the held-out rows and built-in tasks.
    """
    _check_sizes(path, size, eval_size, task)
    check = partial(check_rows, prompt_column=prompt_column, answer_column=answer_column)
    own_eval = eval_path is not None or (eval_split is not None and _has_splits(path))
    if eval_split is not None and not own_eval:
        log.warning(
            "data.eval_split=%s is not used: %s has no splits. data.eval_size=%d rows are held out of it.",
            eval_split,
            path,
            eval_size,
        )
    hold_out = 0 if own_eval else eval_size
    if path.startswith(PREFIX):
        train, held_out = builtin_rows(path, size=size, eval_size=hold_out, seed=seed, task=task)
    else:
        rows = check(read_rows(path, split, subset=subset), source=path)
        train, held_out = split_rows(rows, hold_out, seed)
        train = train[:size]
    if own_eval:
        where = eval_path or path
        rows = check(read_rows(where, eval_split or split, subset=subset), source=where)
        held_out = rows[: eval_size or None]
    _warn_of_overlap(train, held_out)
    return train, held_out


def read_rows(path: str, split: str = "train", *, subset: str | None = None) -> list[Row]:
    """Read all rows of a jsonl, csv or parquet file, a Hugging Face folder or hub name, or a built-in task.

    Rows are plain Python values; text stays text. `split` and `subset` choose within folders and hub data sets, and are
    not looked at for files. A jsonl line that does not parse is an error that names it.
    """
    if path.startswith(PREFIX):
        return builtin_rows(path)[0]
    place = Path(path).expanduser()
    reader = FILE_READERS.get(place.suffix.lower())
    if place.is_dir():
        return _read_folder(place, split, subset)
    if reader is not None:
        if not place.is_file():
            raise DataError(f"data.path={path!r}: there is no such file. Give a path that exists, from {Path.cwd()}.")
        return reader(place)
    if place.is_file():
        raise DataError(f"data.path={path!r} is none of the kinds of file that can be read: {', '.join(FILE_READERS)}.")
    return _load_dataset(path, split, subset)


def _has_splits(path: str) -> bool:
    return not path.startswith(PREFIX) and not Path(path).expanduser().is_file()


def _check_sizes(path: str, size: int | None, eval_size: int, task: str | None) -> None:
    if size is not None and size < 1:
        raise ConfigError(f"data.size={size} leaves nothing to train on. Set 1 or more, or null for all rows.")
    if eval_size < 0:
        raise ConfigError(f"data.eval_size={eval_size} is negative. Set 0 or more.")
    if task is not None and not path.startswith(PREFIX):
        raise ConfigError(
            f"data.task={task!r} is only for {PREFIX} paths, not for data.path={path!r}. Set data.task=null."
        )


def _warn_of_overlap(train: list[Row], held_out: list[Row]) -> None:
    trained = {_key(row) for row in train} if held_out else set()
    shared = sum(_key(row) in trained for row in held_out)
    if shared:
        log.warning(
            "%d of %d evaluation prompts are also training prompts: eval/ metrics are no held-out metrics.",
            shared,
            len(held_out),
        )


def _key(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True, default=str)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # a byte-order mark is no part of the first column's name
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from error


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    # str.splitlines would also cut at U+2028 and its like, which are legal inside JSON strings
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        row = _parse(line, f"{path}, line {number}")
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a row must be a JSON object, found {line.strip():.40}.")
        rows.append(row)
    return rows


def _parse(line: str, where: str) -> Any:
    try:
        row = json.loads(line, object_pairs_hook=_object)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg}, column {error.colno}). Write one JSON object a line."
        ) from error
    except UnicodeEncodeError as error:  # half of an escaped pair, which no tokenizer takes
        raise DataError(f"{where}: {error.object[error.start]!r} is half a character. Write both halves.") from error
    except (ValueError, RecursionError) as error:  # a key twice, thousands of digits or of brackets
        raise DataError(f"{where}: {error}. Correct the line.") from error
    return row


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object as a dict; a key that stands twice is an error, since one of its values would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' stands twice in one object")
    return row


def _read_csv(path: Path) -> list[Row]:
    # strict: a quote that never closes is an error, not one cell that holds the rest of the file
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[Row] = []
    try:
        names = reader.fieldnames or []
        if len(names) == 1 and (separators := [mark for mark in ";\t|" if mark in names[0]]):
            raise DataError(
                f"{path}, line 1: the columns are separated by {separators[0]!r}, and only commas are read. "
                "Save the file with commas."
            )
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1: a column name stands twice: {', '.join(names)}. Rename one of them.")
        for row in reader:
            if None in row:
                raise DataError(
                    f"{path}, line {reader.line_num}: more fields than columns. Quote text with commas in it."
                )
            rows.append(dict(row))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num + 1}: not CSV ({error}).") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    parquet = import_extra("pyarrow.parquet", extra="data", needed_for=f"data.path={str(path)!r}")
    try:
        return parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


FILE_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_folder(folder: Path, split: str, subset: str | None) -> list[Row]:
    if subset is not None and (folder / subset).is_dir():
        folder, subset = folder / subset, None
    for suffix, reader in FILE_READERS.items():
        if (folder / f"{split}{suffix}").is_file():
            return reader(folder / f"{split}{suffix}")
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    return _load_saved(folder, split) if saved else _load_dataset(str(folder), split, subset)


def _load_saved(folder: Path, split: str) -> list[Row]:
    datasets = import_extra("datasets", extra="data", needed_for=f"data.path={str(folder)!r}")
    loaded: Any = datasets.load_from_disk(str(folder))
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    if split not in splits:
        raise DataError(
            f"{folder} has no split '{split}', found: {', '.join(splits)}. Set data.split (data.eval_split)."
        )
    return splits[split].to_list()


def _load_dataset(path: str, split: str, subset: str | None) -> list[Row]:
    datasets = import_extra("datasets", extra="data", needed_for=f"data.path={path!r}")
    try:
        return datasets.load_dataset(path, subset, split=split).to_list()
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.path={path!r} is no file here, and subset {subset}, split {split} of it cannot be loaded: {error} "
            "Check data.path, data.subset and data.split; without a network, give a local file or folder."
        ) from error
