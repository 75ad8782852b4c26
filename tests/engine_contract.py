"""The contract of every engine, in this process or behind a server: one body of tests over one checkpoint.

A test file imports everything from here and gives a fixture `subject`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from grpo_toolbox.data import decode_completion
from grpo_toolbox.engines import Engine
from grpo_toolbox.engines.identity import TEXTS, Identity
from grpo_toolbox.errors import Cancelled
from grpo_toolbox.types import Prompt, Rollout, Sampling
from served_models import END, byte_tokenizer
from small_models import forced_log_probs, forced_logps

TOKENIZER = byte_tokenizer()


@dataclass(frozen=True)
class Subject:
    """An engine, and the policy whose weights it should have."""

    engine: Engine
    policy: Any
    tolerance: float = 1e-4
    """|Δ log-prob| in nats against the trainer's forward: rounding of float32 in another order."""
    limits_length: bool = True
    """Whether it can hold the stop token back."""
    reproduces: bool = True
    """Whether a seed repeats exactly when other rows share the batch."""
    dying: Callable[[], AbstractContextManager[bool]] | None = None
    """Has it die in the middle of the next generation, and says whether it comes back and mends that."""


def decode(ids: Sequence[int], finish_reason: str) -> str:
    return decode_completion(ids, TOKENIZER, finish_reason)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(index, text, tuple(TOKENIZER(text)["input_ids"])) for index, text in enumerate(texts)]


def sums(count: int) -> list[Prompt]:
    return prompts(*(f"{'0' * (index % 13)}{index}+{index}=" for index in range(count)))


def identity(policy: Any, positions: int = 100) -> Identity:
    """What the trainer tells servers by; `policy` is asked when a server is."""
    return Identity(
        tokenized={text: TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in TEXTS},
        positions=positions,
        rows=[one.ids for one in sums(3)],
        stop_ids=(END,),
        forced=lambda rows, first, temperature: [
            forced_logps(policy, row[:start], row[start:], temperature).tolist()
            for row, start in zip(rows, first, strict=True)
        ],
    )


def assert_trainers(subject: Subject, rollouts: Sequence[Rollout], temperature: float = 1.0) -> None:
    for one in rollouts:
        expected = forced_logps(subject.policy, one.prompt.ids, one.ids, temperature)
        torch.testing.assert_close(torch.tensor(one.logps), expected, atol=subject.tolerance, rtol=0)


