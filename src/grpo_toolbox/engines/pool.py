"""Completions from servers: one engine over one or several of them, whatever they speak."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

from torch import nn

from grpo_toolbox.engines import OnFinished, Traits
from grpo_toolbox.engines.dialect import Dialect, Served
from grpo_toolbox.engines.dispatch import Dispatch, Job
from grpo_toolbox.engines.identity import Identity
from grpo_toolbox.engines.reading import Decode, Reader
from grpo_toolbox.engines.sampling import row_seeds
from grpo_toolbox.engines.server import Foreign, Refused, Server
from grpo_toolbox.engines.stamps import stretches
from grpo_toolbox.engines.sync import WeightSync
from grpo_toolbox.errors import Cancelled, EngineError
from grpo_toolbox.types import LogpKind, Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

_LOOK = 0.05


class ServerEngine:
    """Shares completions out to servers that hold the policy's weights, and brings those weights there.

    `weights_version` is how many syncs a resumed run has seen before. Without `sync` servers keep what they have.
    """

    def __init__(
        self,
        dialect: Dialect,
        servers: Sequence[Server],
        policy: nn.Module,
        *,
        decode: Decode,
        stop_ids: Sequence[int],
        identity: Identity,
        sync: WeightSync | None = None,
        model: str | None = None,
        weights_version: int = 0,
    ) -> None:
        self._dialect, self._servers, self._policy = dialect, list(servers), policy
        self._decode, self._stop_ids = decode, tuple(stop_ids)
        self._identity, self._sync, self._model = identity, sync, model
        self._version = weights_version
        self._kind: LogpKind = "processed"
        self._known: dict[Server, Served] = {}
        self._running: _Running | None = None
        self._newer: Callable[[], int | None] = lambda: None
        self._look: float | None = None
        """Seconds between looks for newer weights while completions are drawn; None where none come in flight."""
        self._executor = ThreadPoolExecutor(len(self._servers), thread_name_prefix="admit")

    @property
    def traits(self) -> Traits:
        """What was measured at the start."""
        return Traits(shares_weights=False, exact=False, logps=self._kind, drawn_logps=self._kind == "processed")

    @property
    def dialect(self) -> Dialect:
        """What they speak."""
        return self._dialect

    @property
    def servers(self) -> Sequence[Server]:
        """All of them, up or not."""
        return self._servers

    def start(self) -> Self:
        """Wait until every server is up and has the weights, and measure what its log-probs are of.

        Raises EngineError where one does not come up in time, or is not the one that is needed.
        """
        limits = self._servers[0].limits
        until = time.monotonic() + limits.start_timeout_s
        for server in self._servers:
            self._wait_for(server, until)
        kinds = {server.address: self._measured(server) for server in self._servers}
        if len(set(kinds.values())) > 1:
            raise EngineError(
                f"rollout servers report log-probs of different distributions ({kinds}): start all alike."
            )
        self._kind = kinds[self._servers[0].address]
        return self

    def _measured(self, server: Server) -> LogpKind:
        """Measure a server; one that another run has left with its weights gets this run's first."""
        if self._sync is not None and self._sync.version(server) is None and not self._dialect.untouched(server):
            self._push([server])
        return self._identity.measure(self._dialect, server)

    def _wait_for(self, server: Server, until: float) -> None:
        said = False
        while not server.healthy():
            if time.monotonic() > until:
                raise EngineError(
                    f"no rollout server at {server.address} within rollout.server.start_timeout_s="
                    f"{server.limits.start_timeout_s:g} seconds ({server.trouble}) "
                    "Start it (`toolbox serve` says how), or set rollout.server.urls."
                )
            if not said:
                log.warning("waiting for the rollout server at %s", server.address)
                said = True
            time.sleep(min(1.0, server.limits.health_every_s))
        self._admit(server)
        server.up = True

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return `group_size` rollouts per prompt, prompt-major; `on_finished(row, rollout)` hears of each."""
        reader = Reader(self._decode, self._stop_ids, sampling, self._kind)
        rollouts: dict[int, Rollout] = {}
        done: queue.SimpleQueue[Job | BaseException | None] = queue.SimpleQueue()
        dispatch = Dispatch(
            self._servers,
            self._dialect,
            sampling,
            self._stop_ids,
            admit=self._admit,
            whose=self._whose,
            done=done.put,
            executor=self._executor,
        )
        with _Running(dispatch, _jobs(prompts, group_size, sampling.seed), done) as self._running:
            while (item := self._next(done)) is not None:
                if isinstance(item, BaseException):
                    raise item
                row = item.row
                versions = stretches(item.versions)
                rollouts[row] = reader.rollout(prompts[row // group_size], item.ids, item.logps, versions)
                if on_finished is not None:
                    on_finished(row, rollouts[row])
        return [rollouts[row] for row in range(len(prompts) * group_size)]

    def in_flight(self, newer: Callable[[], int | None], *, recompute: bool) -> None:
        """From now on ask `newer` while completions are drawn, and send the weights that it says are there.

        What becomes of the cache the weight sync was told when it was made. Which weights drew which tokens the server
        says, where its dialect asks; else they carry the version at which they were asked for, and may be younger.
        """
        self._newer, self._look = newer, _LOOK

    def _next(self, done: queue.SimpleQueue[Job | BaseException | None]) -> Job | BaseException | None:
        while True:
            version = self._newer()
            if version is not None:
                self.sync(version)
            try:
                return done.get(timeout=self._look)
            except queue.Empty:  # time to look again
                continue

    def cancel(self) -> None:
        """Give up the `generate` that is under way; servers drop what nobody waits for."""
        if self._running is not None:
            self._running.cancel()

    def sync(self, version: int | None = None) -> int:
        """Bring the policy's weights to the servers that are up; one that is down gets them when it comes back."""
        self._version = self._version + 1 if version is None else version
        if self._sync is None:
            return self._version
        try:
            self._push([server for server in self._servers if server.up])
        except EngineError as error:
            log.warning("%s; who comes back gets them", error)
            self._give_up_those_without()
        return self._version

    def close(self) -> None:
        """Close connections and what the sync holds; the servers go on."""
        self.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._sync is not None:
            self._sync.close()
        for server in self._servers:
            server.close()

    def _give_up_those_without(self) -> None:
        """Take servers that do not state the new version out of use until they are admitted again."""
        for server in self._servers:
            try:
                has = self._sync is not None and self._sync.version(server) == self._version
            except EngineError as error:
                has, server.trouble = False, str(error)
            server.up = server.up and has
            if has:
                self._has_weights(server)

    def _has_weights(self, server: Server) -> None:
        if self._sync is not None and self._sync.served_as is not None:
            server.model = self._sync.served_as
        server.version = self._version  # behind the name: who asks in between states the older version of the two

    def _whose(self, stated: str, asked: int) -> int | None:
        return asked if self._sync is None else self._sync.drew(stated, asked)

    def _push(self, servers: Sequence[Server]) -> None:
        if self._sync is None or not servers:
            return
        for server in servers:
            server.lock.acquire()
        try:
            self._sync.push(servers, self._policy, self._version)
            for server in servers:
                self._has_weights(server)
        finally:
            for server in servers:
                server.lock.release()

    def _admit(self, server: Server) -> None:
        """Make sure that a server is there, is the right one, and has the run's weights."""
        if not server.healthy():
            raise EngineError(server.trouble)
        if server in self._known and self._has_version(server):
            self._has_weights(server)  # whoever states a version of this run's is the process that was asked before
            return
        served = self._served(server)
        self._identity.check(self._dialect, server, served)
        server.model = served.name if self._sync is None else self._sync.served_as or served.name
        if self._sync is None:
            server.version = 0
        elif self._has_version(server) or (self._version == 0 and self._dialect.untouched(server)):
            server.version = self._version  # in the second case neither has moved from the checkpoint of both
        else:
            log.warning("%s does not have the weights of version %d: they are sent", server.address, self._version)
            self._push([server])

    def _has_version(self, server: Server) -> bool:
        """Whether a server states the run's version, asked while nobody sends it weights."""
        with server.lock:
            return self._sync is not None and self._sync.version(server) == self._version

    def _served(self, server: Server) -> Served:
        """Ask what a server runs; one that comes back must run what it ran before."""
        try:
            served = self._dialect.served(server)
        except (Refused, LookupError, TypeError, ValueError) as error:  # whatever answers at that address
            raise Refused(
                f"{server.address} does not answer as rollout.engine={self._dialect.name} does ({error}): set another "
                "rollout.engine or rollout.server.urls."
            ) from error
        if self._model is not None:
            served = replace(served, name=self._model)
        before = self._known.setdefault(server, served)
        if served != before:
            raise Foreign(
                f"{server.address} came back with another model: {served.about} ({served.name}), and before it was "
                f"{before.about} ({before.name}). Start it again as it was."
            )
        return served


class _Running:
    """A generation in a thread of its own, with its event loop; what it brings goes into a queue, None at the end."""

    def __init__(
        self, dispatch: Dispatch, jobs: Sequence[Job], done: queue.SimpleQueue[Job | BaseException | None]
    ) -> None:
        self._dispatch, self._jobs, self._out = dispatch, jobs, done
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._thread.join()

    def cancel(self) -> None:
        """End it soon; Cancelled comes out of the queue."""
        self._given_up.set()
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop has ended by itself
            return

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except asyncio.CancelledError:
                self._out.put(Cancelled("the generation of rollouts was cancelled."))
            except Exception as error:  # whatever it is, the thread that waits must hear of it
                self._out.put(error)
            else:
                self._out.put(None)

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        if self._given_up.is_set():
            raise asyncio.CancelledError
        await self._dispatch.run(self._jobs)


def _jobs(prompts: Sequence[Prompt], group_size: int, seed: int) -> list[Job]:
    return [
        Job(row, row // group_size, prompts[row // group_size].id, prompts[row // group_size].ids, own)
        for row, own in enumerate(row_seeds(seed, [prompt.id for prompt in prompts], group_size))
    ]
