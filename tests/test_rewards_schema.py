"""json_schema: which documents a schema allows, the share of right fields. The example is an e-mail about an order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.schema import NOTHING, closed, document_in, field_share, same_value, validator

ORDER = str(Path(__file__).parents[1] / "examples" / "order_email.json")
SCHEMA = json.loads(Path(ORDER).read_text())
EMAIL = {
    "customer_name": "Ada Park",
    "order_id": "ORD-48213",
    "issue_type": "shipping",
    "refund_requested": False,
    "sentiment": "negative",
}
SAID = json.dumps(EMAIL)


def but(**changes: Any) -> str:
    return json.dumps({**EMAIL, **changes})


def without(*names: str) -> str:
    return json.dumps({name: value for name, value in EMAIL.items() if name not in names})


TEXTS = [
    (SAID, 1.0),
    (f"  \n{SAID}\n", 1.0),
    (f"{SAID}<|im_end|>", 1.0),
    (f"```json\n{SAID}\n```", 1.0),
    (f"```\n{json.dumps(EMAIL, indent=2)}\n```<|im_end|>", 1.0),
    (f"<think>Is it {{}}? No.</think>\n{SAID}", 1.0),
    (but(customer_name="</think> Ada"), 1.0),  # a tag inside of a string is text
    (but(customer_name="Zoë 漢"), 1.0),
    (f"<think>{SAID}", 0.0),  # still thinking
    (f"Here it is: {SAID}", 0.0),
    (f"{SAID}\nHope that helps!", 0.0),
    (f"{SAID}\n{SAID}", 0.0),
    (f"```json\n{SAID}\n```\n```json\n{SAID}\n```", 0.0),
    (f"[{SAID}]", 0.0),
    (json.dumps(SAID), 0.0),  # text that holds a document
    *((text, 0.0) for text in ("", "null", "true", "{}", "[]", "not json", SAID[:-1], SAID.replace('"', "'"))),
    (without("sentiment"), 0.0),
    (but(priority="high"), 0.0),
    (but(order_id="ORD-4821"), 0.0),
    (but(order_id="ORD-48213\n"), 0.0),  # Python's $ would let it pass
    (but(order_id="ORD-482133"), 0.0),
    (but(order_id=" ORD-48213"), 0.0),
    (but(order_id="ORD-４８２１３"), 0.0),  # digits of another script
    (but(order_id=48213), 0.0),
    (but(order_id=None), 0.0),
    (but(issue_type="Shipping"), 0.0),
    (but(issue_type=["shipping"]), 0.0),
    (but(refund_requested="false"), 0.0),
    (but(refund_requested=0), 0.0),
    (but(sentiment="angry"), 0.0),
    (SAID[:-1] + ', "sentiment": "positive"}', 0.0),  # a key twice
    (SAID.replace("false", "NaN"), 0.0),
    (SAID.replace("false", "False"), 0.0),
    (SAID[:-1] + ",}", 0.0),
    ("[" * 100_000, 0.0),
    ('{"a":' * 50_000, 0.0),
    ("9" * 5000, 0.0),  # more digits than Python reads
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_a_document_is_allowed_or_not(text: str, expected: float) -> None:
    reward = build_reward("json_schema", schema=ORDER)
    assert reward(completions=[text, [{"role": "assistant", "content": text}]]) == [expected, expected]


def test_a_schema_comes_as_a_path_or_as_it_is() -> None:
    for schema in (ORDER, SCHEMA):
        assert build_reward("json_schema", schema=schema)(completions=[SAID, "{}"]) == [1.0, 0.0]


def test_strict_closes_objects_where_the_schema_does_not_say_itself() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"a": inner, "properties": {"type": "string"}},  # a field of that name, too
        "required": ["a"],
    }
    texts = [
        '{"a":{"x":1}}',
        '{"a":{"x":1},"properties":"p"}',
        '{"a":{}}',
        '{"a":{"x":1,"y":2}}',
        '{"a":{"x":1},"b":2}',
    ]
    assert build_reward("json_schema", schema=schema)(completions=texts) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert build_reward("json_schema", schema=schema, strict=False)(completions=texts) == [1.0] * 5
    assert closed(schema)["required"] == ["a"]
    assert schema["properties"]["a"] == inner  # what was given stays as it is


def test_numbers_beyond_float64_are_no_documents() -> None:
    assert [document_in(text) is NOTHING for text in ("1e999", "-1e999", "NaN", "Infinity", "1e308")] == [True] * 4 + [
        False
    ]
    assert document_in("null") is None


def test_other_rows_are_not_applicable() -> None:
    reward = build_reward("json_schema", schema=ORDER, only={"task": "email_json"})
    assert reward.columns_needed() == ("task",)
    logged: dict[str, float] = {}
    tasks = ["email_json", "gsm8k", "email_json", None]
    completions = [SAID, "72", "72", SAID]
    assert reward(completions=completions, task=tasks, log_metric=logged.__setitem__) == [1.0, None, 0.0, None]
    assert logged == {"invalid_format_rate": 0.5}


# ---- fields


def test_fields_are_the_share_that_is_right() -> None:
    reward = build_reward("json_schema", schema=ORDER, credit="fields")
    completions = [
        *(
            SAID,
            but(sentiment="neutral"),
            but(refund_requested=0, sentiment="neutral"),
            without("sentiment", "order_id"),
        ),
        *(but(priority="high"), "72", f"[{SAID}]", "{}"),
    ]
    # five fields: all, four, three, three; five of six where one is invented
    expected = [1.0, 0.8, 0.6, 0.6, 5 / 6, 0.0, 0.0, 0.0]
    for gold in (SAID, EMAIL):  # as text, as an object
        assert reward(completions=completions, answer=[gold] * 8) == pytest.approx(expected)
    assert reward(completions=[SAID] * 3, answer=[None, "", float("nan")]) == [None] * 3


def test_golds_that_the_schema_forbids_are_refused_before_a_run() -> None:
    reward = build_reward("json_schema", schema=ORDER, credit="fields", only={"task": "email_json"})
    row = {"prompt": "p", "task": "email_json"}
    reward.check_rows([{**row, "answer": SAID}, {**row, "answer": None}, {**row, "task": "gsm8k", "answer": "72"}])
    for answer, said in ((but(order_id="48213"), "forbids"), ("72", "no JSON object"), (None, "no row has a gold")):
        with pytest.raises(DataError, match=said):
            reward.check_rows([{**row, "answer": answer}])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        *((1, 1.0, True), (True, 1, False), (0, False, False), ("1", 1, False), (None, 0, False), (None, None, True)),
        *(([1, 2], [1, 2], True), ([1, 2], [2, 1], False), ([1], [True], False), ({"a": [1]}, {"a": [1.0]}, True)),
        *(({"a": 1}, {"a": 1, "b": 2}, False), ({}, [], False)),
    ],
)
def test_values_are_equal_as_json_has_it(one: Any, other: Any, equal: bool) -> None:
    assert same_value(one, other) is equal
    assert same_value(other, one) is equal


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(document=st.dictionaries(st.text(max_size=5), VALUES, max_size=5), indent=st.sampled_from([None, 2]))
def test_a_document_in_any_spelling_is_read_and_has_all_its_fields(
    document: dict[str, Any], indent: int | None
) -> None:
    for text in (json.dumps(document, indent=indent), json.dumps(document, ensure_ascii=False, sort_keys=True)):
        for said in (text, f"```json\n{text}\n```", f"<think>so</think>\n{text}"):
            assert field_share(document_in(said), document) == 1.0


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(EMAIL)),
    value=st.none() | st.integers(-3, 3) | st.text(st.sampled_from("ORD-0123456789\n "), max_size=12),
)
def test_what_is_allowed_agrees_with_the_rules_written_out(name: str, value: Any) -> None:
    rules = {
        "customer_name": lambda one: isinstance(one, str),
        "order_id": lambda one: isinstance(one, str) and len(one) == 9 and one[:4] == "ORD-" and one[4:].isdigit(),
        "issue_type": lambda one: one in ("refund", "shipping", "defect", "account", "other"),
        "refund_requested": lambda one: isinstance(one, bool),
        "sentiment": lambda one: one in ("positive", "neutral", "negative"),
    }
    assert ALLOWS({**EMAIL, name: value}) == rules[name](value)


ALLOWS = validator(closed(SCHEMA))


# ---- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"reward\.schema"),
        ({"schema": "nowhere.json"}, r"reward\.schema=nowhere\.json"),
        ({"schema": 5}, r"reward\.schema=5"),
        ({"schema": {"type": "strin"}}, r"no JSON schema at \$\.type"),
        ({"schema": {"type": "string", "pattern": "["}}, r"reward\.schema"),
        ({"schema": {"$ref": "https://example.com/order.json"}}, "refers to"),
        ({"schema": {"properties": {"a": {"type": "string", "format": "no-such-format"}}}}, "would not be checked"),
        ({"schema": SCHEMA, "credit": "field"}, "Did you mean fields"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_reward("json_schema", **options)


def test_references_within_a_schema_are_followed_and_known_formats_checked() -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"$ref": "#/$defs/day"}, "format": {"const": "iso"}},
        "$defs": {"day": {"type": "string", "format": "date"}},
    }
    texts = ['{"day":"2025-02-28","format":"iso"}', '{"day":"2025-02-30","format":"iso"}']
    assert build_reward("json_schema", schema=schema)(completions=texts) == [1.0, 0.0]


def test_a_dollar_sign_in_a_class_or_escaped_is_a_character() -> None:
    schema = {"type": "string", "pattern": r"^[$€]\d+\$?$"}
    texts = ['"$5"', '"€5$"', '"5"', '"$5\\n"', '"$٥"']
    assert build_reward("json_schema", schema=schema)(completions=texts) == [1.0, 1.0, 0.0, 0.0, 0.0]