def drawn(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [one.ids for one in rollouts]


# ---- tokens and log-probs --------------------------------------------------------------------------------------------


def test_ids_and_log_probs_are_those_of_the_trainers_forward(subject: Subject) -> None:
    rollouts = subject.engine.generate(sums(12), 2, Sampling(16))
    assert all(len(one.ids) == len(one.logps) > 0 for one in rollouts)
    assert {one.convention.is_trainers for one in rollouts} == {True}
    assert_trainers(subject, rollouts)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_temperature_is_applied_to_the_draw_and_said_of_the_log_probs(subject: Subject, temperature: float) -> None:
    """Tokens of a cool draw are likely ones: their mean log-prob at temperature 1 tells how they were drawn."""
    rollouts = subject.engine.generate(sums(16), 4, Sampling(16, temperature=temperature))
    assert {one.convention.temperature for one in rollouts} == {temperature}
    is_raw = rollouts[0].convention.kind == "raw"
    assert_trainers(subject, rollouts[::3], 1.0 if is_raw else temperature)
    assert rollouts[0].convention.is_trainers is not is_raw
    found = [forced_logps(subject.policy, one.prompt.ids, one.ids).mean() for one in rollouts]
    expected = []
    for one in rollouts:
        whole = forced_log_probs(subject.policy, one.prompt.ids, one.ids)
        expected.append(((whole / temperature).softmax(-1) * whole).sum(-1).mean())
    assert float(torch.stack(found).mean()) == pytest.approx(float(torch.stack(expected).mean()), abs=0.25)


def test_temperature_zero_is_greedy(subject: Subject) -> None:
    rollouts = subject.engine.generate(sums(8), 1, Sampling(12, temperature=0))
    for one in rollouts:
        assert one.ids == tuple(forced_log_probs(subject.policy, one.prompt.ids, one.ids).argmax(-1).tolist())
    assert_trainers(subject, rollouts)


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_cuts_restrict_the_draw(subject: Subject, cut: dict[str, float]) -> None:
    rollouts = subject.engine.generate(sums(6), 4, Sampling(12, temperature=1.0, **cut))  # type: ignore[arg-type]
    for one in rollouts:
        probs = forced_log_probs(subject.policy, one.prompt.ids, one.ids).exp()
        for place, token in enumerate(one.ids):
            before = probs[place] > probs[place, token] + 1e-6
            assert int(before.sum()) < cut.get("top_k", 257)
            assert float(probs[place][before].sum()) < cut.get("top_p", 1.0) + 1e-4
            assert float(probs[place, token] / probs[place].max()) >= cut.get("min_p", 0.0) - 1e-4
    assert {one.convention.is_cut for one in rollouts} == {True}


# ---- where completions end -------------------------------------------------------------------------------------------


def test_completions_stop_at_the_end_token_and_keep_it(subject: Subject) -> None:
    rollouts = subject.engine.generate(sums(100), 1, Sampling(40, seed=3))
    assert {one.finish_reason for one in rollouts} == {"stop", "length"}
    for one in rollouts:
        assert (one.finish_reason == "stop") == (one.ids[-1] == END)
        assert END not in one.ids[:-1]
        assert one.finish_reason == "stop" or len(one.ids) == 40
    assert_trainers(subject, [one for one in rollouts if one.finish_reason == "stop"])


@pytest.mark.parametrize("limit", [1, 7])
def test_no_completion_is_longer_than_allowed(subject: Subject, limit: int) -> None:
    rollouts = subject.engine.generate(sums(6), 2, Sampling(limit))
    assert max(len(one.ids) for one in rollouts) == limit
    assert_trainers(subject, rollouts)


def test_no_end_before_min_new_tokens(subject: Subject) -> None:
    if not subject.limits_length:
        pytest.skip("this protocol cannot hold the stop token back")
    prompt = prompt_that_ends(subject.policy)
    sampling = Sampling(6, min_new_tokens=3)
    rollouts = subject.engine.generate([prompt], 32, sampling)
    assert not any(END in one.ids[:3] for one in rollouts)
    assert rollouts[0].convention.is_cut


def test_a_completion_may_be_empty_but_for_its_end(subject: Subject) -> None:
    rollouts = subject.engine.generate([prompt_that_ends(subject.policy)], 64, Sampling(4))
    empty = [one for one in rollouts if one.ids == (END,)]
    assert empty
    assert {(one.finish_reason, one.text, len(one.logps)) for one in empty} == {("stop", "", 1)}
    assert_trainers(subject, empty[:1])


def prompt_that_ends(policy: Any) -> Prompt:
    """Return a prompt behind which the end token is likely."""
    pairs = torch.tensor([(first, second) for first in range(1, 257, 4) for second in range(1, 257)])
    with torch.no_grad():
        ends = torch.cat([policy(part).logits[:, -1].softmax(-1)[:, END] for part in pairs.split(4096)])
    assert ends.max() > 0.15
    return Prompt(0, "", tuple(pairs[ends.argmax()].tolist()))


# ---- groups, order, seeds --------------------------------------------------------------------------------------------


def test_a_hundred_prompts_come_back_in_order_and_each_is_heard_of_once(subject: Subject) -> None:
    heard: dict[int, Rollout] = {}
    caller = threading.get_ident()

    def finished(row: int, one: Rollout) -> None:
        assert row not in heard
        assert threading.get_ident() == caller
        heard[row] = one

    given = sums(100)
    rollouts = subject.engine.generate(given, 2, Sampling(5), finished)
    assert all(one.prompt is given[row // 2] for row, one in enumerate(rollouts))
    assert [heard[row] for row in range(200)] == rollouts
    assert_trainers(subject, rollouts[::9])


def test_completions_of_a_group_differ(subject: Subject) -> None:
    assert len(set(drawn(subject.engine.generate(sums(1), 16, Sampling(12))))) == 16


def test_a_seed_repeats_and_another_differs(subject: Subject) -> None:
    first, again, other = (subject.engine.generate(sums(3), 3, Sampling(12, seed=seed)) for seed in (5, 5, 6))
    if subject.reproduces:
        assert drawn(first) == drawn(again)
    assert not set(drawn(first)) & set(drawn(other))


@pytest.mark.parametrize("text", ["Wie groß ist π?", "二 + 三 = ", "🤖🤖", "नमस्ते\u200d\n\t", "<end>", " "])
def test_text_of_any_script_is_read_as_the_trainer_reads_it(subject: Subject, text: str) -> None:
    (prompt,) = prompts(text)
    rollouts = subject.engine.generate([prompt], 2, Sampling(8))
    assert_trainers(subject, rollouts)
    assert [one.text for one in rollouts] == [decode(one.ids, one.finish_reason) for one in rollouts]


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_a_generation_is_cancelled_and_the_engine_goes_on(subject: Subject) -> None:
    outcome: list[str] = []

    def generate() -> None:
        try:
            subject.engine.generate(sums(60), 8, Sampling(300, temperature=1.5))
        except Cancelled:
            outcome.append("cancelled")

    thread = threading.Thread(target=generate)
    thread.start()
    while thread.is_alive():
        subject.engine.cancel()
        thread.join(0.05)
    assert outcome == ["cancelled"]
    assert_trainers(subject, subject.engine.generate(sums(2), 2, Sampling(4)))


def test_a_cancel_when_nothing_is_under_way_changes_nothing(subject: Subject) -> None:
    subject.engine.cancel()
    assert len(subject.engine.generate(sums(2), 1, Sampling(3))) == 2


def test_an_error_of_the_listener_ends_the_generation_and_the_engine_goes_on(subject: Subject) -> None:
    def finished(row: int, one: Rollout) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        subject.engine.generate(sums(8), 2, Sampling(3), finished)
    assert len(subject.engine.generate(sums(2), 1, Sampling(3))) == 2


def test_an_engine_that_dies_in_the_middle_loses_nothing_and_hands_out_nothing_twice(subject: Subject) -> None:
    """A server's completions are drawn again; in this process the error comes out, and the engine stays usable."""
    if subject.dying is None:
        pytest.skip("a test of its own kills this engine")
    heard: list[int] = []
    with subject.dying() as mended:
        outcome: AbstractContextManager[Any] = nullcontext() if mended else pytest.raises(RuntimeError, match="died")
        with outcome:
            rollouts = subject.engine.generate(sums(8), 2, Sampling(8), lambda row, one: heard.append(row))
            assert_trainers(subject, rollouts)
        assert len(set(heard)) == len(heard)
        assert len(heard) == 16 or not mended
    assert_trainers(subject, subject.engine.generate(sums(2), 2, Sampling(4)))


@contextmanager
def dying_at(call: int, owner: Any, name: str) -> Iterator[bool]:
    """Have a function fail when it is called for this time."""
    calls, function = [0], getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("died")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield False
    assert calls[0] >= call


@contextmanager
def dropping(server: Any) -> Iterator[bool]:
    """Have a server that takes faults drop two of the next connections."""
    server.faults += ["drop", "drop"]
    yield True
    assert not server.faults


# ---- sync ------------------------------------------------------------------------------------------------------------


def changed(policy: Any, amount: float, seed: int) -> Callable[[], None]:
    """Move the policy's weights; the function returned moves them back."""
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(amount * value.std() * torch.randn(value.shape, generator=noise))
    return lambda: policy.load_state_dict(before) and None


def check_sync(subject: Subject) -> None:
    """Change the weights and see the change, in what a long prompt has in the cache, too; and back again."""
    long = prompts("the same long prompt, asked again and again " * 5)
    before = subject.engine.generate(long, 2, Sampling(12, temperature=0))
    back = changed(subject.policy, 0.5, seed=7)
    version = subject.engine.sync()
    after = subject.engine.generate(long, 2, Sampling(12, temperature=0))
    assert_trainers(subject, after)
    assert drawn(after) != drawn(before)
    assert {one.weights_version for one in after} == {version} == {before[0].weights_version + 1}
    back()
    subject.engine.sync()
    again = subject.engine.generate(long, 2, Sampling(12, temperature=0))
    assert drawn(again) == drawn(before)
    assert_trainers(subject, again)


def replaced(subject: Subject, **changes: Any) -> Subject:
    """The same engine under other expectations."""
    return replace(subject, **changes)
