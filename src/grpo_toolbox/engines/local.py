"""The in-process engine: the policy's own weights, each prompt prefilled once for its group, no place left idle.

The model runs as the plain Hugging Face module with its attention handed to the layouts of `engines/cache.py`. Finished
rows leave the batch and waiting prompts take their place. Models that do not take a layout are served by
`engines/hf.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from grpo_toolbox.engines.cache import ContextPass, KeyValues, PromptPass
from grpo_toolbox.engines.inprocess import Drawn, InProcessEngine
from grpo_toolbox.engines.recorded import RecordedPass
from grpo_toolbox.engines.sampling import row_keys, sample, uniforms
from grpo_toolbox.models.attention import layout_attention
from grpo_toolbox.models.float8 import float8_linear
from grpo_toolbox.models.forward import decoder, plain_model
from grpo_toolbox.models.linear import cast_linear, fast_linear, packed_linear
from grpo_toolbox.types import Prompt, Sampling

_PREFILL_TOKENS = 4096
"""Tokens of one prefill pass, so that its memory does not grow with the number of prompts."""
_WORTH_MOVING = 0.85
"""Finished rows leave once no more than this share goes on: moving the cache costs about as much as a few idle rows."""
_WORTH_RECORDING_ANEW = 0.5
"""The same where a pass is recorded: idle rows cost a GPU little, and each change asks for another recording."""
_WORTH_PACKING = 16
"""Tokens per completion from which on blocked copies of the weights gain more time than they cost."""
_WORTH_ENTERING = 1 / 8
"""Waiting prompts enter once this share of the batch is free: their prefill passes are then not too small."""


class LocalEngine(InProcessEngine):
    """Samples with the policy itself, at most `max_rows` rows at a time, or one group where that is larger.

    With `float8` from copies of its linear layers in that precision; with `recorded` a token's forward pass is recorded
    once and replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rows: int = 256,
        float8: bool = False,
        recorded: RecordedPass | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self._max_rows, self._float8, self._recorded = max_rows, float8, recorded
        if float8:
            self.traits = replace(self.traits, exact=False)
        self._newer: Callable[[], int | None] = lambda: None
        self._recompute = False

    def in_flight(self, newer: Callable[[], int | None], *, recompute: bool) -> None:
        """From now on ask `newer` between two tokens: it changes the weights and returns their version, or None.

        With `recompute` the keys and values of what was read and drawn before are computed anew; else they are kept.
        """
        self._newer, self._recompute = newer, recompute

    def _draw(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> Generator[Drawn]:
        decoding = _Decoding(plain_model(self._model), prompts, group_size, sampling, self._stop_ids, self._recorded)
        halfway = False
        while True:
            with self._linears(len(prompts) * group_size, sampling.max_new_tokens):  # of the weights as they are now
                if halfway and self._recompute:
                    decoding.read_again()
                if halfway:
                    decoding.forward(self._max_rows)
                while decoding.fill(self._max_rows):
                    self._check_cancelled()
                    yield from decoding.draw(self._version)
                    version = self._newer()
                    if version is not None:
                        break
                    decoding.forward(self._max_rows)
                else:
                    return
            decoding.mark(self._version)
            self._version, halfway = version, True

    @contextmanager
    def _linears(self, rows: int, tokens: int) -> Iterator[None]:
        """Run linear layers in the block as suits `tokens` tokens of `rows` rows; the weights stay as they are."""
        with self._copies(rows, tokens):
            try:
                yield
            finally:
                if self._recorded is not None:
                    self._recorded.forget()

    def _copies(self, rows: int, tokens: int) -> AbstractContextManager[None]:
        if self._float8:
            return float8_linear(plain_model(self._model))
        if self._autocast_dtype is not None:
            return cast_linear(self._model, self._autocast_dtype)
        if tokens < _WORTH_PACKING:
            return fast_linear(self._model)
        return packed_linear(self._model, min(rows, self._max_rows))


class _Decoding:
    """The rows of one `generate` call: which are in the batch, what each has drawn, which prompts wait."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        recorded: RecordedPass | None,
    ) -> None:
        self._model, self._device, self._recorded = model, next(model.parameters()).device, recorded
        self._prompts, self._group_size, self._sampling = prompts, group_size, sampling
        self._stop_ids, self._stops = tuple(stop_ids), torch.tensor(stop_ids, device=self._device)
        self._keys = row_keys(sampling.seed, [prompt.id for prompt in prompts], group_size)
        shape = (len(self._keys), sampling.max_new_tokens)
        self._ids = torch.zeros(shape, dtype=torch.long, device=self._device)
        self._logps = torch.zeros(shape, device=self._device)
        self._entered = 0
        """Prompts that have entered the batch."""
        self._marks: list[tuple[int, list[int]]] = []
        """Where weights were changed: the former version, and how many tokens each row had drawn by then."""
        self._clear()

    def _clear(self) -> None:
        """Start from an empty batch; columns are (N,): which row stands there, tokens drawn, whether it goes on."""
        self._rows, self._drawn = (torch.zeros(0, dtype=torch.long, device=self._device) for _ in range(2))
        self._alive = torch.zeros(0, dtype=torch.bool, device=self._device)
        self._tokens = self._rows
        self._logits: Tensor | None = None
        self._cache = KeyValues(self._sampling.max_new_tokens, self._device)

    def fill(self, max_rows: int) -> bool:
        """Let waiting prompts enter where there is room for enough of them; return whether anything is being decoded.

        Each is prefilled once, and its group stands behind the rows that go on.
        """
        count = self._entering(len(self._rows), max_rows)
        if count == 0:
            return len(self._rows) > 0
        new, first = self._prompts[self._entered : self._entered + count], self._entered * self._group_size
        longest = max(len(prompt.ids) for prompt in new) + self._sampling.max_new_tokens
        logits = [self._prefill(part, longest) for part in _by_tokens(new, _PREFILL_TOKENS)]
        entering = torch.cat(logits).repeat_interleave(self._group_size, dim=0)  # (count·G, V)
        rows = torch.arange(first, first + len(entering), device=self._device)
        self._logits = entering if self._logits is None else torch.cat([self._logits, entering])
        self._rows, self._drawn = torch.cat([self._rows, rows]), torch.cat([self._drawn, torch.zeros_like(rows)])
        self._alive = torch.cat([self._alive, torch.ones_like(rows, dtype=torch.bool)])
        self._entered += count
        return True

    def draw(self, version: int) -> list[Drawn]:
        """Draw a token for every row that goes on, with weights of `version`; return the rows that it finished."""
        limit, alive = self._sampling.max_new_tokens, self._alive
        place = self._drawn.clamp(max=limit - 1)  # of a row that has finished nothing is kept
        uniform = uniforms(self._keys[self._rows.cpu().numpy()], place.cpu().numpy())
        short = place < self._sampling.min_new_tokens
        assert self._logits is not None
        banned = self._stop_ids if bool(short.any()) else ()
        self._tokens, logps = sample(self._logits, uniform, self._sampling, banned, short)
        rows, places = self._rows[alive], self._drawn[alive]
        self._ids[rows, places], self._logps[rows, places] = self._tokens[alive], logps[alive]
        self._drawn = self._drawn + alive
        ended = torch.isin(self._tokens, self._stops) | (self._drawn >= limit)
        self._alive = alive & ~ended
        finished = alive & ended
        rows, counts = self._rows[finished], self._drawn[finished].tolist()
        longest = max(counts, default=0)
        drawn = zip(
            rows.tolist(), self._ids[rows, :longest].tolist(), self._logps[rows, :longest].tolist(), strict=True
        )
        return [
            (row, ids[:n], logps[:n], self._stretches(row, n, version))
            for (row, ids, logps), n in zip(drawn, counts, strict=True)
        ]

    def mark(self, version: int) -> None:
        """Remember that all tokens up to here that are not marked yet were drawn by weights of `version`."""
        drawn = torch.zeros(len(self._keys), dtype=torch.long)
        drawn[self._rows.cpu()] = self._drawn.cpu()
        self._marks.append((version, drawn.tolist()))

    def _stretches(self, row: int, count: int, version: int) -> list[tuple[int, int]]:
        if not self._marks:
            return [(version, count)]
        ends = [*((former, drawn[row]) for former, drawn in self._marks), (version, count)]
        counts = zip(ends, [0, *(end for _, end in ends)], strict=False)
        return [(drawn_by, end - before) for (drawn_by, end), before in counts if end > before]

    def read_again(self) -> None:
        """Compute keys and values of the rows that go on anew, of their prompts and of what they have drawn."""
        if not bool(self._alive.any()):
            return
        self._leave()
        groups = self._cache.group.tolist()
        lengths = self._cache.lengths.tolist()
        rows, ids = self._rows.tolist(), self._ids[self._rows].tolist()
        first = 0
        for members in (list(part) for _, part in groupby(range(len(groups)), key=lambda place: groups[place])):
            prompt = self._prompts[rows[members[0]] // self._group_size].ids
            own = [ids[place][: lengths[place]] for place in members]
            layout = ContextPass(len(prompt), [len(one) for one in own], self._device)
            tokens = [*prompt, *(token for one in own for token in one)]
            places = [*range(len(prompt)), *(len(prompt) + place for one in own for place in range(len(one)))]
            self._hidden(
                torch.tensor([tokens], device=self._device), torch.tensor([places], device=self._device), layout
            )
            self._cache.replace(groups[members[0]], first, layout)
            first += len(members)

    def forward(self, max_rows: int) -> None:
        """Let finished rows leave where that pays, and run the tokens just drawn of the others."""
        going_on = int(self._alive.sum())
        if going_on == 0:
            self._clear()
            return
        recorded = self._recorded if self._recorded is not None and self._recorded.works else None
        worth_moving = _WORTH_RECORDING_ANEW if recorded else _WORTH_MOVING
        if going_on <= worth_moving * len(self._rows) or self._entering(going_on, max_rows):
            self._leave()
        cache = self._cache
        if recorded:
            self._logits = recorded.run(self._next_logits, self._tokens, cache)
        else:
            cache.begin()
            self._logits = self._next_logits(self._tokens.unsqueeze(1), cache.positions().unsqueeze(1))
        cache.advance(self._alive)

    def _next_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(self._hidden(tokens, positions, self._cache)[:, 0])
        return logits

    def _entering(self, rows: int, max_rows: int) -> int:
        """Return how many waiting prompts are to enter beside `rows` rows: none while too few places are free."""
        waiting = len(self._prompts) - self._entered
        room = (max_rows - rows) // self._group_size
        count = min(waiting, room if rows else max(room, 1))
        return count if count * self._group_size >= _WORTH_ENTERING * max_rows or room >= waiting else 0

    def _leave(self) -> None:
        stay = self._alive.nonzero().squeeze(1)
        if len(stay) == len(self._rows):
            return
        self._cache.keep(stay)
        self._rows, self._drawn, self._tokens = self._rows[stay], self._drawn[stay], self._tokens[stay]
        self._alive = self._alive[stay]

    def _prefill(self, prompts: Sequence[Prompt], longest: int) -> Tensor:
        """Run prompts that stand one behind the other; return the logits (U, V) of each one's first new token."""
        lengths = [len(prompt.ids) for prompt in prompts]
        ids = torch.tensor([[token for prompt in prompts for token in prompt.ids]], device=self._device)
        positions = torch.tensor([[place for length in lengths for place in range(length)]], device=self._device)
        layout = PromptPass(lengths, longest, self._device)
        hidden = self._hidden(ids, positions, layout)[0]
        self._cache.admit(layout, self._group_size)
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits: Tensor = self._model.get_output_embeddings()(hidden[ends])
        return logits

    def _hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        with layout_attention(self._model):
            output = decoder(self._model)(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)
        hidden: Tensor = output.last_hidden_state
        return hidden


def _by_tokens(prompts: Sequence[Prompt], tokens: int) -> list[list[Prompt]]:
    """Split prompts into runs of at most about `tokens` tokens each."""
    runs: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        if not runs or len(prompt.ids) > room:
            runs.append([])
            room = tokens
        runs[-1].append(prompt)
        room -= len(prompt.ids)
    return runs
