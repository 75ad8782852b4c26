"""json_schema: the completion is a JSON document of a given form, or has the fields of the data's."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_toolbox.errors import ConfigError, DataError, unknown_option
from grpo_toolbox.rewards.answers import after_thinking
from grpo_toolbox.rewards.schema_golds import schema_golds
from grpo_toolbox.rewards.signatures import declare
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens

CREDITS = ("valid", "fields")
NOTHING = object()
"""What stands for a text that is no JSON document; null is one."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are documents."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_FENCE = re.compile(r"\A```(?:json|JSON)?[ \t]*\r?\n(.*?)\r?\n?```\Z", re.DOTALL)
_END = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)


def json_schema(
    schema: Mapping[str, Any] | str,
    strict: bool = True,
    credit: str = "valid",
    column: str = "answer",
    only: Mapping[str, Any] | None = None,
) -> Callable[..., list[float | None]]:
    """1.0 where the completion is a JSON document that `schema` allows; with `credit=fields` the share of right fields.

    `schema` is a JSON schema or the path of one. `strict` closes its objects: every property is needed, and no other
    allowed, where the schema does not say itself. The document is what follows the thinking, without blanks and one
    fence around it, and nothing else. `fields` compares an object's fields with those of data column `column`: equal
    ones by all that either has; None without. Rows of which a column is not as `only` has it are None. Logs
    `invalid_format_rate`, the share of documents that the schema forbids. ConfigError where jsonschema is not
    installed, or the schema is none.
    """
    if credit not in CREDITS:
        raise unknown_option("reward.credit", credit, CREDITS)
    wanted = dict(only or {})
    read = closed(_read(schema)) if strict else _read(schema)
    allows = validator(read)

    def score(
        completions: Sequence[Any], log_metric: Any = None, log_extra: Any = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        texts = [without_stop_tokens(completion_text(completion)) for completion in completions]
        asked = [all(columns[name][row] == value for name, value in wanted.items()) for row in range(len(texts))]
        documents = [document_in(text) if own else NOTHING for text, own in zip(texts, asked, strict=True)]
        valid = [document is not NOTHING and allows(document) for document in documents]
        if log_metric is not None and any(asked):
            log_metric("invalid_format_rate", 1.0 - sum(valid) / sum(asked))
        if credit == "valid":
            return [float(one) if own else None for one, own in zip(valid, asked, strict=True)]
        golds = [gold_document(gold) for gold in columns[column]]
        rows = zip(asked, documents, golds, strict=True)
        return [field_share(document, gold) if own and gold is not None else None for own, document, gold in rows]

    columns_needed = dict.fromkeys([*wanted, *([column] if credit == "fields" else [])])
    declare(score, "json_schema", ["completions", *columns_needed])
    score.golds = schema_golds(  # type: ignore[attr-defined]
        read,
        allows,
        lambda row: _document(row.get(column)),
        lambda row: all(row.get(name) == value for name, value in wanted.items()),
        exact=credit == "fields",
    )
    if credit == "fields":
        score.check_rows = lambda rows: _check_golds(rows, column, wanted, allows)  # type: ignore[attr-defined]
    return score


def document_in(text: str) -> Any:
    """The JSON document that a completion is, behind its thinking; NOTHING where it is none.

    Numbers beyond float64, NaN, and objects with a key twice are none.
    """
    whole = parsed(_unfenced(text))
    return parsed(_unfenced(after_thinking(text))) if whole is NOTHING else whole


def parsed(text: str) -> Any:
    """The document that a text is; NOTHING where it is no JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError):  # what a model wrote; the second is a thousand brackets
        return NOTHING


def _unfenced(text: str) -> str:
    text = text.strip()
    fenced = _FENCE.match(text)
    return fenced[1] if fenced else text


def gold_document(gold: Any) -> dict[str, Any] | None:
    """The object of a data column, as it is or as JSON text; None where the cell is empty, TypeError for another."""
    if gold is None or gold == "" or (isinstance(gold, float) and math.isnan(gold)):
        return None
    document = parsed(gold) if isinstance(gold, str) else gold
    if not isinstance(document, Mapping):
        raise TypeError(f"the gold document {gold!r:.60} is no JSON object")
    return dict(document)


def _document(gold: Any) -> dict[str, Any] | None:
    """As `gold_document`, None also for what is no object."""
    try:
        return gold_document(gold)
    except TypeError:
        return None


def field_share(document: Any, gold: Mapping[str, Any]) -> float:
    """The share of fields, of all that either has, that are equal in both; 0 for what is no object."""
    if not isinstance(document, Mapping):
        return 0.0
    names = {*document, *gold}
    right = sum(name in document and name in gold and same_value(document[name], gold[name]) for name in names)
    return right / len(names) if names else 1.0


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not 1, and 1 is 1.0."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def closed(schema: Any) -> Any:
    """A schema whose objects need every property and allow no other, where they do not say so themselves."""
    if isinstance(schema, Mapping):
        inner = {key: _closed_value(key, value) for key, value in schema.items()}
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and schema.get("type", "object") == "object":
            return {"required": list(properties), "additionalProperties": False} | inner
        return inner
    return [closed(one) for one in schema] if isinstance(schema, list) else schema


def _closed_value(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: closed(one) for name, one in value.items()}
    return closed(value)


def validator(schema: Any) -> Callable[[Any], bool]:
    """A check of documents against a schema, that looks nothing up elsewhere; ConfigError where the schema is none."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ConfigError("reward=json_schema needs jsonschema: pip install 'grpo-toolbox[schema]'.")
    import jsonschema
    from referencing import Registry

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"reward.schema is no JSON schema at {error.json_path}: {error.message:.200}.") from error
    formats = kind.FORMAT_CHECKER
    for key, value in _keywords(schema):
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise ConfigError(
                f"reward.schema refers to {value!r}: write what it needs into the schema ('#/$defs/...')."
            )
        if key == "format" and isinstance(value, str) and value not in formats.checkers:
            raise ConfigError(
                f"reward.schema has format {value!r}, which would not be checked: pip install 'jsonschema[format]',"
                " or write a pattern."
            )
    own = jsonschema.validators.extend(kind, {"pattern": _pattern})
    check = own(schema, registry=Registry(), format_checker=formats)

    def allows(document: Any) -> bool:
        try:
            return bool(check.is_valid(document))
        except RecursionError:  # a document that nests deeper than Python does
            return False

    return allows


