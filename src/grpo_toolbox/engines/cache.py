"""Keys and values while completions are sampled: one copy of each prompt's, which its group shares, and each row's own.

Buffers have room for tokens to come (no concatenation per token) and grow by doubling. Rows leave and groups come in
between two tokens; a row's own buffer holds `lengths` tokens, whatever the others hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_toolbox.models.attention import PackedLayout, packed_layout

_FIRST_ROOM = 32
Place = tuple[int, int]
"""Layer and call: a layer of differential attention attends twice, with other values."""


class PromptPass:
    """The layout of a forward pass over prompts that stand one behind the other; it keeps their keys and values."""

    def __init__(self, lengths: Sequence[int], longest_row: int, device: torch.device) -> None:
        self._layout: PackedLayout = packed_layout(list(lengths), [], [], device)
        self.lengths = list(lengths)
        self.span = longest_row
        """Tokens of the longest prompt and the longest completion that may follow, together."""
        self.kept: dict[Place, tuple[Tensor, Tensor]] = {}
        """(U, kv, S, D) keys and values, behind the end of a shorter prompt whatever came to stand there."""
        self._calls: Counter[int] = Counter()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend causally within each prompt."""
        keys, values = (states[0].transpose(0, 1)[self._layout.prompt_index].transpose(1, 2) for states in (key, value))
        self.kept[layer, self._calls[layer]] = (keys.contiguous(), values.contiguous())
        self._calls[layer] += 1
        return self._layout.attend(layer, query, key, value, scaling)


class ContextPass:
    """The layout of a forward pass over one prompt and what its rows have drawn; it keeps keys and values of both."""

    def __init__(self, prompt_length: int, own_lengths: Sequence[int], device: torch.device) -> None:
        self._layout: PackedLayout = packed_layout([prompt_length], list(own_lengths), [0] * len(own_lengths), device)
        self.span = self._layout.span
        self.kept: dict[Place, list[tuple[Tensor, Tensor]]] = {}
        """Keys and values, each as those of the prompt (1, kv, S, D) and of the rows (n, kv, T, D)."""
        self._calls: Counter[int] = Counter()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend causally within the prompt, and from each row to the prompt and itself."""
        indices = self._layout.prompt_index, self._layout.completion_index
        self.kept[layer, self._calls[layer]] = [
            tuple(states[0].transpose(0, 1)[index].transpose(1, 2) for index in indices)  # type: ignore[misc]
            for states in (key, value)
        ]
        self._calls[layer] += 1
        return self._layout.attend(layer, query, key, value, scaling)


class KeyValues:
    """What N rows have seen: prompts (U, kv, S, D) with their `group` (N,), and own tokens (N, kv, room, D)."""

    def __init__(self, max_new_tokens: int, device: torch.device) -> None:
        self.span = 0
        """Tokens of the longest prompt and the longest completion together."""
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        """(N,) own tokens of each row."""
        self.group = torch.zeros(0, dtype=torch.long, device=device)
        self._max_new_tokens = max_new_tokens
        self._prompt_lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._prompts: dict[Place, tuple[Tensor, Tensor]] = {}
        self._own: dict[Place, tuple[Tensor, Tensor]] = {}
        self._room = 0
        self._calls: Counter[int] = Counter()
        self._step: _Step | None = None

    def admit(self, prompts: PromptPass, group_size: int) -> None:
        """Take in the groups of a finished prompt pass, `group_size` rows each, behind the rows that are there."""
        before, new = len(self._prompt_lengths), len(prompts.lengths)
        device = self.lengths.device
        self._step = None
        self.span = max(self.span, prompts.span)
        self._prompt_lengths = torch.cat([self._prompt_lengths, torch.tensor(prompts.lengths, device=device)])
        self.group = torch.cat(
            [self.group, torch.arange(before, before + new, device=device).repeat_interleave(group_size)]
        )
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(new * group_size)])
        self._room = self._room or min(_FIRST_ROOM, self._max_new_tokens)
        for place, states in prompts.kept.items():
            had = self._prompts.get(place)
            self._prompts[place] = states if had is None else tuple(map(_stacked, had, states))  # type: ignore[assignment]
            rows = new * group_size
            empty = [one.new_zeros(rows, one.shape[1], self._room, one.shape[3]) for one in states]
            own = self._own.get(place)
            self._own[place] = tuple(empty if own is None else map(_stacked, own, empty))  # type: ignore[assignment]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order, and the prompts that they still need."""
        self._step = None
        self.lengths, groups = self.lengths[rows], self.group[rows]
        self._own = {place: (keys[rows], values[rows]) for place, (keys, values) in self._own.items()}
        used, self.group = groups.unique(return_inverse=True)
        if len(used) < len(self._prompt_lengths):
            self._prompt_lengths = self._prompt_lengths[used]
            widest = int(self._prompt_lengths.max())
            for place, (keys, values) in self._prompts.items():
                self._prompts[place] = (keys[used, :, :widest], values[used, :, :widest])

    def replace(self, group: int, row: int, context: ContextPass) -> None:
        """Take keys and values of a group, whose first row stands at `row`, from a pass over all it has seen."""
        for place, kept in context.kept.items():
            pairs = zip(kept, self._prompts[place], self._own[place], strict=True)
            for (prompt, rows), prompts, own in pairs:
                prompts[group, :, : prompt.shape[2]] = prompt[0]
                own[row : row + len(rows), :, : rows.shape[2]] = rows

    def positions(self) -> Tensor:
        """Return where in its row (N,) the next token of each stands."""
        return self._prompt_lengths[self.group] + self.lengths

    def begin(self, *, fixed: bool = False) -> bool:
        """Prepare a forward pass of one more token per row.

        With `fixed` it runs over all the room that there is, in tensors that stay where they are until rows come or
        leave or the room grows; returns whether they are those of the pass before.
        """
        longest = int(self.lengths.max()) + 1
        if longest > self._room:
            self._room = min(2 * self._room, self._max_new_tokens)
            for place, own in self._own.items():
                self._own[place] = tuple(_widened(one, self._room) for one in own)  # type: ignore[assignment]
            self._step = None
        self.rewind()
        if fixed and self._step is not None:
            self._step.move(self.lengths)
            return True
        width = self._room if fixed else longest
        self._step = _Step(self._prompt_lengths, self.group, self.lengths, width, fixed=fixed)
        return False

    def rewind(self) -> None:
        """The next to attend is the first layer, whose first call it is."""
        self._calls.clear()

    def advance(self, rows: Tensor) -> None:
        """A forward pass is over: the rows marked (N,) True hold a token more."""
        self.lengths = self.lengths + rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store each row's new key and value, and attend to its prompt and its own tokens."""
        place, step = (layer, self._calls[layer]), self._step
        assert step is not None
        self._calls[layer] += 1
        own_keys, own_values = self._own[place]
        own_keys[step.rows, :, step.lengths] = key[:, :, 0]
        own_values[step.rows, :, step.lengths] = value[:, :, 0]
        return step.attend(query, self._prompts[place], (own_keys, own_values), scaling)


