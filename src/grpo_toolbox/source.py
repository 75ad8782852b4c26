"""Where the trainer's experience comes from: sampled when it is asked for, or ahead of it in the background.

Both call the same functions. `Synchronous` does so in the trainer's thread: step n learns from rollouts of the weights
that step n − 1 made. `Background` does it in a thread of its own, which alone asks data, engine and reward, and samples
with a copy of the weights, so that the trainer may move its own meanwhile.

Which weights sample what is counted, not timed. With k = max_staleness, the rollouts of step n are sampled with the
weights of step max(0, n − 1 − k), all of them, however long anything takes: so a run with a deterministic engine can be
repeated, stopped and resumed, and with k = 0 it is the synchronous one. The trainer gets ahead of the background by no
step, and the background of the trainer by k, so nothing grows: k + 1 versions of the weights and k steps' rollouts.

With weights pushed in flight (`in_flight`) a generation begins with the newest weights and takes newer ones between two
tokens: then they are at most as old, mostly younger, and which ones depends on the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from grpo_toolbox.checkpoint import capture_rng
from grpo_toolbox.clock import Clock as Stages
from grpo_toolbox.experience import experiences, from_state, next_experience, sample_generation, steps_served, to_state
from grpo_toolbox.models.snapshot import Weights, adopt, own_copy, snapshot
from grpo_toolbox.rewards.loop import abandon
from grpo_toolbox.run import Clock, Experience, Generation, Run
from grpo_toolbox.staleness import age_metrics

PATIENCE = 5.0
"""Seconds that a reward or an engine has to come back when the run ends; its thread ends with the process anyway."""
_BACKGROUND_RNG = ("python", "numpy")
"""Generators that only rewards draw from; torch's is the trainer's."""


class Synchronous:
    """Experience is made when it is asked for, with the weights as they are."""

    def __init__(self) -> None:
        self._left: list[Generation] = []
        """What a run that is resumed here had made in the background."""

    def start(self, run: Run) -> None:
        """Let an engine that is elsewhere have the weights that the run starts or goes on with."""
        if run.watch or not run.engine.traits.shares_weights:
            run.sync_engine(run.finished)

    def next(self, run: Run, number: int, clock: Clock) -> Experience:
        """Return what step `number` learns from: the next portion of the last generation, or of a new one."""
        while self._left and not run.pending:
            run.pending = experiences(run, self._left.pop(0), number, clock)
        return next_experience(run, number, clock)

    def sync(self, run: Run, number: int, clock: Clock) -> None:
        """Let the engine take over the weights."""
        with clock("sync"):
            run.sync_engine(number)

    def release(self) -> None:
        """Nothing waits for it."""

    def evaluate(self, run: Run, work: Callable[[], Generation]) -> Generation:
        """Do `work` here and now."""
        return work()

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return the state of data, reward and random numbers."""
        state = {"data": run.data.state_dict(), "reward": run.reward_state(), "rng": capture_rng()}
        return {**state, "ahead": {"queue": to_state(self._left)}} if self._left else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use up what was made in the background before anything is sampled anew."""
        self._left = from_state(state["queue"], Generation)

    def close(self, run: Run) -> None:
        """Release the engine."""
        run.engine.close()


@dataclass(frozen=True)
class _Place:
    """Where the background stands before a generation: with this it can be made again."""

    number: int
    data: dict[str, Any]
    reward: dict[str, Any]
    rng: dict[str, Any]


@dataclass
class _Work:
    """What the trainer asks the background to do between two generations."""

    call: Callable[[], Generation]
    result: Generation | None = None


class Background:
    """Experience is made ahead of the trainer, in a thread of its own; the engine samples with `model`.

    `in_flight`: none, keep or recompute; what becomes of the cache when newer weights come between two tokens.
    """

    def __init__(self, policy: nn.Module, *, in_flight: str = "none") -> None:
        self.model: Any = own_copy(policy)
        """What the engine samples with."""
        self._in_flight = in_flight
        self._k = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Held for all that follows, which both threads read and write."""
        self._weights: dict[int, Weights] = {}
        """By version: the one that the engine has and those that it still may need."""
        self._engine_has: int | None = None
        self._newest = 0
        self._released = -1
        """The newest version that may be sampled with: the newest, or the one before while an evaluation is due."""
        self._queue: list[Generation] = []
        self._number = 1
        """The first step of the next generation, as if no generation had been dropped."""
        self._lost = 0
        """Steps that dropped generations were made for."""
        self._begun: _Place | None = None
        """Where the generation that is under way began."""
        self._work: _Work | None = None
        self._idle = 0.0
        self._failure: BaseException | None = None
        self._closing = False

    # ---- the trainer's side

    def start(self, run: Run) -> None:
        """Begin to sample with the weights that the run starts or goes on with."""
        self._k = run.generation.max_staleness
        self._weights[run.finished] = snapshot(run.policy)
        self._newest = run.finished
        self._released = run.finished - 1
        waiting = len(run.pending) + sum(steps_served(run, one) for one in self._queue)
        self._number = max(self._number, run.finished + 1 + waiting)
        if self._in_flight != "none":
            run.engine.in_flight(self._newer, recompute=self._in_flight == "recompute")  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._live, args=(run,), name="rollouts", daemon=True)
        self._thread.start()

    def next(self, run: Run, number: int, clock: Clock) -> Experience:
        """Return what step `number` learns from; a failure comes when the experience that it spoilt is asked for."""
        dropped = 0
        self._let_go()
        while not run.pending:
            with clock("trainer_idle"):
                generation, depth = self._take()
            run.pending = experiences(run, generation, number, clock)
            with self._changed:
                self._lost += steps_served(run, generation) - len(run.pending)
                self._changed.notify_all()
            if not run.pending:
                dropped += len(generation.kept)
                continue
            told = dict(run.pending[0].metrics)
            told |= {"async/queue_depth": float(depth), "async/groups_dropped": told["async/groups_dropped"] + dropped}
            run.pending[0] = replace(run.pending[0], metrics=told)
        learnt = run.pending.pop(0)
        return replace(learnt, metrics={**learnt.metrics, **age_metrics(learnt.rollouts, run.group_size, number)})

    def sync(self, run: Run, number: int, clock: Clock) -> None:
        """Copy the weights that step `number` has made, for the background to take when it needs them."""
        with clock("sync"):
            weights = snapshot(run.policy)
        with self._changed:
            self._weights[number], self._newest = weights, number
            if self._in_flight != "none":  # versions between were never sampled with
                kept = (self._engine_has, self._released, number)
                self._weights = {version: held for version, held in self._weights.items() if version in kept}

    def release(self) -> None:
        """Let the background sample with the newest weights; with k = 0 only when the next step asks, since what the
        step before leaves behind is saved until then and nothing is gained."""
        if self._k > 0:
            self._let_go()

    def _let_go(self) -> None:
        with self._changed:
            self._released = self._newest
            self._changed.notify_all()

    def evaluate(self, run: Run, work: Callable[[], Generation]) -> Generation:
        """Have `work` done in the background with the newest weights, once nothing is owed to older ones."""
        with self._changed:
            self._work = asked = _Work(work)
            self._changed.notify_all()
            self._wait(lambda: asked.result is not None)
        assert asked.result is not None
        return asked.result

    def state_dict(self, run: Run) -> dict[str, Any]:
        """Return the state of data, reward and random numbers where the unfinished generation began, and the finished
        ones that wait, with the older weights that are still to be sampled with."""
        with self._changed:
            place = self._begun or self._here(run)
            needed = range(self._wanted(place.number), self._newest) if self._in_flight == "none" else ()
            weights = {version: dict(self._weights[version]) for version in needed if version in self._weights}
            queue = to_state(self._queue)
            ahead = {"queue": queue, "number": place.number, "lost": self._lost, "weights": weights}
        rng = {**capture_rng(), **place.rng}
        return {"data": place.data, "reward": place.reward, "rng": rng, "ahead": ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what waited, and with the weights that were still to be sampled with."""
        self._queue = from_state(state["queue"], Generation)
        self._number, self._lost = state.get("number", 1), state.get("lost", 0)
        self._weights = dict(state.get("weights", {}))

    def close(self, run: Run) -> None:
        """Cancel what is under way, end the thread and release the engine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        give_up = time.monotonic() + PATIENCE
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < give_up:
            run.engine.cancel()  # again and again: it does nothing between two calls of the engine
            abandon()
            self._thread.join(0.05)
        run.engine.close()

    def _take(self) -> tuple[Generation, int]:
        """Wait for the next generation; return it and how many wait behind it."""
        with self._changed:
            self._wait(lambda: bool(self._queue))
            return self._queue.pop(0), len(self._queue)

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._failure is not None:
                raise self._failure
            self._changed.wait()

    # ---- the background's side

    def _live(self, run: Run) -> None:
        try:
            while (task := self._next_task(run)) is not None:
                task(run)
        except BaseException as error:  # of rewards, engines and user code: raised again in the trainer's thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_task(self, run: Run) -> Callable[[Run], None] | None:
        """Wait until there is something to do; None when the run ends."""
        began = time.perf_counter()
        with self._changed:
            while not self._closing:
                more = self._number - self._lost <= run.info.max_steps
                wanted = self._wanted(self._number)
                if self._work is not None and (self._in_flight != "none" or not more or wanted >= self._newest):
                    return self._do_work
                if more and self._released >= wanted:
                    self._idle += time.perf_counter() - began
                    self._begun = self._here(run)
                    return self._generate
                self._changed.wait()
        return None

    def _wanted(self, number: int) -> int:
        """Return the version that a generation is sampled with; in flight, the oldest that it may begin with."""
        return max(min(self._weights), number - self._lost - 1 - self._k)

    def _here(self, run: Run) -> _Place:
        states = capture_rng()
        rng = {name: states[name] for name in _BACKGROUND_RNG}
        # a reward may go on writing into what it returned
        return _Place(self._number, run.data.state_dict(), deepcopy(run.reward_state()), rng)

    def _generate(self, run: Run) -> None:
        stages = Stages()
        with stages("take_over"):
            self._take_over(run, lambda: self._released if self._in_flight != "none" else self._wanted(self._number))
        made = sample_generation(run, self._number, stages)
        drawn = {"async/prompts_drawn": float(run.data.state_dict()["position"])}
        metrics = {**made.metrics, **stages.stages(made.rollouts), "time/engine_idle": self._idle, **drawn}
        with self._changed:
            self._queue.append(replace(made, metrics=metrics, ahead=True))
            self._number += steps_served(run, made)
            self._begun, self._idle = None, 0.0
            self._changed.notify_all()

    def _do_work(self, run: Run) -> None:
        with self._changed:
            asked, self._work = self._work, None
        assert asked is not None
        self._take_over(run, lambda: self._newest)
        result = asked.call()
        with self._changed:
            asked.result = result
            self._changed.notify_all()

    def _take_over(self, run: Run, which: Callable[[], int]) -> None:
        """Let the engine have the weights of a version."""
        version = self._load(which)
        if version is not None:
            run.sync_engine(version)

    def _load(self, which: Callable[[], int]) -> int | None:
        """Put a version's weights into the model and forget older ones; None where they are there already."""
        with self._changed:
            version = which()
            if version == self._engine_has:
                return None
            adopt(self.model, self._weights[version])
            self._engine_has = version
            self._weights = {at: held for at, held in self._weights.items() if at >= version}
        return version

    def _newer(self) -> int | None:
        """Put newer weights into the model where there are any; return their version. Asked between two tokens."""
        return self._load(lambda: max(self._released, self._engine_has or 0))
