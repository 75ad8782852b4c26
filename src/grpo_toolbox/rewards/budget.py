"""How many failures a tolerant reward may have before the run stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, dropwhile
from typing import TYPE_CHECKING

from grpo_toolbox.errors import RewardError
from grpo_toolbox.rewards.outcomes import Kind, Outcome

if TYPE_CHECKING:
    from grpo_toolbox.rewards.component import Component

Place = Callable[[int], str]
FAILED = (str(Kind.ERROR), str(Kind.TIMEOUT))


class ErrorBudget:
    """Remembers how each component's last completions came out, and stops the run when too many of them failed.

    A component may fail (error or timeout) on `max_error_rate` · `error_window` of its last `error_window` completions.
    The share is of the whole window, also while it is not full yet, so that one failure in a small first batch is no
    catastrophe, and an outage is found after `max_error_rate` · `error_window` completions whenever it begins.
    """

    def __init__(self) -> None:
        self._recent: dict[str, list[str]] = {}
        """By component, from its oldest failure in the window on."""

    def record(self, component: Component, outcome: Outcome, place: Place) -> None:
        """Take in how a batch came out; RewardError where the component has failed too often within a window."""
        kinds = [*self._recent.get(component.name, []), *map(str, outcome.kinds)]
        if outcome.failures and _most(kinds, component.window) > component.most_failures:
            raise _exceeded(component, kinds[-component.window :], outcome.failures, place)
        recent = list(dropwhile(lambda kind: kind not in FAILED, kinds[-component.window :]))
        self._recent |= {component.name: recent}
        if not recent:
            del self._recent[component.name]

    def check(self, component: Component, failures: Mapping[int, Exception], tried: int, place: Place) -> None:
        """RewardError where these failures of the first `tried` rows of a batch are too many by themselves."""
        kinds = [str(Kind.of(failures[row]) if row in failures else Kind.SCORE) for row in range(tried)]
        if _most(kinds, component.window) > component.most_failures:
            raise _exceeded(component, kinds[-component.window :], failures, place)

    def state_dict(self) -> dict[str, list[str]]:
        """Return what a resumed run needs."""
        return {name: list(kinds) for name, kinds in self._recent.items()}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Go on from a saved state."""
        self._recent = {name: list(kinds) for name, kinds in state.items()}


def _most(kinds: list[str], window: int) -> int:
    """Return the most failures within `window` completions in a row."""
    failed = [0, *accumulate(kind in FAILED for kind in kinds)]
    return max(until - failed[max(end - window, 0)] for end, until in enumerate(failed))


def _exceeded(component: Component, kinds: list[str], failures: Mapping[int, Exception], place: Place) -> RewardError:
    errors, timeouts = kinds.count(Kind.ERROR), kinds.count(Kind.TIMEOUT)
    row = min(failures)
    return RewardError(
        f"reward {component.name!r} failed on {errors + timeouts} of the last {component.window} completions ({errors}"
        f" errors and {timeouts} timeouts, such as {place(row)}, {type(failures[row]).__name__}: {failures[row]}), and"
        f" reward.max_error_rate={component.error_rate:g} allows {component.most_failures}. The run stops with its last"
        " finished step saved: mend what fails and go on with resume=, or raise reward.max_error_rate."
    )
