"""Watching a run for programs that go for the grader: shares as metrics, what they did in samples and traces."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.code.extraction import POLICIES, find_code
from grpo_toolbox.rewards.code.hacks import KINDS, Hack, detect_hacks
from grpo_toolbox.rewards.golds import charge_golds
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens

log = logging.getLogger(__name__)

_HONEST = "```python\ndef double(n):\n    return 2 * n\n```"
_LEAVING = "```python\nimport os\ndef double(n):\n    os._exit(0)\n```"


def hack_monitor(charge: float = 0.0, block: str = "last") -> Callable[..., list[float | None]]:
    """−`charge` where a completion's program goes for the grader, or its reasoning says so, 0 where not.

    At charge 0 it only watches: every row is None, "not applicable", and other rewards decide. Metrics `hacks/rate`
    and `hacks/<kind>` are shares of completions, extra column `hacks` says what was found; the log shows the first
    example of each kind. `block` says which program of a completion is looked at, as for reward=code.
    """
    if not 0 <= charge < math.inf:
        raise ConfigError(f"reward.charge={charge} must be at least 0; 0 only watches.")
    if block not in POLICIES:
        raise unknown_option("reward.block", block, POLICIES)
    watch = HackWatch()

    def score(completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None) -> list[float | None]:
        texts = [without_stop_tokens(completion_text(completion)) for completion in completions]
        found = watch([(text, find_code(text, block)) for text in texts], log_extra, log_metric)
        return [(-charge if acts else 0.0) if charge else None for acts in found]

    score.__name__ = "hack_monitor"
    if charge:
        score.golds = charge_golds(_HONEST, {"it leaves before it is asked": _LEAVING})  # type: ignore[attr-defined]
    return score


class HackWatch:
    """Looks for hacks in completions, logs what it finds, and remembers which kinds it has shown an example of."""

    def __init__(self) -> None:
        self.shown: set[str] = set()

    def __call__(
        self, completions: Sequence[tuple[str, str | None]], log_extra: Any = None, log_metric: Any = None
    ) -> list[list[Hack]]:
        """The hacks of each completion, given as its text and the program in it."""
        found = [detect_hacks(program or "", text.replace(program or "\0", "")) for text, program in completions]
        for acts in found:
            for act in acts:
                self._show(act)
        if log_extra is not None:
            log_extra("hacks", [_told(acts) for acts in found])
        if log_metric is not None and found:
            counts = Counter(kind for acts in found for kind in {act.kind for act in acts})
            log_metric("hacks/rate", sum(map(bool, found)) / len(found))
            for kind in KINDS:
                log_metric(f"hacks/{kind}", counts[kind] / len(found))
        return found

    def _show(self, act: Hack) -> None:
        if act.kind not in self.shown:
            self.shown.add(act.kind)
            log.warning("a completion goes for the grader (%s): %s", act.kind, act.evidence)


def _told(acts: Sequence[Hack]) -> str | None:
    """What was found, in a line."""
    return "; ".join(f"{act.kind}: {act.evidence}" for act in acts) or None