def _pattern(check: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Read `pattern` as JSON schema does: `$` is the end of the text, which Python's is not, and digits are 0 to 9."""
    from jsonschema import ValidationError

    ends = _END.sub(lambda found: r"\Z" if found[0] == "$" else found[0], pattern)
    if isinstance(value, str) and not re.search(ends, value, re.ASCII):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every keyword of a schema and of those in it, with its value."""
    if isinstance(schema, list):
        yield from (found for inner in schema for found in _keywords(inner))
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (found for inner in value.values() for found in _keywords(inner))
        elif key not in _DATA:
            yield key, value
            yield from _keywords(value)


def _read(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return _plain(schema)
    if not isinstance(schema, str):
        raise ConfigError(f"reward.schema={schema!r:.60} is neither a schema nor the path of one.")
    try:
        read = parsed(Path(schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.schema={schema} cannot be read ({error}): give the path of a JSON file.") from error
    if not isinstance(read, dict):
        raise ConfigError(f"reward.schema={schema} holds no JSON object: give the path of a JSON schema.")
    return read


def _plain(value: Any) -> Any:
    """A configuration's values as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if isinstance(value, str) or not isinstance(value, Sequence) else [_plain(one) for one in value]


def _check_golds(
    rows: Sequence[Mapping[str, Any]], column: str, wanted: Mapping[str, Any], allows: Callable[[Any], bool]
) -> None:
    """Raise DataError for a gold document that the schema forbids, or where no row has one."""
    own = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    found = 0
    for row in own:
        try:
            gold = gold_document(row[column])
        except TypeError as error:
            raise DataError(f"prompt {row['prompt']!r:.60}: {error} (column '{column}').") from error
        if gold is not None and not allows(gold):
            raise DataError(f"prompt {row['prompt']!r:.60}: reward.schema forbids its gold document {gold!r:.80}.")
        found += gold is not None
    if not found:
        raise DataError(f"no row has a gold document in column '{column}': set reward.column, or reward.credit=valid.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("an object has a key twice")
    return dict(pairs)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number
