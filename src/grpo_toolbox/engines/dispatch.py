"""One generation over several servers, on an event loop: who is asked for what, and what happens when one fails.

Every completion is a job of its own. It is handed to the server with the fewest, its group staying together for the
prefix cache's sake, in one request where the server takes several. It comes back once: done, or to be asked for again,
elsewhere where there is an elsewhere. A server that fails gives all its jobs back, and is admitted again when it is
well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_toolbox.engines.dialect import Answer, Ask, Dialect, Incomplete
from grpo_toolbox.engines.server import (
    HEALTH,
    HEALTH_TIMEOUT_S,
    Foreign,
    Refused,
    Server,
    read_json,
    trusted,
    what_failed,
)
from grpo_toolbox.engines.stamps import Whose, token_versions
from grpo_toolbox.errors import EngineError
from grpo_toolbox.types import Sampling

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 10.0


@dataclass(eq=False)
class Job:
    """One completion on its way."""

    row: int
    group: int
    prompt_id: int
    prompt: Sequence[int]
    seed: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token so far."""
    tries: int = 0
    """Errors of servers that were up."""
    avoid: Server | None = None
    """Where the last one happened."""

    def take(self, answer: Answer, versions: Sequence[int]) -> None:
        """Put what was drawn behind what there is."""
        self.ids += answer.ids
        self.logps += answer.logps
        self.versions += versions


