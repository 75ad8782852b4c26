"""llm_judge and a server that fails: what is asked again, what is not, and what becomes of the row."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards import build_reward, score_rollouts
from grpo_toolbox.rewards.http import Patience, retry_after
from grpo_toolbox.types import Prompt, Rollout
from judge_server import Answer, Serve, closed_port, failed, message_of, said, servers

ROW: dict[str, list[Any]] = {"prompts": ["q"], "completions": ["c"], "answer": ["a"]}
RIGHT = said("SCORE: 1")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with servers(monkeypatch) as start:
        yield start


def build(url: str, **options: Any) -> Any:
    return build_reward("llm_judge", base_url=url, model="grader", **{"retry_wait": 0.001, **options})


def in_turn(*answers: Answer) -> Any:
    left = iter(answers)
    return lambda body: next(left)


@pytest.mark.parametrize(
    "trouble",
    [
        *(failed(status) for status in (408, 409, 425, 429, 500, 502, 503, 504)),
        failed(429, Retry_After="0"),
        failed(503, Retry_After="soon"),
        Answer(RIGHT.body, cut_at=20),  # the connection ends within the body
        Answer(RIGHT.body, cut_at=0),
        Answer(RIGHT.body[:30]),  # a whole body that is half a JSON text
        Answer(b"<html>Bad gateway</html>"),
        Answer(b"[" * 100_000),
        Answer(b'{"choices": []}'),
        Answer(b'{"choices": [{"message": {"content": 5}}]}'),
        Answer(b'{"choices": [{"text": "SCORE: 1"}]}'),
        Answer(b"null"),
        Answer(b"\xff\xfe", headers={"Content-Encoding": "gzip"}),
    ],
)
def test_what_failed_for_now_is_asked_again(serve: Serve, trouble: Answer) -> None:
    judge = serve(in_turn(trouble, trouble, RIGHT))
    logged: dict[str, float] = {}
    assert build(judge.url, retries=2)(**ROW, log_metric=logged.__setitem__) == [1.0]
    assert (len(judge.requests), logged["judge/requests_total"], logged["judge/retries_total"]) == (3, 3, 2)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_a_refused_request_is_not_asked_again_and_stops_the_run_in_any_case(
    serve: Serve, status: int, on_error: str
) -> None:
    judge = serve(lambda body: failed(status, Location="/elsewhere"))
    with pytest.raises(RewardError, match=rf"refused the request \(HTTP {status}: .*Check reward\.base_url"):
        build(judge.url, on_error=on_error)(prompts=["q"] * 2, completions=["a", "b"], answer=["x"] * 2)
    assert len(judge.requests) == 2


def test_the_key_is_in_no_message(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    judge = serve(lambda body: Answer(b"bad key sk-secret", 401))
    reward = build(judge.url, api_key_env="JUDGE_KEY")
    with caplog.at_level(logging.DEBUG), pytest.raises(RewardError, match=r"HTTP 401: bad key \*\*\*") as raised:
        reward(**ROW)
    assert "sk-secret" not in str(raised.value)
    assert "sk-secret" not in caplog.text
    assert "sk-secret" not in repr(vars(reward.components[0].function)) + repr(reward)


def only_a_down(body: dict[str, Any]) -> Answer:
    return failed(503) if "\na\n" in message_of(body) else RIGHT


def test_an_outage_stops_the_run_or_leaves_the_row_out(serve: Serve) -> None:  # h04.2
    judge = serve(only_a_down)
    inputs = {"prompts": ["q"] * 3, "completions": ["b", "a", "c"], "answer": ["x"] * 3}
    with pytest.raises(RewardError, match=r"'llm_judge' failed on completion 1 \(ConnectionError: .* 2 tries.*503"):
        build(judge.url, retries=1)(**inputs)
    assert len(judge.requests) == 4  # the row without answer was asked twice, the others once
    logged: dict[str, float] = {}
    tolerant = build(judge.url, retries=1, on_error="skip", max_error_rate=1.0)
    assert tolerant(**inputs, log_metric=logged.__setitem__) == [1.0, None, 1.0]
    assert (logged["judge/unanswered_total"], logged["judge/abstained_total"]) == (1, 0)  # an outage is no abstention


@pytest.mark.parametrize("garbage", [b"<html>", b"{}"])
def test_a_server_of_another_kind_is_named(serve: Serve, garbage: bytes) -> None:
    judge = serve(lambda body: Answer(garbage))
    with pytest.raises(RewardError, match=r"gave no usable answer in 1 tries, at last: an answer of another form"):
        build(judge.url, retries=0)(**ROW)


def test_nobody_listens(serve: Serve) -> None:
    with pytest.raises(RewardError, match=r"ConnectionError: http://127.* no usable answer in 3 tries"):
        build(closed_port(), retries=2)(**ROW)
    assert build(closed_port(), retries=0, on_error="skip", max_error_rate=1.0)(**ROW) == [None]


def test_a_judge_that_never_answers_is_waited_for_no_longer_than_timeout(serve: Serve) -> None:  # h04.4
    release = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        release.wait(60)
        return RIGHT

    reward = build(serve(answer).url, timeout=0.2, retries=1, on_error="skip", max_error_rate=1.0)
    assert reward(**ROW) == [None]
    strict = build(serve(answer).url, timeout=0.2, retries=0)
    with pytest.raises(RewardError, match=r"TimeoutError: .* no answer within 0\.2 s"):
        strict(**ROW)
    scored = build(serve(answer).url, timeout=0.2, retries=0, on_error="skip")
    metrics = score_rollouts(
        scored, [Rollout(Prompt(0, "q", (1,), {"answer": "a"}), (1,), (0.0,), "stop", "c")], 1
    ).metrics
    assert (metrics["rewards/llm_judge/timeouts"], metrics["rewards/llm_judge/errors"]) == (1, 0)
    assert not release.is_set()
    release.set()


def test_an_answer_that_drips_is_cut_off_too(serve: Serve) -> None:
    """Each byte comes in time, the whole never does: the limit is on the call, not on the read."""
    judge = serve(lambda body: RIGHT)
    dripping = threading.Event()

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not dripping.wait(0.02):
            handler.wfile.write(b" ")

    judge.server.RequestHandlerClass.do_POST = drip  # type: ignore[attr-defined]
    reward = build(judge.url, timeout=0.3, retries=0, on_error="skip", max_error_rate=1.0)
    assert reward(**ROW) == [None]
    assert not dripping.is_set()
    dripping.set()


# ---- pauses


def test_pauses_double_are_spread_and_have_an_end() -> None:
    patience = Patience(timeout=1, retries=9, retry_wait=1.0, max_wait=20.0, max_concurrency=1)
    for attempt, middle in ((1, 1.0), (2, 2.0), (3, 4.0)):
        waits = [patience.wait(attempt) for _ in range(200)]
        assert middle / 2 <= min(waits) < max(waits) <= middle * 1.5
        assert max(waits) - min(waits) > middle / 2  # spread over most of that range
    assert {patience.wait(400) for _ in range(10)} == {20.0}


def test_a_server_that_says_when_to_come_back_is_believed() -> None:
    patience = Patience(timeout=1, retries=9, retry_wait=0.1, max_wait=20.0, max_concurrency=1)
    assert all(7.0 <= patience.wait(1, asked=7.0) <= 7.5 for _ in range(100))


@pytest.mark.parametrize(
    ("said_by_the_server", "seconds"),
    [(None, None), ("7", 7.0), (" 1.5 ", 1.5), ("-3", None), ("nan", None), ("soon", None), ("", None)],
)
def test_retry_after_is_seconds(said_by_the_server: str | None, seconds: float | None) -> None:
    assert retry_after(said_by_the_server) == seconds


def test_retry_after_is_a_date() -> None:
    now = datetime.now(UTC)
    assert 50 < (retry_after(format_datetime(now + timedelta(minutes=1), usegmt=True)) or 0) <= 60
    assert retry_after(format_datetime(now - timedelta(minutes=1), usegmt=True)) == 0


def test_nobody_asks_while_a_server_wants_to_be_left_alone(serve: Serve) -> None:
    """Two requests are turned away for a second; until it is over, neither they nor the third are sent."""
    arrived: list[float] = []
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> Answer:
        with lock:
            arrived.append(asyncio.new_event_loop().time())
            return failed(429, Retry_After="1") if len(arrived) <= 2 else RIGHT

    reward = build(serve(answer).url, retries=2, max_concurrency=2)
    assert reward(prompts=["q"] * 3, completions=["a", "b", "c"], answer=["x"] * 3) == [1.0] * 3
    assert len(arrived) == 5
    assert min(arrived[2:]) - arrived[0] >= 1.0  # a second at least, whatever the machine does


def test_a_pause_beyond_the_limit_is_given_up(serve: Serve) -> None:
    judge = serve(lambda body: failed(429, Retry_After="3600"))
    with pytest.raises(RewardError, match=r"left alone for 3600 seconds \(HTTP 429\), more than reward\.max_wait=60"):
        build(judge.url, retries=5)(**ROW)
    assert len(judge.requests) == 1


# ---- loops


def test_the_same_reward_serves_one_event_loop_after_another_and_two_at_once(serve: Serve) -> None:
    judge = serve(lambda body: RIGHT)
    function = build(judge.url, max_concurrency=1).components[0].function

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(function(completions=[str(index)], prompts=["q"], answer=["a"]) for index in range(3))
        )

    loops = [threading.Thread(target=lambda: done.append(asyncio.run(several()))) for _ in range(2)]
    done: list[Any] = [asyncio.run(several())]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    assert done == [[[1.0]] * 3] * 3


def test_a_call_that_is_given_up_leaves_no_request_behind(serve: Serve) -> None:
    release = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        release.wait(60)
        return RIGHT

    function = build(serve(answer).url).components[0].function

    async def given_up() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(function(**ROW), 0.3)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(given_up()) == 0
    release.set()
