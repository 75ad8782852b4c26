"""A small SQLite store of the best verified completions per prompt, exported as rows for supervised fine-tuning."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_toolbox.callbacks import Callback, whole_number
from grpo_toolbox.callbacks.actions import judged
from grpo_toolbox.callbacks.jsonl import short
from grpo_toolbox.errors import ConfigError, DataError
from grpo_toolbox.types import Prompt, Rollout, RunInfo, Step

SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    key INTEGER PRIMARY KEY, prompt_id INTEGER NOT NULL, prompt TEXT NOT NULL, UNIQUE (prompt_id, prompt)
);
CREATE TABLE IF NOT EXISTS completions (
    prompt_key INTEGER NOT NULL REFERENCES prompts, completion TEXT NOT NULL,
    reward REAL NOT NULL, tokens INTEGER NOT NULL, step INTEGER NOT NULL, UNIQUE (prompt_key, completion)
);
"""

BEST_FIRST = "reward DESC, tokens, step, completion"

INSERT = """
INSERT INTO completions VALUES (?, ?, ?, ?, ?)
ON CONFLICT (prompt_key, completion) DO UPDATE
SET reward = excluded.reward, tokens = excluded.tokens, step = excluded.step
WHERE excluded.reward > completions.reward
"""

PRUNE = f"""
DELETE FROM completions WHERE rowid IN (
    SELECT rowid FROM completions WHERE prompt_key = ? ORDER BY {BEST_FIRST} LIMIT -1 OFFSET ?
)
"""

EXPORT = (
    f"SELECT prompt, completion FROM completions JOIN prompts ON key = prompt_key ORDER BY prompt_id, key, {BEST_FIRST}"
)


class MemoryWriter(Callback):
    """Keep the `per_prompt` best verified completions of each prompt in the SQLite file `path`.

    A relative path lies in the run folder; an absolute one can collect the finds of many runs. Verified means that
    the reward component `component` (by default the first, or the total where it does not apply) is at least
    `threshold`. Among them a higher total reward wins, then fewer tokens. Texts are unique per prompt; completions
    that the token limit cut off are left out, for they would teach never to stop.
    """

    def __init__(
        self,
        path: str = "memory.sqlite",
        threshold: float = 1.0,
        per_prompt: int = 4,
        component: str | None = None,
    ) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise ConfigError(f"callbacks.memory_writer.threshold={threshold!r} is not an option: it takes a number.")
        self._path = Path(path)
        self._threshold = threshold
        self._per_prompt = whole_number("callbacks.memory_writer.per_prompt", per_prompt)
        self._component = component

    def on_start(self, run: RunInfo) -> None:
        path = run.run_dir / self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._store = sqlite3.connect(path)
        # The write-ahead log makes a step's commit cheap (no wait for the disk) and stays whole when the run is killed.
        self._store.execute("PRAGMA journal_mode = WAL")
        self._store.execute("PRAGMA synchronous = NORMAL")
        self._store.executescript(SCHEMA)

    def on_step(self, step: Step) -> None:
        keys: dict[int, int] = {}
        rows: dict[tuple[int, str], tuple[int, str, float, int, int]] = {}  # a solved group says the same thing G times
        with self._store:
            for rollout, reward in verified(step, self._threshold, self._component):
                prompt = rollout.prompt
                key = keys[prompt.id] = keys.get(prompt.id) or self._prompt_key(prompt)
                known = rows.get((key, rollout.text))
                if known is None or reward > known[2]:
                    rows[key, rollout.text] = (key, rollout.text, reward, len(rollout.ids), step.number)
            self._store.executemany(INSERT, rows.values())
            self._store.executemany(PRUNE, [(key, self._per_prompt) for key in keys.values()])

    def on_end(self, summary: Mapping[str, float]) -> None:
        self._store.close()

    def _prompt_key(self, prompt: Prompt) -> int:
        row = (prompt.id, json.dumps(prompt.text))
        self._store.execute("INSERT OR IGNORE INTO prompts (prompt_id, prompt) VALUES (?, ?)", row)
        return self._store.execute("SELECT key FROM prompts WHERE prompt_id = ? AND prompt = ?", row).fetchone()[0]


def verified(step: Step, threshold: float, component: str | None = None) -> Iterator[tuple[Rollout, float]]:
    """Yield the rollouts that ended by themselves and whose reward reaches the threshold, with their total reward.

    Raises ConfigError where no reward component is called `component`.
    """
    if not step.rollouts or step.scores is None:
        return
    names = step.scores.names
    if component is not None and component not in names:
        raise ConfigError(f"callbacks.memory_writer.component={component!r} is not a reward: {', '.join(names)}.")
    totals = [short(total) for group in step.scores.total.tolist() for total in group]  # B
    rows = [row for group in step.scores.components.tolist() for row in group]  # B, R
    for rollout, total, row in zip(step.rollouts, totals, rows, strict=True):
        value = judged(dict(zip(names, map(short, row), strict=True)), total, component)
        if rollout.finish_reason == "stop" and total is not None and value is not None and value >= threshold:
            yield rollout, total


def export_sft(path: Path) -> list[dict[str, Any]]:
    """Read the store at `path` as rows for supervised fine-tuning, best first within each prompt.

    Rows are `{"prompt", "completion"}`, or `{"messages"}` where the prompt is a conversation.
    Raises DataError where there is no such store.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist: train with callbacks.memory_writer={{}}, or name the SQLite file.")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
            return [_sft_row(json.loads(prompt), completion) for prompt, completion in store.execute(EXPORT)]
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} is not a store that callbacks.memory_writer wrote ({error}).") from error


def _sft_row(prompt: str | list[dict[str, Any]], completion: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": completion}
    return {"messages": [*prompt, {"role": "assistant", "content": completion}]}