class Dispatch:
    """Serves jobs until all are done.

    `admit(server)` blocks, and raises EngineError where a server cannot be used; `whose` reads the weights versions
    that servers state.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        dialect: Dialect,
        sampling: Sampling,
        stop_ids: Sequence[int],
        *,
        admit: Callable[[Server], None],
        whose: Whose,
        done: Callable[[Job], None],
        executor: Executor,
    ) -> None:
        self._servers, self._dialect = servers, dialect
        self._sampling, self._stop_ids = sampling, tuple(stop_ids)
        self._admit, self._whose, self._done, self._executor = admit, whose, done, executor
        self._limits = servers[0].limits
        self._waiting: deque[Job] = deque()
        self._working: dict[Server, dict[Job, asyncio.Task[None]]] = {server: {} for server in servers}
        self._home: dict[int, Server] = {}
        """Where a group's last completion was sent."""
        self._failure: BaseException | None = None
        self._pauses: set[asyncio.Task[None]] = set()
        self._down_since: float | None = None

    async def run(self, jobs: Sequence[Job]) -> None:
        """Return when every job was done. Raises EngineError for what cannot be mended by asking again."""
        import httpx

        for server in self._servers:
            server.up = False  # it may have restarted since it was last asked: each is admitted anew
        self._waiting.extend(jobs)
        self._left = len(jobs)
        self._changed = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._limits.max_in_flight)
        client = httpx.AsyncClient(timeout=self._limits.request_timeout_s, limits=limits, verify=trusted())
        async with client as self._client:
            keepers = [self._task(self._keep(server)) for server in self._servers]
            try:
                while self._left and self._failure is None:
                    self._changed.clear()
                    self._hand_out()
                    self._watch_outage()
                    await self._change_or(1.0)
            finally:
                working = [task for tasks in self._working.values() for task in tasks.values()]
                await _end([*keepers, *working, *self._pauses])
        if self._failure is not None:
            raise self._failure

    async def _change_or(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    # ---- servers

    async def _keep(self, server: Server) -> None:
        """Admit a server, look after it while it is up, and begin again; one that came back may lack the weights."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._executor, self._admit, server)
            except Foreign as error:
                self._fail(error)
                return
            except EngineError as error:  # whatever stands in for a server that restarts may refuse anything
                server.trouble = str(error)
                await asyncio.sleep(self._limits.health_every_s)
                continue
            server.up = True
            self._changed.set()
            await self._while_healthy(server)

    async def _while_healthy(self, server: Server) -> None:
        bad = 0
        while server.up and bad < self._limits.unhealthy_after:
            await asyncio.sleep(self._limits.health_every_s)
            bad = 0 if await self._healthy(server) else bad + 1
        if server.up:
            self._lose(server, f"{server.address}{HEALTH} failed {bad} times in a row.")

    async def _healthy(self, server: Server) -> bool:
        import httpx

        try:
            answer = await self._client.get(server.address + HEALTH, headers=server.headers, timeout=HEALTH_TIMEOUT_S)
        except httpx.RequestError:
            return False
        return answer.status_code < 500

    def _lose(self, server: Server, trouble: str) -> None:
        """Give a server up for now, and take its jobs back."""
        if server.up:
            log.warning("%s is given up for now, with %d completions: %s", server.address, self._load(server), trouble)
        server.up, server.trouble = False, trouble
        jobs, self._working[server] = self._working[server], {}
        for task in set(jobs.values()) - {asyncio.current_task()}:
            task.cancel()
        self._return(list(jobs))

    def _return(self, jobs: Sequence[Job]) -> None:
        """Put jobs before those that wait, in the order that they had."""
        self._waiting.extendleft(reversed(jobs))
        self._changed.set()

    def _watch_outage(self) -> None:
        if any(server.up for server in self._servers):
            self._down_since = None
            return
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._down_since > self._limits.outage_timeout_s:
            said = "; ".join(server.trouble for server in self._servers)
            self._fail(
                EngineError(
                    f"no rollout server could be used for rollout.server.outage_timeout_s="
                    f"{self._limits.outage_timeout_s:g} seconds, with {self._left} completions to go: {said}"
                )
            )

    # ---- jobs

    def _load(self, server: Server) -> int:
        return len(self._working[server])

    def _hand_out(self) -> None:
        while self._waiting:
            server = self._server_for(self._waiting[0])
            if server is None:
                return
            jobs = self._joined(server)
            self._home[jobs[0].group] = server
            task = self._task(self._ask(server, jobs))
            self._working[server].update(dict.fromkeys(jobs, task))

    def _joined(self, server: Server) -> list[Job]:
        """Take those from the front that one request asks for."""
        jobs = [self._waiting.popleft()]
        room = self._limits.max_in_flight - self._load(server)
        while self._waiting and len(jobs) < room and self._joins(server, self._waiting[0], jobs[-1]):
            jobs.append(self._waiting.popleft())
        return jobs

    def _joins(self, server: Server, job: Job, former: Job) -> bool:
        if (job.group, job.avoid) != (former.group, former.avoid):
            return False
        return self._dialect.joins(self._rest_of(server, job), self._rest_of(server, former))

    def _server_for(self, job: Job) -> Server | None:
        room = [one for one in self._servers if one.up and self._load(one) < self._limits.max_in_flight]
        room = [one for one in room if one is not job.avoid] or room
        if not room:
            return None
        home = self._home.get(job.group)
        return home if home in room else min(room, key=self._load)

    async def _ask(self, server: Server, jobs: list[Job]) -> None:
        """Ask for completions, or the rest of them, and see what came of it."""
        import httpx

        version = server.version or 0
        path, body = self._dialect.request([self._rest_of(server, job) for job in jobs])
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):  # httpx limits each read, not the whole answer
                response = await self._client.post(server.address + path, json=body, headers=server.headers)
            answers = self._dialect.read(read_json(server.address + path, response))
            if len(answers) != len(jobs):
                raise ValueError(f"{len(answers)} of {len(jobs)} completions")
        except (TimeoutError, httpx.TimeoutException):
            self._again(server, jobs, f"no answer within {self._limits.request_timeout_s:g} s")
        except httpx.RequestError as error:
            if jobs[0] in self._working[server]:
                self._lose(server, f"{server.address}{path}: {what_failed(error)}.")
        except Refused as error:
            self._fail(EngineError(f"prompt {jobs[0].prompt_id}: {error}"))
        except Incomplete as error:
            for job in jobs:
                job.seed += len(jobs)
            self._again(server, jobs, str(error))
        except EngineError as error:
            self._again(server, jobs, str(error))
        except (LookupError, TypeError, ValueError) as error:  # another program may answer at that address
            self._again(server, jobs, f"an answer of another form ({type(error).__name__}: {error})")
        else:
            for job, answer in zip(jobs, answers, strict=True):
                self._take(server, job, answer, version)

    def _rest_of(self, server: Server, job: Job) -> Ask:
        drawn = len(job.ids)
        return Ask(
            model=server.model,
            ids=(*job.prompt, *job.ids),
            max_new_tokens=self._sampling.max_new_tokens - drawn,
            min_new_tokens=max(self._sampling.min_new_tokens - drawn, 0),
            sampling=self._sampling,
            seed=(job.seed + drawn) % 2**31,
            stop_ids=self._stop_ids,
            version=server.version or 0,
        )

    def _take(self, server: Server, job: Job, answer: Answer, version: int) -> None:
        if job not in self._working[server]:  # given back meanwhile: somebody else draws it
            return
        versions = token_versions(answer, version, self._whose, self._dialect.late)
        known = len(versions)
        strange = known < len(answer.ids)
        if strange:
            answer = replace(answer, ids=answer.ids[:known], logps=answer.logps[:known], finish="abort")
        wrong = self._what_is_wrong(job, answer)
        if wrong:
            self._fail(EngineError(f"{server.address}, prompt {job.prompt_id}: {wrong}"))
            return
        job.take(answer, versions)
        if strange:
            trouble = "it drew tokens with weights that are none of this run's."
            self._again(server, [job], trouble)
            self._lose(server, trouble)
            return
        self._working[server].pop(job)
        if answer.finish != "abort":
            self._left -= 1
            self._done(job)
        else:
            self._pause([job], self._limits.health_every_s / 10)
        self._changed.set()

    def _what_is_wrong(self, job: Job, answer: Answer) -> str | None:
        if len(answer.ids) != len(answer.logps):
            return f"{len(answer.ids)} token ids and {len(answer.logps)} log-probs."
        if not all(map(math.isfinite, answer.logps)):
            return "a log-prob that is not finite: its weights are broken; nothing of this step is trained."
        if answer.finish == "stop" and (not answer.ids or answer.ids[-1] not in self._stop_ids):
            return (
                f"it ended a completion with token {answer.ids[-1] if answer.ids else None}, and the trainer's stop "
                f"tokens are {list(self._stop_ids)}: it has another tokenizer or generation_config.json."
            )
        if answer.finish == "length" and len(job.ids) + len(answer.ids) < self._sampling.max_new_tokens:
            return (
                f"it ended a completion after {len(job.ids) + len(answer.ids)} of {self._sampling.max_new_tokens} "
                "tokens: start it with room for prompt and completion (vLLM: --max-model-len)."
            )
        return None

    def _again(self, server: Server, jobs: Sequence[Job], trouble: str) -> None:
        """Put jobs back after an error of a server that is up; too many of them end the run."""
        returned = [job for job in jobs if self._working[server].pop(job, None) is not None]
        if not returned:  # they were given back meanwhile
            return
        for job in jobs:
            job.tries, job.avoid = job.tries + 1, server
        prompt, tries = jobs[0].prompt_id, max(job.tries for job in jobs)
        if tries > self._limits.retries:
            self._fail(
                EngineError(
                    f"prompt {prompt} failed {tries} times, more than rollout.server.retries="
                    f"{self._limits.retries}; at last: {trouble}"
                )
            )
            return
        log.warning("prompt %d is asked for again: %s", prompt, trouble)
        self._pause(jobs, min(_LONGEST_PAUSE, 0.25 * 2**tries))

    def _pause(self, jobs: Sequence[Job], seconds: float) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            self._return(jobs)

        task = asyncio.create_task(later())
        self._pauses.add(task)
        task.add_done_callback(self._pauses.discard)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose error, if it has one that nobody expected, ends the generation."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
