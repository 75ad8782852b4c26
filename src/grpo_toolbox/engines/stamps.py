"""Which of the run's weights drew which tokens of a completion, from what its server states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from grpo_toolbox.engines.dialect import Answer

Whose = Callable[[str, int], int | None]
"""`whose(stated, asked)`: the run's version of the weights that a server states, of tokens that were asked for while it
had version `asked`; None for weights that are none of the run's."""


def token_versions(answer: Answer, asked: int, whose: Whose, late: int = 0) -> list[int]:
    """Return the version of the weights that drew each token, up to the first token of weights that nobody knows.

    Where it is not certain, the older one stands: for all tokens of a server that says nothing, and for the first
    `late` ones behind each change, which a server may count too young.
    """
    if not answer.stretches:
        return [asked] * len(answer.ids)
    versions: list[int] = []
    for stated, count in answer.stretches:
        version = whose(stated, asked)
        if version is None:
            break
        former = versions[-1] if versions else asked
        older = 0 if version == former else min(late, count)
        versions += [former] * older + [version] * (count - older)
    return versions


def stretches(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return (version, number of tokens) of each stretch of equal versions."""
    return [(version, len(list(tokens))) for version, tokens in groupby(versions)]
