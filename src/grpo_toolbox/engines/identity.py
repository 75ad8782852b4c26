"""Whether a server runs the trainer's model and tokenizer, and what its log-probs are of: measured, not believed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_toolbox.engines.dialect import Answer, Ask, Dialect, Served
from grpo_toolbox.engines.server import Foreign, Server
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import LogpKind, Sampling

Row = tuple[int, ...]
Forced = Callable[[Sequence[Row], Sequence[int], float], list[list[float]]]
"""`forced(rows, first, temperature)`: the trainer's log-probs of each row's tokens from its place in `first` on."""

TEXTS = ("12 + 34 = 46, 3.5 x 10", "Is it, so? Yes!\n\tdef f(a_b): return {a: 'b'}", "Wie groß ist π? 二 + 三 🤖")
_TEMPERATURE = 2.0
"""Of the canaries: far enough from 1 that raw and tempered log-probs differ."""
_TOKENS = 8
_FOREIGN_SHARE, _FOREIGN_NATS = 0.5, 0.05
"""Log-probs of another model are off by about as much as log-probs differ among themselves; rounding to 8 bits, or even
4, is far below half of that."""


@dataclass(frozen=True)
class Identity:
    """What every server must share with the trainer."""

    tokenized: Mapping[str, Sequence[int]]
    """Texts with their ids by the trainer's tokenizer, nothing added."""
    positions: int
    """Tokens that the longest prompt and its completion have."""
    rows: Sequence[Row]
    """Prompts of the run."""
    stop_ids: Sequence[int]
    forced: Forced

    def check(self, dialect: Dialect, server: Server, served: Served) -> None:
        """Raise Foreign where a server has another tokenizer, or too little room."""
        if served.positions is not None and served.positions < self.positions:
            raise Foreign(
                f"{server.address} takes {served.positions} tokens, and the longest prompt with rollout.max_new_tokens "
                f"has {self.positions}: start it with more room (vLLM: --max-model-len {self.positions})."
            )
        for text, ours in self.tokenized.items():
            theirs = dialect.tokenize(server, served.name, text)
            if theirs is None:
                return
            if theirs != list(ours):
                raise Foreign(
                    f"{server.address} ({served.about}) has another tokenizer than the trainer: {text!r} is "
                    f"{theirs[:8]}… there and {list(ours)[:8]}… here. Start it with the model of model.path."
                )

    def measure(self, dialect: Dialect, server: Server) -> LogpKind:
        """Return of what distribution a server's log-probs are. Raises Foreign for those of another model."""
        sampling = Sampling(_TOKENS, temperature=_TEMPERATURE)
        answers = [self._draw(dialect, server, row, sampling) for row in self.rows]
        told = [logp for answer in answers for logp in answer.logps]
        gaps = {kind: _gap(told, self._expected(answers, t)) for kind, t in (("raw", 1.0), ("tempered", _TEMPERATURE))}
        kind: LogpKind = "raw" if gaps["raw"] < gaps["tempered"] else "tempered"
        expected = self._expected(answers, 1.0 if kind == "raw" else _TEMPERATURE)
        center = statistics.fmean(expected)
        spread = statistics.fmean(abs(one - center) for one in expected)
        if not gaps[kind] <= max(_FOREIGN_SHARE * spread, _FOREIGN_NATS):
            raise Foreign(
                f"{server.address} runs another model than the trainer: their log-probs of the same tokens differ by "
                f"{gaps[kind]:.2g} nats on average. Start it with the model of model.path, or send the weights first."
            )
        if kind == "raw":
            return kind
        greedy = self._draw(dialect, server, self.rows[0], replace(sampling, top_k=1))
        ours = self._expected([greedy], _TEMPERATURE)
        return "processed" if _gap(greedy.logps, [0.0] * len(ours)) < _gap(greedy.logps, ours) else "tempered"

    def _expected(self, answers: Sequence[Answer], temperature: float) -> list[float]:
        """Return the trainer's log-probs of what was drawn behind the first of the rows, one answer each."""
        rows = self.rows[: len(answers)]
        whole = [(*row, *answer.ids) for row, answer in zip(rows, answers, strict=True)]
        found = self.forced(whole, [len(row) for row in rows], temperature)
        return [logp for one in found for logp in one]

    def _draw(self, dialect: Dialect, server: Server, row: Row, sampling: Sampling) -> Answer:
        path, body = dialect.request(
            [Ask(server.model, row, sampling.max_new_tokens, 0, sampling, seed=1, stop_ids=self.stop_ids)]
        )
        answer = server.post(path, body, timeout_s=server.limits.request_timeout_s)
        try:
            (drawn,) = dialect.read(answer)
        except (LookupError, TypeError, ValueError) as error:  # whatever answers at that address
            raise Foreign(f"{server.address}{path} answers in another form than {dialect.name}: {error}") from error
        if len(drawn.ids) != len(drawn.logps) or not drawn.ids:
            raise EngineError(f"{server.address}{path} answered {len(drawn.ids)} ids and {len(drawn.logps)} log-probs.")
        return drawn


def _gap(told: Sequence[float], expected: Sequence[float]) -> float:
    """Mean |Δ log-prob| in nats."""
    return statistics.fmean(abs(one - other) for one, other in zip(told, expected, strict=True))
