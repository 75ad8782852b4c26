"""llm_judge by rubric, by comparison, with several judges, with a cache and with prices, against a local server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards import build_reward
from grpo_toolbox.rewards.judge_cache import ReplyCache, request_key
from grpo_toolbox.rewards.judge_panel import vote
from grpo_toolbox.rewards.scoring import Scoring, joined_metrics
from grpo_toolbox.types import Prompt, Rollout
from judge_server import Answer, Serve, Server, between, failed, message_of, said, servers


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with servers(monkeypatch) as start:
        yield start


def build(judge: Server, **options: Any) -> Any:
    return build_reward("llm_judge", base_url=judge.url, model="grader", retry_wait=0.001, retries=0, **options)


def scored(reward: Any, completions: list[str], **columns: Any) -> tuple[list[float | None], dict[str, float]]:
    logged: dict[str, float] = {}
    inputs = {"prompts": ["q"] * len(completions), "answer": ["10"] * len(completions), **columns}
    return reward(completions=completions, log_metric=logged.__setitem__, **inputs), logged


# ---- rubric

RUBRIC = [
    {"name": "sum", "weight": 3, "description": "The sum is right."},
    {"name": "style", "description": "No word too much."},
]


def test_a_rubric_is_the_weighted_mean_of_its_criteria(serve: Serve) -> None:
    judge = serve(lambda body: said('{"reason": "fine", "sum": 5, "style": 2}'))
    scores, logged = scored(build(judge, rubric=RUBRIC, scale=[1, 5]), ["c"])
    assert scores == [pytest.approx((3 * 1.0 + 0.25) / 4)]  # (5 − 1)/4 = 1 and (2 − 1)/4 = 0.25
    assert (logged["judge/sum"], logged["judge/style"]) == (1.0, 0.25)
    (message,) = judge.asked
    assert "- sum: The sum is right.\n- style: No word too much.\n" in message
    assert 'from 1 to 5:\n{"sum": 5.0, "style": 5.0}' in message


def test_a_reply_that_leaves_out_a_criterion_abstains(serve: Serve) -> None:
    scores, logged = scored(build(serve(lambda body: said('{"sum": 1}')), rubric=RUBRIC), ["c"])
    assert (scores, logged["judge/abstained_total"]) == ([None], 1)
    assert "judge/sum" not in logged


# ---- pairs


def larger(body: dict[str, Any]) -> Answer:
    """An honest judge of numbers."""
    first, second = (float(between(message_of(body), f"response-{place}")) for place in "AB")
    return said(json.dumps({"winner": "A" if first > second else "B" if second > first else "TIE"}))


def test_the_score_is_the_share_of_comparisons_won(serve: Serve) -> None:
    judge = serve(larger)
    scores, logged = scored(build(judge, pairwise="group"), ["3", "1", "2"])
    assert scores == [1.0, 0.0, 0.5]  # 3 beats both, 2 beats 1
    assert logged["judge/requests_total"] == 6  # three pairs in two orders
    assert logged["judge/won_by_place"] == 0.0


def test_equal_completions_tie_without_a_question(serve: Serve) -> None:
    judge = serve(larger)
    scores, _ = scored(build(judge, pairwise="group"), ["1", "1", "2"])
    assert scores == [0.25, 0.25, 1.0]  # half a point of each other, none of 2
    assert len(judge.requests) == 2  # 1 and 2 in both orders; the second 1 is the same question


def test_a_judge_who_prefers_a_place_says_nothing(serve: Serve) -> None:
    judge = serve(lambda body: said('{"winner": "A"}'))
    scores, logged = scored(build(judge, pairwise="group"), ["3", "1", "2"])
    assert scores == [0.5] * 3
    assert logged["judge/won_by_place"] == 1.0


def test_groups_are_compared_within_themselves(serve: Serve) -> None:
    judge = serve(larger)
    scores, logged = scored(build(judge, pairwise="group"), ["1", "2", "8", "9"], prompts=["q", "q", "r", "r"])
    assert scores == [0.0, 1.0, 0.0, 1.0]
    assert logged["judge/requests_total"] == 4
    assert {between(message, "question") for message in judge.asked} == {"q", "r"}


def test_alone_in_its_group_a_completion_has_no_score(serve: Serve) -> None:
    judge = serve(larger)
    scores, logged = scored(build(judge, pairwise="group"), ["1"])
    assert (scores, logged["judge/abstained_total"], judge.requests) == ([None], 0, [])


def test_fewer_opponents_are_neighbours_on_either_side(serve: Serve) -> None:
    judge = serve(larger)
    scores, _ = scored(build(judge, pairwise="group", opponents=1), ["4", "1", "3", "2"])
    # the ring 4-1-3-2-4: 4 beats both, 1 loses both, 3 beats both, 2 loses both
    assert scores == [1.0, 0.0, 1.0, 0.0]
    assert len(judge.requests) == 8  # four pairs instead of six


def test_against_the_reference(serve: Serve) -> None:
    judge = serve(larger)
    scores, logged = scored(build(judge, pairwise="reference"), ["11", "9", "10"])
    assert scores == [1.0, 0.0, 0.5]  # the reference is 10
    assert logged["judge/requests_total"] == 4


def test_a_pair_without_a_verdict_in_one_order_does_not_count(serve: Serve) -> None:
    def silent_on_one(body: dict[str, Any]) -> Answer:
        return said("Hard to say.") if between(message_of(body), "response-B") == "1" else larger(body)

    scores, logged = scored(build(serve(silent_on_one), pairwise="group"), ["3", "1", "2"])
    assert scores == [1.0, None, 0.0]  # only 3 against 2 was decided
    assert logged["judge/abstained_total"] == 1


def test_an_outage_in_one_pair_leaves_the_others(serve: Serve) -> None:
    def down_on_one(body: dict[str, Any]) -> Answer:
        return failed(500) if between(message_of(body), "response-B") == "1" else larger(body)

    tolerant = build(serve(down_on_one), pairwise="group", on_error="skip", max_error_rate=1.0)
    scores, logged = scored(tolerant, ["3", "1", "2"])
    assert scores == [1.0, None, 0.0]
    assert (logged["judge/unanswered_total"], logged["judge/abstained_total"]) == (2, 0)
    with pytest.raises(RewardError, match=r"failed on completion 1 \(ConnectionError"):
        scored(build(serve(down_on_one), pairwise="group"), ["3", "1", "2"])


def test_labels_of_pairs_are_the_users(serve: Serve) -> None:
    judge = serve(lambda body: said("FIRST" if between(message_of(body), "first") == "1" else "Verdict: LAST"))
    own = {"prompt_template": "one {first}\ntwo {second}", "labels": {"FIRST": 1.0, "LAST": 0.0}}
    assert scored(build(judge, pairwise="group", **own), ["1", "2"])[0] == [1.0, 0.0]


# ---- several judges


@pytest.mark.parametrize(
    ("how", "given", "expected"),
    [
        ("mean", [1.0, 0.0, 0.5], 0.5),
        ("median", [1.0, 0.0, 0.9], 0.9),
        ("median", [1.0, 0.0], 0.5),
        ("majority", [1.0, 1.0, 0.0], 1.0),
        ("majority", [1.0, 0.0], None),
        ("majority", [1.0, 0.5, 0.0], None),
    ],
)
def test_votes(how: str, given: list[float], expected: float | None) -> None:
    assert vote([{"score": one} for one in given], how) == (None if expected is None else {"score": expected})


def by_model(said_by: dict[str, Any]) -> Any:
    answers = {model: one if isinstance(one, Answer) else said(one) for model, one in said_by.items()}
    return lambda body: answers[body["model"]]


def test_several_judges_vote_and_their_difference_is_reported(serve: Serve) -> None:
    judge = serve(by_model({"grader": "SCORE: 1", "b": "SCORE: 0.5", "c": "SCORE: 0"}))
    extras: dict[str, list[Any]] = {}
    reward = build(judge, judges=[{"model": "b", "temperature": 0.7}, {"model": "c", "request": {"seed": 3}}])
    scores, logged = scored(reward, ["c"], log_extra=extras.__setitem__)
    assert (scores, logged["judge/disagreement"], logged["judge/requests_total"]) == ([0.5], 1.0, 3)
    assert extras["judge_reply"] == [["SCORE: 1", "SCORE: 0.5", "SCORE: 0"]]
    sent = {body["model"]: (body["temperature"], body.get("seed")) for body in judge.requests}
    assert sent == {"grader": (0.0, None), "b": (0.7, None), "c": (0.0, 3)}


@pytest.mark.parametrize(
    ("b", "c", "expected"),
    [
        ("no idea", "SCORE: 0", 0.5),  # two of three have a verdict
        ("no idea", "none", None),  # one of three is not enough
        (failed(500), "SCORE: 0", 0.5),
    ],
)
def test_judges_without_a_verdict_do_not_vote(serve: Serve, b: Any, c: Any, expected: float | None) -> None:
    judge = serve(by_model({"grader": "SCORE: 1", "b": b, "c": c}))
    scores, _ = scored(build(judge, judges=[{"model": "b"}, {"model": "c"}]), ["c"])
    assert scores == [expected]


def test_too_many_judges_that_are_down_are_an_outage(serve: Serve) -> None:
    judge = serve(by_model({"grader": "SCORE: 1", "b": failed(500), "c": failed(500)}))
    with pytest.raises(RewardError, match=r"ConnectionError.*HTTP 500"):
        scored(build(judge, judges=[{"model": "b"}, {"model": "c"}]), ["c"])


def test_a_key_goes_to_its_own_address_only(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    one, other = (serve(lambda body: said("SCORE: 1")) for _ in range(2))
    reward = build(one, api_key_env="JUDGE_KEY", judges=[{"model": "b"}, {"base_url": other.url}])
    scored(reward, ["c"])
    assert one.authorisation == ["Bearer secret"] * 2
    assert other.authorisation == [None]


# ---- counters


def test_tokens_and_costs_are_counted(serve: Serve) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 20}
    judge = serve(lambda body: said("SCORE: 1", usage=usage))
    _, logged = scored(build(judge, price={"prompt": 2.0, "completion": 10.0}), ["c", "d"])
    assert (logged["judge/prompt_tokens_total"], logged["judge/completion_tokens_total"]) == (2000, 40)
    assert logged["judge/cost_total"] == pytest.approx(2 * (1000 * 2 + 20 * 10) / 1e6)
    assert "judge/cost_total" not in scored(build(judge), ["c"])[1]


def test_counts_of_a_step_add_up_over_its_groups_and_judges(serve: Serve) -> None:
    judge = serve(lambda body: said("SCORE: 1"))
    one = {"name": "llm_judge", "base_url": judge.url, "model": "grader"}
    reward = build_reward("weighted_sum", components=[one, {**one, "model": "another"}])
    prompts = [Prompt(row, f"q{row}", (1,), {"answer": "a"}) for row in range(3)]
    with Scoring(reward, group_size=1) as scoring:
        for row, prompt in enumerate(prompts):  # as the engine hands them over
            scoring.add(row, [Rollout(prompt, (1,), (0.0,), "stop", "c")])
        metrics = scoring.scores().metrics
    assert metrics["judge/requests_total"] == len(judge.requests) == 6
    assert joined_metrics([metrics, metrics], [3, 3])["judge/requests_total"] == 12


@pytest.mark.parametrize("usage", [None, 5, {}, {"prompt_tokens": "many", "completion_tokens": -3}])
def test_a_server_that_counts_no_tokens_is_none_the_worse(serve: Serve, usage: Any) -> None:
    scores, logged = scored(build(serve(lambda body: said("SCORE: 1", usage=usage))), ["c"])
    assert (scores, logged["judge/prompt_tokens_total"]) == ([1.0], 0)


# ---- cache


def test_replies_are_kept_from_run_to_run(serve: Serve, tmp_path: Path) -> None:
    judge = serve(lambda body: said("SCORE: 1", usage={"prompt_tokens": 5}))
    first, logged = scored(build(judge, cache=str(tmp_path)), ["c", "d"])
    assert logged["judge/cache_hits_total"] == 0
    again, logged = scored(build(judge, cache=str(tmp_path)), ["c", "d"])
    assert first == again == [1.0, 1.0]
    assert (len(judge.requests), logged["judge/cache_hits_total"], logged["judge/prompt_tokens_total"]) == (2, 2, 0)


@pytest.mark.parametrize(
    "other",
    [{"temperature": 0.5}, {"request": {"seed": 1}}, {"system_prompt": "Be kind."}, {"max_tokens": 9}, {"scale": 2.0}],
)
def test_another_question_is_another_entry(serve: Serve, tmp_path: Path, other: dict[str, Any]) -> None:
    judge = serve(lambda body: said("SCORE: 1"))
    scored(build(judge, cache=str(tmp_path)), ["c"])
    scores, _ = scored(build(judge, cache=str(tmp_path), **other), ["c"])
    asked_again = "scale" not in other  # which only says how the reply is read
    assert len(judge.requests) == 1 + asked_again
    assert scores == [1.0 if asked_again else 0.5]


def test_the_key_of_a_request_is_its_content() -> None:
    assert request_key({"model": "m", "messages": [{"role": "user", "content": "x"}]}) == request_key(
        {"messages": [{"content": "x", "role": "user"}], "model": "m"}
    )
    assert request_key({"model": "m"}) != request_key({"model": "n"})


@pytest.mark.parametrize("failure", [failed(500), said(None), said("no verdict"), said("SCORE: 1", "length")])
def test_failures_are_never_kept(serve: Serve, tmp_path: Path, failure: Answer) -> None:
    answers = iter([failure, said("SCORE: 1")])
    judge = serve(lambda body: next(answers))
    reward = build(judge, cache=str(tmp_path), on_error="skip", max_error_rate=1.0)
    assert scored(reward, ["c"])[0] == [None]
    assert [*tmp_path.rglob("*.json")] == []
    assert scored(reward, ["c"])[0] == [1.0]


@pytest.mark.parametrize("damage", [b"", b'{"reply": "SCO', b"[]", b'{"reply": 1}', b"\xff", b'{"reply": "gone"}'])
def test_a_damaged_entry_is_asked_for_again(serve: Serve, tmp_path: Path, damage: bytes) -> None:
    judge = serve(lambda body: said("SCORE: 1"))
    reward = build(judge, cache=str(tmp_path))
    scored(reward, ["c"])
    (entry,) = tmp_path.rglob("*.json")
    entry.write_bytes(damage)
    assert scored(reward, ["c"])[0] == [1.0]
    assert (len(judge.requests), json.loads(entry.read_bytes())["reply"]) == (2, "SCORE: 1")


def test_a_folder_that_cannot_be_written_costs_the_cache_and_no_more(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    reward = build(serve(lambda body: said("SCORE: 1")), cache=str(tmp_path / "file" / "below"))
    assert scored(reward, ["c", "d"])[0] == [1.0, 1.0]
    assert [record.getMessage().count("keeps no replies") for record in caplog.records] == [1]


WRITER = """
import sys
from grpo_toolbox.rewards.judge_cache import ReplyCache
cache = ReplyCache(sys.argv[1])
for turn in range(60):
    cache.put("ab" * 32, {"reply": sys.argv[2] * 20_000})
    kept = cache.get("ab" * 32)
    assert kept is not None and len(set(kept["reply"])) == 1 and len(kept["reply"]) == 20_000, turn
"""


def test_processes_that_write_the_same_entry_never_see_half_of_one(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), letter]) for letter in "xy"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ab" * 32 + ".json"]
    assert ReplyCache(tmp_path).get("ab" * 32) is not None


def test_the_cache_holds_no_key_and_no_candidate(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    judge = serve(lambda body: said("SCORE: 1"))
    scored(build(judge, cache=str(tmp_path), api_key_env="JUDGE_KEY"), ["c"])
    (entry,) = tmp_path.rglob("*.json")
    assert json.loads(entry.read_text()) == {"model": "grader", "reply": "SCORE: 1"}
