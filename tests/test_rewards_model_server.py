"""reward_model behind a server: the forms that are spoken, and what becomes of failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import build_reward
from judge_server import Answer, Serve, Server, closed_port, failed, servers
from reward_checkpoints import templated, tokenizer_of

PROMPTS = ["1+1=", "what is 2+2?", "7"]
COMPLETIONS = ["2", "four", "seven"]
LENGTHS = [float(len(text)) for text in COMPLETIONS]
"""What the servers of these tests score by."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with servers(monkeypatch) as start:
        yield start


def build(server: Server, **options: Any) -> Any:
    return build_reward(
        "reward_model", **{"path": "judge", "base_url": server.url, "retries": 0, "retry_wait": 0.001, **options}
    )


def answer(value: Any) -> Answer:
    return Answer(json.dumps(value).encode())


def said(body: dict[str, Any]) -> str:
    """The completion in a request of any form."""
    return str(body["messages"][-1]["content"] if "messages" in body else body.get("text_2", ""))


FORMS = {
    "pooling": lambda body: {"data": [{"index": 0, "object": "pooling", "data": [[float(len(said(body)))]]}]},
    "classify": lambda body: {"data": [{"label": "LABEL_0", "probs": [float(len(said(body)))], "num_classes": 1}]},
    "score": lambda body: {"data": [{"index": 0, "score": len(said(body))}]},
    "generic": lambda body: {"scores": [len(text) for text in body["completions"]]},
}
PATHS = {"pooling": "/pooling", "classify": "/classify", "score": "/score", "generic": "/"}


@pytest.mark.parametrize("endpoint", FORMS)
def test_every_form_is_spoken(serve: Serve, endpoint: str) -> None:
    server = serve(lambda body: answer(FORMS[endpoint](body)))
    url = server.url + ("/" if endpoint == "generic" else "")
    logged: dict[str, float] = {}
    reward = build(server, base_url=url, endpoint=endpoint)
    assert reward(prompts=PROMPTS, completions=COMPLETIONS, log_metric=logged.__setitem__) == LENGTHS
    assert set(server.paths) == {PATHS[endpoint]}
    assert {body["model"] for body in server.requests} == {"judge"}
    assert logged["reward_model/requests_total"] == (1 if endpoint == "generic" else 3)


def test_what_is_sent(serve: Serve) -> None:
    server = serve(lambda body: answer(FORMS["pooling"](body)))
    build(server)(prompts=["q"], completions=["a<|im_end|>"])
    assert server.requests[-1]["use_activation"] is False  # the logit, not its sigmoid
    assert server.requests[-1]["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a‹|im_end|>"},
    ]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    build(server)(prompts=[chat], completions=[[{"role": "assistant", "content": "a"}]])
    assert [one["role"] for one in server.requests[-1]["messages"]] == ["system", "user", "assistant"]


def test_a_template_at_hand_writes_the_text(serve: Serve, tmp_path: Path) -> None:
    own = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<e>{% endfor %}"
    tokenizer_of(own).save_pretrained(tmp_path)
    server = serve(lambda body: answer({"data": [{"probs": [0.5]}]}))
    build(server, endpoint="classify", tokenizer=str(tmp_path))(prompts=["q"], completions=["a"])
    (sent,) = server.requests
    assert sent["input"] == templated("q", "a")
    assert (sent["use_activation"], sent["add_special_tokens"]) == (False, False)
    with pytest.raises(ConfigError, match=r"reward\.tokenizer=.* has no tokenizer that can be loaded"):
        build(server, tokenizer=str(tmp_path / "absent"))


def test_rows_of_the_plain_form_come_in_batches_and_may_have_no_score(serve: Serve) -> None:
    server = serve(lambda body: answer({"scores": [None if text == "four" else 1.5 for text in body["completions"]]}))
    reward = build(server, endpoint="generic", batch_size=2)
    assert reward(prompts=PROMPTS, completions=COMPLETIONS) == [1.5, None, 1.5]
    assert sorted(len(body["prompts"]) for body in server.requests) == [1, 2]


def test_several_models_behind_one_address(serve: Serve) -> None:
    server = serve(lambda body: answer({"data": [{"data": [1.0 if body["model"] == "a" else 4.0]}]}))
    logged: dict[str, float] = {}
    mean = build(server, path=["a", "b"])
    assert mean(prompts=["q"], completions=["c"], log_metric=logged.__setitem__) == [2.5]
    assert logged["reward_model/spread"] == 3.0
    assert build(server, path=["a", "b"], ensemble="min")(prompts=["q"], completions=["c"]) == [1.0]


def test_where_one_of_several_models_is_down_there_is_no_score(serve: Serve) -> None:
    server = serve(lambda body: failed(503) if body["model"] == "b" else answer({"data": [{"data": [1.0]}]}))
    with pytest.raises(RewardError, match=r"ConnectionError.*HTTP 503"):
        build(server, path=["a", "b"])(prompts=["q"], completions=["c"])


@pytest.mark.parametrize(
    "reply",
    [
        {"data": [{"data": [[0.1], [0.2]]}]},  # a token-level pooler
        {"data": [{"data": []}]},
        {"data": [{"data": ["0.1"]}]},
        {"data": [{"data": [True]}]},
        {"data": [{"data": [float("nan")]}]},
        {"data": []},
        {"object": "error"},
        [],
        None,
    ],
)
def test_what_is_no_score_is_a_failure_and_no_score(serve: Serve, reply: Any) -> None:
    server = serve(lambda body: answer(reply))
    with pytest.raises(RewardError, match=r"ConnectionError: .*an answer of another form"):
        build(server)(prompts=["q"], completions=["c"])
    tolerant = build(server, on_error="skip", max_error_rate=1.0)
    assert tolerant(prompts=["q"], completions=["c"]) == [None]


def test_too_few_scores_are_a_failure_of_the_batch(serve: Serve) -> None:
    server = serve(lambda body: answer({"scores": [1.0] * (len(body["prompts"]) - (len(body["prompts"]) == 2))}))
    tolerant = build(server, endpoint="generic", batch_size=2, on_error="skip", max_error_rate=1.0)
    assert tolerant(prompts=PROMPTS, completions=COMPLETIONS) == [None, None, 1.0]


def test_an_outage_is_repeated_and_then_named(serve: Serve) -> None:
    answers = iter([failed(500), answer({"data": [{"data": 2.0}]})])
    server = serve(lambda body: next(answers))
    logged: dict[str, float] = {}
    assert build(server, retries=1)(prompts=["q"], completions=["c"], log_metric=logged.__setitem__) == [2.0]
    assert logged["reward_model/retries_total"] == 1
    with pytest.raises(RewardError, match=r"ConnectionError: http://127.*1 tries"):
        build(server, base_url=closed_port())(prompts=["q"], completions=["c"])


def test_a_refusal_is_named_and_the_key_is_sent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "secret")
    server = serve(lambda body: failed(400))
    with pytest.raises(RewardError, match=r"refused the request \(HTTP 400"):
        build(server, api_key_env="MODEL_KEY", on_error="skip")(prompts=["q"], completions=["c"])
    assert server.authorisation == ["Bearer secret"]
