"""Documents that a JSON schema allows and documents that it does not, for trying json_schema before a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_toolbox.rewards.golds import Golds, Row, from_pattern, other_digit

_FORMATS = {
    **{"date": "2024-01-31", "time": "10:30:00Z", "date-time": "2024-01-31T10:30:00Z", "email": "ann@example.org"},
    **{"uri": "https://example.org/a", "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv4": "192.0.2.1"},
    **{"hostname": "example.org", "ipv6": "2001:db8::1", "duration": "P1D", "regex": "a", "json-pointer": "/a"},
}
_TIMES = re.compile(r"(\[[^\]]*\]|\\.|[^\\\[\](){}])\{(\d+)(?:,\d*)?\}")
_DEEPEST = 20


def schema_golds(
    schema: Any,
    allows: Callable[[Any], bool],
    document_of: Callable[[Row], Any],
    asked: Callable[[Row], bool],
    exact: bool,
) -> Golds:
    """Golds of a reward that a schema decides, or the row's own document: `document_of` a row, None where it has none.

    Without the row's own document it is one that is made from the schema, where that succeeds. With `exact` only the
    row's own counts, and one with a changed field is wrong; else what the schema forbids.
    """
    made = example(schema)
    made = made if not exact and allows(made) else None

    def gold(row: Row) -> Any:
        if not asked(row):
            return None
        own = document_of(row)
        return own if own is not None and allows(own) else made

    def write(row: Row) -> str | None:
        document = gold(row)
        return None if document is None else json.dumps(document)

    def wrong(row: Row) -> dict[str, str]:
        document = gold(row)
        if document is None:
            return {}
        text = json.dumps(document)
        changed = {"cut off": text[:-1], "words before it": f"Here it is: {text}"}
        if not isinstance(document, Mapping) or not document:
            return changed
        last = list(document)[-1]
        others = {"a field is missing": {name: one for name, one in document.items() if name != last}}
        others["another field"] = {**document, "no such field": 1}
        others["another value"] = {**document, last: _other(document[last])}
        bad = {name: other for name, other in others.items() if exact or not allows(other)}
        return changed | {name: json.dumps(other) for name, other in bad.items()}

    return Golds(write, wrong, lambda row: _in_fence(write(row)))


def example(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A document that a schema is likely to allow: a guess, to be tried."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if "const" in schema:
        return schema["const"]
    for listed in ("examples", "enum"):
        if schema.get(listed):
            return schema[listed][0]
    if str(schema.get("$ref", "")).startswith("#/"):
        return example(_looked_up(root, schema["$ref"]), root, depth + 1)
    for several in ("oneOf", "anyOf"):
        if schema.get(several):
            return example({**_without(schema, several), **schema[several][0]}, root, depth + 1)
    if schema.get("allOf"):
        merged = _without(schema, "allOf")
        for one in schema["allOf"]:
            properties = {**merged.get("properties", {}), **one.get("properties", {})}
            merged = {**merged, **one, **({"properties": properties} if properties else {})}
        return example(merged, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _MAKERS[kind[0] if isinstance(kind, list) else kind](schema, root, depth)


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    names = [*properties, *(name for name in schema.get("required", ()) if name not in properties)]
    return {name: example(properties.get(name, {}), root, depth + 1) for name in names}


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any]:
    first = [example(one, root, depth + 1) for one in schema.get("prefixItems", ())]
    more = max(schema.get("minItems", 1) - len(first), 0)
    return first + [example(schema.get("items", {}), root, depth + 1) for _ in range(more)]


def _string(schema: Mapping[str, Any], root: Any, depth: int) -> str:
    if "pattern" in schema:
        repeated = _TIMES.sub(lambda match: match[1] * int(match[2]), schema["pattern"])
        return from_pattern(repeated, "a")
    text = _FORMATS.get(schema.get("format", ""), "a")
    return text + "a" * (schema.get("minLength", 0) - len(text))


def _number(schema: Mapping[str, Any], root: Any, depth: int) -> float:
    step = schema.get("multipleOf", 1)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = 0 if high is None or high > 0 else high - step
    value = -(-low // step) * step
    return value + step * (value == schema.get("exclusiveMinimum"))


_MAKERS: dict[str, Callable[[Mapping[str, Any], Any, int], Any]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "number": _number,
    "integer": _number,
    "boolean": lambda schema, root, depth: True,
    "null": lambda schema, root, depth: None,
}


def _looked_up(root: Any, reference: str) -> Any:
    found = root
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _without(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _other(value: Any) -> Any:
    """A value of the same kind that is another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (other_digit(value) or f"{value}x") if isinstance(value, str) else "another"


def _in_fence(text: str | None) -> dict[str, str]:
    return {} if text is None else {"form: fenced": f"```json\n{text}\n```"}
