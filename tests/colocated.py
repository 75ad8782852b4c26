"""The contract over vLLM in this process; run in vLLM's environment by `test_colocate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from engine_contract import *  # noqa: F403
from engine_contract import Subject, check_sync, decode, dying_at
from grpo_toolbox.engines.colocate import ColocateEngine, Colocation
from served_models import END, POSITIONS, served_model, write_model


@pytest.fixture(scope="session")
def subject(tmp_path_factory) -> Iterator[Subject]:
    policy = served_model()
    options = Colocation(
        str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32", max_model_len=POSITIONS, max_rows=64
    )
    engine = ColocateEngine(policy, options, decode=decode, stop_ids=(END,))
    yield Subject(engine, policy, dying=partial(dying_at, 3, engine._llm.llm_engine, "step"))
    engine.close()


def test_a_sync_changes_what_is_drawn_and_no_stale_prefix_is_used(subject: Subject) -> None:
    check_sync(subject)
