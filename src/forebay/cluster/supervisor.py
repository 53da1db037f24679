"""Keeps one actor going: Ray starts its process again, and this sets it up again and counts.

::

    up --process ends--> Ray starts it again --> set_up() --> up, one more restart
        '-it lives, but cannot work, or gives |
          no sign of life: killed             | it does not come, or raises
                                              v
                                            gone: everybody who needs it gets a PartLost

    consumes: ends of the process    waits for: `live`, a call that does not end as long as the process lives
    woken by: Ray, or by who got no answer    produces: a process that is set up, and a count
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from forebay.cluster.library import import_ray, why
from forebay.engines import EngineLost
from forebay.runs.placement import PartLost
from forebay.watching.stalls import ANSWER_LIMIT_S, StallError, answered

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0
"""For a process to come back: minutes are usual where a large model is loaded."""

TELL_LIMIT_S = ANSWER_LIMIT_S + 10.0
"""For a pause or a resume: more than the pool in an engine's process gives each of its engines, so that it
can go on without one; less than the run gives its controller before it ends."""

LOOK_EVERY_S = 30.0
"""Between two questions whether a process answers: Ray notices one that ended, not one that is stopped."""

SILENCE_LIMIT_S = 120.0
"""For that answer: more than the longest that a judge or an engine may block the process's event loop."""

MAX_FAILED_STARTS = 5
"""Starts in a row that end before the part was set up: a part that cannot be must not be tried for ever."""


class NotBuilt(RuntimeError):
    """The actor's process is a new one, which nobody has set up yet."""


class Supervisor:
    """Watches one actor, which has the methods `live` and those that `set_up` calls.

    Invariants: while `is_up`, the process is set up; a process that ended is counted once, one that could
    only not be reached never; `gone` is final.

    >>> supervisor = Supervisor("engine 0", actor, set_up, pid=facts.pid)
    >>> supervisor.watch()                                     # in the event loop, once it was set up
    >>> await supervisor.until_up()
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        set_up: Callable[[], Awaitable[int]],
        *,
        pid: int,
        on_end: Callable[[], None] = lambda: None,
        on_restart: Callable[[str, str], None] = lambda part, reason: None,
        failure: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`set_up` gives the id of the process, `on_end` is told before it that the last one has ended.

        `on_restart` is told of each new process that is set up: the name, and why. `failure` gives the reason
        why a process that lives cannot do its work any more, if it comes to that: it is ended then.
        """
        self.name = name
        self.actor = actor
        self.pid = pid
        self.is_up = True
        self.incarnation = 0
        """Grows each time it is set up again."""
        self.gone: PartLost | None = None
        self._set_up = set_up
        self._on_end, self._on_restart = on_end, on_restart
        self._failure = failure
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._suspicion = asyncio.Event()
        self._suspected_because = ""
        self._has_to_end = False

    def watch(self) -> None:
        """Begin; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch {self.name}")

    async def stop(self) -> None:
        """Watch no more; what ends from now on is nobody's business."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def suspect(self, incarnation: int, error: Exception, *, has_to_end: bool = False) -> None:
        """That process did not answer, because of `error`: it is not up until it is known to be.

        One that lives all the same `has_to_end` where it would not answer the next call either.
        """
        if incarnation == self.incarnation and self.is_up and self.gone is None:
            self.is_up, self._has_to_end = False, has_to_end
            self._suspected_because = why(error)
            self._suspicion.set()

    async def until_up(self) -> None:
        """Return once it is up.

        Raises:
            PartLost: it will not come up any more.
        """
        while not self.is_up:
            if self.gone is not None:
                raise self.gone
            await self._news.wait()

    async def _run(self) -> None:
        while self.gone is None:
            cause = await self._end_of_process()
            self.is_up = False
            self._on_end()
            logger.warning("%s ended (%s); it is started again", self.name, cause)
            try:
                pid = await answered(self._revive(), f"{self.name} was started again", START_LIMIT_S)
                self._came_back(pid, cause)
            # Whatever went wrong, nobody may wait for it any longer; the error is told to those who do.
            except Exception as error:
                self.is_up = False
                self.gone = PartLost(f"{self.name} is lost ({cause}) and did not come back: {why(error)}")
                logger.error("%s", self.gone)
                # So that who waits for it elsewhere learns of it too.
                import_ray().kill(self.actor)
            self._suspicion.clear()
            self._wake()

    async def _end_of_process(self) -> str:
        """Return why, once it has ended, or is suspected to have."""
        living = asyncio.ensure_future(_until_it_ends(self.actor))
        waiting: list[asyncio.Future[Any]] = [
            living,
            asyncio.ensure_future(self._suspicion.wait()),
            asyncio.ensure_future(self._note_silence()),
        ]
        if self._failure is not None:
            waiting.append(asyncio.ensure_future(self._note_failure(self._failure)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                return living.result()
            if self._has_to_end:
                import_ray().kill(self.actor, no_restart=False)
                # Until then a call would reach the process that is to end.
                await living
            return self._suspected_because
        finally:
            self._has_to_end = False
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _note_silence(self) -> None:
        incarnation, what = self.incarnation, f"{self.name} was asked for a sign of life"
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await answered(self.actor.__ray_ready__.remote(), what, SILENCE_LIMIT_S)
            except StallError as error:
                self.suspect(incarnation, error, has_to_end=True)
                return
            except import_ray().exceptions.RayError:
                # It has ended, or is out of reach: who waits for `live` learns what is true.
                continue

    async def _note_failure(self, failure: Callable[[], Awaitable[str]]) -> None:
        incarnation = self.incarnation
        try:
            self.suspect(incarnation, RuntimeError(await failure()), has_to_end=True)
        except import_ray().exceptions.RayError as error:
            self.suspect(incarnation, error)

    async def _revive(self) -> int:
        for num_left in reversed(range(MAX_FAILED_STARTS)):
            # Asked until Ray has made the process anew, so that only what fails in it is a failed start; it
            # raises if Ray does so no more, as where the actor's constructor did.
            await self.actor.__ray_ready__.options(max_task_retries=-1).remote()
            try:
                return await self._set_up()
            except (import_ray().exceptions.RayActorError, NotBuilt, EngineLost, StallError) as error:
                if not num_left:
                    raise
                logger.warning("%s could not be set up, and is tried again: %s", self.name, why(error))
                if isinstance(error, EngineLost | StallError):
                    # It lives, and would fail again.
                    await self._end_process()
        raise AssertionError("the last attempt returns or raises")

    async def _end_process(self) -> None:
        """End the process and return once it has ended; Ray makes another one."""
        living = self.actor.live.remote()
        with contextlib.suppress(import_ray().exceptions.RayError):
            # Once this is answered, the call before it waits in the process that is to end, not in the next.
            await self.actor.__ray_ready__.remote()
            import_ray().kill(self.actor, no_restart=False)
            await living

    def _came_back(self, pid: int, cause: str) -> None:
        is_another = pid != self.pid
        self.pid, self.is_up = pid, True
        self.incarnation += 1
        if is_another:
            self._on_restart(self.name, cause)
        else:
            logger.warning("%s could not be reached for a while; it is the same process as before", self.name)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def _until_it_ends(actor: Any) -> str:
    try:
        await actor.live.remote()
    except import_ray().exceptions.RayError as error:
        return why(error)
    return "it was told to end"