class _Step:
    """Who sees what while every row draws one token: the same in all layers."""

    def __init__(self, prompt_lengths: Tensor, group: Tensor, lengths: Tensor, longest: int, *, fixed: bool) -> None:
        device = group.device
        self.lengths = lengths.clone() if fixed else lengths
        """(N,) where each row's new token stands."""
        self.rows = torch.arange(len(group), device=device)
        self.longest = longest
        self.groups = len(prompt_lengths)
        per_group = torch.bincount(group, minlength=self.groups)
        self.members = int(per_group.max())
        # rows of a group stand together, so that a row's place in the grid (U, members) follows from its group's first
        firsts = per_group.cumsum(0) - per_group
        self.place = group * self.members + self.rows - firsts[group]
        self.whole = len(group) == self.groups * self.members
        self._sees_prompt = torch.arange(int(prompt_lengths.max()), device=device) < prompt_lengths[group].unsqueeze(1)
        hidden = self._hidden(lengths)
        self.hidden = hidden if fixed or bool(hidden.any()) else None

    def move(self, lengths: Tensor) -> None:
        """Let the next token of each row stand at `lengths` (N,), in the same tensors."""
        assert self.hidden is not None
        self.lengths.copy_(lengths)
        self.hidden.copy_(self._hidden(lengths))

    def _hidden(self, lengths: Tensor) -> Tensor:
        """(N, 1, 1, S + longest) True on what a row does not see."""
        sees_own = torch.arange(self.longest, device=lengths.device) <= lengths.unsqueeze(1)
        return ~torch.cat([self._sees_prompt, sees_own], dim=1)[:, None, None, :]

    def attend(
        self, query: Tensor, prompt: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float
    ) -> Tensor:
        """Return (N, 1, heads, D): one softmax over the scores of both parts."""
        rows, heads, _, size = query.shape
        keys, values = (one[:, :, : self.longest] for one in own)
        q = query.reshape(rows, keys.shape[1], -1, size) * scaling  # (N, kv, heads/kv, D)
        prompt_scores = self._from_grid(self._to_grid(q) @ prompt[0].transpose(2, 3), q.shape[2])
        scores = torch.cat([prompt_scores, q @ keys.transpose(2, 3)], dim=-1)
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        to_prompt, to_own = weights.split([prompt[0].shape[2], self.longest], dim=-1)
        attended = self._from_grid(self._to_grid(to_prompt) @ prompt[1], q.shape[2]) + to_own @ values
        return attended.reshape(rows, 1, heads, -1)

    def _to_grid(self, states: Tensor) -> Tensor:
        """(N, kv, r, X) -> (U, kv, members·r, X), zeros where a group has fewer rows."""
        if not self.whole:
            states = states.new_zeros(self.groups * self.members, *states.shape[1:]).index_copy_(0, self.place, states)
        return states.unflatten(0, (-1, self.members)).transpose(1, 2).flatten(2, 3)

    def _from_grid(self, grid: Tensor, per_head: int) -> Tensor:
        """(U, kv, members·r, X) -> (N, kv, r, X)."""
        states = grid.unflatten(2, (self.members, per_head)).transpose(1, 2).flatten(0, 1)
        return states if self.whole else states[self.place]


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    """Stack rows (n, kv, places, D) of unequal width."""
    width = max(first.shape[2], second.shape[2])
    return torch.cat([_widened(first, width), _widened(second, width)])


def _widened(states: Tensor, places: int) -> Tensor:
    """(n, kv, fewer, D) -> (n, kv, places, D), zeros behind the end."""
    return pad(states, (0, 0, 0, places - states.shape[2]))
