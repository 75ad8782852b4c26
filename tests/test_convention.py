"""What a sampler's log-probs mean: kept with each rollout; what the trainer cannot use is refused before it trains."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch

from grpo_toolbox.engines import Traits
from grpo_toolbox.engines.convention import check_convention, check_sampling
from grpo_toolbox.engines.hf import HfEngine
from grpo_toolbox.engines.local import LocalEngine
from grpo_toolbox.errors import Cancelled, ConfigError
from grpo_toolbox.experience import from_state, to_state
from grpo_toolbox.run import Experience
from grpo_toolbox.types import Convention, Sampling, Scores
from small_models import STOP, forced_log_probs, make_prompts, shared

IN_PROCESS = LocalEngine.traits
RAW_SERVER = Traits(shares_weights=False, exact=False, logps="raw", drawn_logps=False)
PROCESSED_SERVER = Traits(shares_weights=False, exact=False, logps="processed", drawn_logps=True)


def engine(kind: type):
    return kind(shared("llama"), decode=lambda ids, _: "", stop_ids=(STOP,))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_raw_log_probs_serve_at_temperature_one_alone():
    check_sampling(RAW_SERVER, Sampling(8), corrected=True)
    with pytest.raises(ConfigError, match=r"rollout.temperature=0.7: .*those of temperature 1"):
        check_sampling(RAW_SERVER, Sampling(8, temperature=0.7), corrected=False)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"min_new_tokens": 3}])
@pytest.mark.parametrize("corrected", [True, False])
def test_a_cut_is_refused_where_the_log_probs_are_not_of_what_is_left(cut, corrected):
    (name,) = cut
    with pytest.raises(ConfigError, match=rf"rollout.{name}=.*reports log-probs of all of it"):
        check_sampling(RAW_SERVER, Sampling(8, **cut), corrected=corrected)


def test_a_cut_that_is_reported_is_corrected_and_otherwise_warned_of(caplog):
    caplog.set_level(logging.WARNING)
    cut = Sampling(8, temperature=0.7, top_p=0.9)
    check_sampling(PROCESSED_SERVER, cut, corrected=True)
    check_sampling(IN_PROCESS, replace(cut, drawn_logps=True), corrected=True)
    assert not caplog.records
    check_sampling(PROCESSED_SERVER, cut, corrected=False)
    check_sampling(IN_PROCESS, cut, corrected=False)
    assert [record.getMessage()[:18] for record in caplog.records] == ["rollout.top_p=0.9:"] * 2


def test_weights_of_a_correction_need_log_probs_of_the_draw():
    """With those of the whole softmax every weight would be 1, whatever was cut off."""
    check_convention(Convention("processed", top_p=0.9), corrected=True)
    check_convention(Convention("tempered", top_p=0.9), corrected=False)
    with pytest.raises(ConfigError, match=r"leave its cuts out .*top_p=0.9"):
        check_convention(Convention("tempered", top_p=0.9), corrected=True)


@pytest.mark.parametrize(
    ("convention", "same"),
    [
        (Convention("raw"), True),
        (Convention("raw", temperature=0.5), False),
        (Convention("tempered", temperature=0.5, top_p=0.9), True),
        (Convention("processed", temperature=0.5), True),
        (Convention("processed", top_k=5), False),
        (Convention("processed", min_new_tokens=2), False),
    ],
)
def test_which_conventions_are_the_trainers(convention, same):
    assert convention.is_trainers is same


# ---- what in-process engines report ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalEngine, HfEngine])
@pytest.mark.parametrize(
    "cut", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"min_new_tokens": 4, "temperature": 2.0}, {}]
)
def test_log_probs_of_the_draw_are_those_of_the_softmax_scaled_up_over_what_is_left(kind, cut):
    """log q = log π − log Z with Z the mass of the tokens kept: the weight of a correction, π/q, is Z ≤ 1."""
    sampling = Sampling(8, **({"temperature": 1.3} | cut), drawn_logps=True)
    for one in engine(kind).generate(make_prompts(5, 9), 4, sampling):
        assert one.convention == Convention.of("processed", sampling)
        whole = forced_log_probs(shared("llama"), one.prompt.ids, one.ids, sampling.temperature)
        for place, (token, logp) in enumerate(zip(one.ids, one.logps, strict=True)):
            probs = whole[place].exp()
            kept = torch.ones_like(probs, dtype=torch.bool)
            if sampling.top_k:
                kept &= probs >= probs.topk(sampling.top_k).values[-1]
            if sampling.top_p < 1:
                likely = probs.sort(descending=True)
                kept[likely.indices[likely.values.cumsum(0) - likely.values >= sampling.top_p]] = False
            if sampling.min_p:
                kept &= probs >= sampling.min_p * probs.max()
            if place < sampling.min_new_tokens:
                kept[STOP] = False
            assert logp == pytest.approx(float((probs[token] / probs[kept].sum()).log()), abs=2e-4)


@pytest.mark.parametrize("kind", [LocalEngine, HfEngine])
def test_the_convention_travels_with_the_rollout_and_through_a_checkpoint(kind):
    sampling = Sampling(3, temperature=0.7, top_p=0.9)
    rollouts = engine(kind).generate(make_prompts(5), 2, sampling)
    assert rollouts[0].convention == Convention("tempered", temperature=0.7, top_p=0.9)
    scores = Scores(("r",), (1.0,), torch.zeros(1, 2, 1), torch.zeros(1, 2))
    (again,) = from_state(to_state([Experience(rollouts, scores, torch.zeros(1, 2), [0])]), Experience)
    assert again.rollouts == rollouts


# ---- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalEngine, HfEngine])
def test_a_generation_is_cancelled_from_another_thread_and_the_engine_goes_on(kind):
    made = engine(kind)
    outcome: list[BaseException] = []

    def generate() -> None:
        try:
            made.generate(make_prompts(*(200,) * 8), 16, Sampling(50, temperature=1.5))
        except Cancelled as error:
            outcome.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while thread.is_alive():
        made.cancel()
        thread.join(0.01)
    assert len(outcome) == 1
    assert len(made.generate(make_prompts(4), 2, Sampling(3))) == 2


def test_what_had_finished_before_a_cancel_was_handed_out():
    made, heard = engine(LocalEngine), []

    def finished(row, rollout):
        heard.append(row)
        made.cancel()

    with pytest.raises(Cancelled):
        made.generate(make_prompts(4, 5), 32, Sampling(40, temperature=2.0), finished)
    assert 0 < len(heard) < 64
