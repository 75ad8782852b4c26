"""examples/reward_functions.py: what it shows, what it checks, and that its checks can fail."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from sandboxes import sandboxes

FILE = Path(__file__).parents[1] / "examples" / "reward_functions.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    sandboxes("auto")
    return runpy.run_path(str(FILE))


def run(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [FILE.name, *words])
    example["main"]()


def test_the_hackable_reward_pays_for_hacks_and_the_robust_one_does_not(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, monkeypatch)
    lines = capsys.readouterr().out.splitlines()[1:]
    paid = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    assert paid.pop("honest") == ["1.0", "1.0"]
    assert paid.pop("merely wrong") == ["0.0", "0.0"]
    assert len(paid) == 5
    assert set(map(tuple, paid.values())) == {("1.0", "0.0")}


def test_smoke(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(example, monkeypatch, "--smoke")
    assert capsys.readouterr().out.count(": ok") == 4


def test_full_feeds_golds_through_every_verifier(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(example, monkeypatch, "--full")
    out = capsys.readouterr().out
    assert all(
        f"\n{name} " in out
        for name in ("exact_match", "math", "numeric", "format", "json_schema", "cosine_length", "code")
    )


def test_full_fails_on_a_verifier_that_misjudges(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(example["GOLDS"], "numeric", [{"answer": "3", "right": "#### 4", "wrong": "#### 5"}])
    with pytest.raises(AssertionError, match="numeric misjudges a known answer"):
        run(example, monkeypatch, "--full")
