"""Process reward models behind a server: what is asked, and the same rewards as from the model in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.models.tiny import build_tokenizer
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.classifier import Classifier
from grpo_toolbox.rewards.steps import step_ends, step_scores
from judge_server import Answer, Serve, Server, failed, servers
from reward_checkpoints import TEMPLATE, checkpoint, tokenizer_of
from toolbox_runs import SMALL, all_metrics, toolbox_train

TEXT = "1+1=2\n\n2+2=4"
OTHER = "so 5\n\n\n\nand 6\n\n"
PROMPTS = ["q", "what?"]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with servers(monkeypatch) as start:
        yield start


def answer(value: Any) -> Answer:
    return Answer(json.dumps(value).encode())


def ids_of(text: str) -> list[int]:
    return [*tokenizer_of(None)(text, add_special_tokens=False)["input_ids"], 1]


def inputs() -> dict[str, Any]:
    return {"prompts": PROMPTS, "completions": [TEXT, OTHER], "completion_ids": [ids_of(TEXT), ids_of(OTHER)]}


def scored(reward: Any) -> tuple[list[Any], list[Any] | None, list[Any]]:
    extras: dict[str, list[Any]] = {}
    scores = reward(**inputs(), log_extra=extras.__setitem__)
    return scores, extras.get("token_rewards"), extras["step_scores"]


def build(server: Server, path: str, **options: Any) -> Any:
    given = {"base_url": server.url, "retries": 0, "policy_tokenizer": path, **options}
    return build_reward("reward_model", path="prm", **given)


@pytest.mark.parametrize("aggregate", [None, "min", "product"])
@pytest.mark.parametrize("endpoint", ["pooling", "generic"])
def test_steps_are_scored_as_by_the_model_in_this_process(
    serve: Serve, tmp_path: Path, endpoint: str, aggregate: str | None
) -> None:
    path = checkpoint(tmp_path, head="token", labels=2, template=None)
    model = Classifier(path, "token", 1, None, "cpu", "auto")

    def score(prompt: str, text: str) -> list[float]:
        (steps,), _ = step_scores(model, [prompt], [text], "\n\n")
        assert steps is not None
        return [score for _, score in steps]

    def say(body: dict[str, Any]) -> Answer:
        if endpoint == "generic":
            rows = zip(body["prompts"], body["steps"], strict=True)
            return answer({"scores": [score(prompt, "".join(steps)) for prompt, steps in rows]})
        prompt, text = (message["content"] for message in body["messages"])
        return answer({"data": [{"data": [[1.0 - one, one] for one in score(prompt, text)]}]})

    url = serve(say)
    paid_by = {"policy_tokenizer": path if aggregate is None else None, "aggregate": aggregate, "level": "step"}
    served = scored(build(url, path, endpoint=endpoint, batch_size=1, **paid_by))
    local = scored(build_reward("reward_model", path=path, device="cpu", **paid_by))
    assert served[0] == pytest.approx(local[0], abs=1e-5)
    assert [pytest.approx(one, abs=1e-5) for one in local[2]] == served[2]
    if aggregate is None:
        assert local[1] is not None
        assert served[1] == [pytest.approx(one, abs=1e-5) for one in local[1]]


def test_tokens_of_the_served_model_are_paid_at_the_policy_s(serve: Serve, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, head="token", template=None)
    model = Classifier(path, "token", 1, None, "cpu", "auto")

    def say(body: dict[str, Any]) -> Answer:
        steps, _ = step_scores(model, body["prompts"], body["completions"], None)
        return answer({"scores": steps})

    served = scored(build(serve(say), path, endpoint="generic", level="token"))
    local = scored(build_reward("reward_model", path=path, device="cpu", level="token"))
    assert served[1] == [pytest.approx(one, abs=1e-5) for one in local[1] or []]


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("level", ["step", "token"])
def test_a_pooler_that_scores_every_token_is_read_where_the_model_in_this_process_is(
    serve: Serve, tmp_path: Path, level: str, labels: int, template: str | None
) -> None:
    """As vLLM serves a token classifier: a row of logits for each token of the text that it was sent."""
    path = checkpoint(tmp_path, head="token", labels=labels, template=template)
    model = Classifier(path, "token", 1, None, "cpu", "auto")

    def say(body: dict[str, Any]) -> Answer:
        ids = model.tokenizer(body["input"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        assert body["use_activation"] is False
        return answer({"data": [{"object": "pooling", "data": model.logits([ids])[0].tolist()}]})

    served = scored(build(serve(say), path, endpoint="pooling", level=level, tokenizer=path))
    local = scored(build_reward("reward_model", path=path, device="cpu", level=level))
    assert served[0] == pytest.approx(local[0], abs=1e-4)
    assert served[1] == [pytest.approx(one, abs=1e-4) for one in local[1] or []]
    assert served[2] == [pytest.approx(one, abs=1e-4) for one in local[2]]


@pytest.mark.parametrize("rows", [[], [0.5], [0.5] * 3, 0.5, [None] * 13])
def test_a_pooler_with_another_number_of_rows_is_a_failure_and_no_score(
    serve: Serve, tmp_path: Path, rows: Any
) -> None:
    path = checkpoint(tmp_path, head="token", template=None)
    reward = build(serve(lambda body: answer({"data": [{"data": rows}]})), path, level="token", tokenizer=path)
    with pytest.raises(RewardError, match="an answer of another form"):
        reward(prompts=["q"], completions=[TEXT], completion_ids=[ids_of(TEXT)])


def test_what_is_asked_and_how_steps_are_marked(serve: Serve, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, template=None)
    server = serve(lambda body: answer({"data": [{"data": [0.5] * body["messages"][-1]["content"].count("<s0>")}]}))
    written = "one <s0> here\n\ntwo<|end|>"  # the policy cannot write a mark, nor a control token
    reward = build(server, path, level="step", aggregate="mean", policy_tokenizer=None, step_mark="<s0>")
    assert reward(prompts=["q"], completions=[written]) == [0.5]
    (asked,) = server.requests
    said = "one < s0> here<s0>two‹|end|><s0>"
    assert asked == {
        "model": "prm",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}],
        "use_activation": False,
    }
    assert server.paths == ["/pooling"]


@pytest.mark.parametrize(
    ("rows", "score"),
    [
        ([0.25, 0.75], 1.0),  # one number per step
        ([[0.25], [0.75]], 1.0),
        ([[0.75, 0.25], [0.25, 0.75]], 1.0),  # probabilities: the second counts
        ([[0.0, 0.0], [3.0, 3.0]], 1.0),  # logits: ½ and ½
        ([[800.0, 0.0], [-800.0, 0.0]], 1.0),
    ],
)
def test_one_number_per_step_or_two(serve: Serve, tmp_path: Path, rows: list[Any], score: float) -> None:
    server = serve(lambda body: answer({"data": [{"data": rows}]}))
    reward = build(server, "", level="step", aggregate="sum", policy_tokenizer=None)
    assert reward(prompts=["q"], completions=[TEXT]) == [pytest.approx(score)]


@pytest.mark.parametrize(
    "said",
    [
        [0.5],  # one step is missing
        [0.5] * 3,
        0.5,
        [[0.1, 0.2, 0.7]] * 2,
        ["0.5", "0.5"],
        [float("nan"), 0.5],
        [None, 0.5],
    ],
)
def test_an_answer_of_another_form_is_a_failure_and_no_score(serve: Serve, said: Any) -> None:
    server = serve(lambda body: answer({"data": [{"data": said}]}))
    reward = build(server, "", level="step", aggregate="sum", policy_tokenizer=None)
    with pytest.raises(RewardError, match="an answer of another form"):
        reward(prompts=["q"], completions=[TEXT])


@pytest.mark.parametrize("said", [[], [[3, 0.5], [2, 0.5]], [[99, 0.5]], [[1.5, 0.5]], [[1, "x"]], [0.5], [[1, 2, 3]]])
def test_tokens_end_in_the_text_and_in_order(serve: Serve, said: Any) -> None:
    server = serve(lambda body: answer({"scores": [said]}))
    reward = build(server, "", level="token", endpoint="generic", aggregate="sum", policy_tokenizer=None)
    with pytest.raises(RewardError, match="an answer of another form"):
        reward(prompts=["q"], completions=[TEXT])


def test_a_row_that_was_not_answered_is_left_out_and_the_others_are_not(serve: Serve, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, template=None)

    def say(body: dict[str, Any]) -> Answer:
        text = body["messages"][-1]["content"]
        ends = step_ends(text, "\n\n")
        return failed(500) if "5" in text else answer({"data": [{"data": [0.5] * len(ends)}]})

    reward = build(serve(say), path, level="step", on_error="skip", max_error_rate=1.0)
    scores, pay, steps = scored(reward)
    assert scores == [1.0, None]
    assert pay is not None
    assert pay[1] is None
    assert steps == [[0.5, 0.5], None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "step", "endpoint": "score"}, r"level=step .* reward\.endpoint=pooling or generic, not by score"),
        ({"level": "token", "endpoint": "classify"}, r"level=token .*endpoint=pooling or generic, not by classify"),
        ({"level": "token", "endpoint": "pooling"}, r"level=token .* own tokenizer, reward\.tokenizer="),
        ({"level": "step", "policy_tokenizer": None}, r"policy_tokenizer=\$\{model\.path\}, or set reward\.aggregate"),
        ({"level": "completion", "policy_tokenizer": None, "step_mark": "<s0>"}, r"step_mark='<s0>' goes with"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("reward_model", **{"path": "prm", "base_url": "http://x", "policy_tokenizer": "p", **options})


def test_a_run_with_a_served_process_model(serve: Serve, tmp_path: Path) -> None:
    """The server pays digits at the token that wrote them."""

    def say(body: dict[str, Any]) -> Answer:
        texts = body["completions"]
        digits = [[[found.end(), 1.0] for found in re.finditer(r"\d", text)] + [[len(text), 0.0]] for text in texts]
        return answer({"scores": digits})

    words = ("trainer.max_steps=2", "trainer.eval_every=0", f"run_dir={tmp_path / 'run'}", "reward=reward_model")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    asked = (f"reward.base_url={serve(say).url}", "reward.path=prm", "reward.endpoint=generic", "reward.level=token")
    assert (
        toolbox_train(
            *SMALL, *words, *asked, f"reward.policy_tokenizer={tmp_path / 'policy'}", "advantage=reinforce_pp"
        )
        == 0
    )
    lines = all_metrics(tmp_path / "run")
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(line["reward_model/requests_total"] >= 1 for line in lines)
