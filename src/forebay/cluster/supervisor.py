"""Keeps one actor going: Ray starts its process again, and this sets it up again and counts.

::

    up --process ends--> Ray starts it again --> set_up() --> up, one more restart
                                 | it does not come, or raises
                                 v
                               gone: everybody who needs it gets a PartLost

    consumes: ends of the process    waits for: `live`, a call that does not end as long as the process lives
    woken by: Ray, or by who got no answer    produces: a process that is set up, and a count
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from forebay.cluster.library import import_ray, why
from forebay.runs.placement import PartLost
from forebay.stalls import answered

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0
"""For a process to come back: minutes are usual where a large model is loaded."""

MAX_FAILED_STARTS = 5
"""Starts in a row that end before the part was set up: a part that cannot be must not be tried for ever."""


class Supervisor:
    """Watches one actor, which has the methods `live` and those that `set_up` calls.

    Invariants: while `is_up`, the process is set up; a process that ended is counted once; `gone` is final.

    >>> supervisor = Supervisor("engine 0", actor, set_up)
    >>> supervisor.watch()                                     # in the event loop, once it was set up
    >>> await supervisor.until_up()
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        set_up: Callable[[], Awaitable[None]],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is told when the process has ended, before it is set up again."""
        self.name = name
        self.actor = actor
        self.is_up = True
        self.num_restarts = 0
        self.gone: PartLost | None = None
        self._set_up = set_up
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._suspicion = asyncio.Event()
        self._suspected_because = ""

    @property
    def incarnation(self) -> int:
        """Which process it is, counted from 0."""
        return self.num_restarts

    def watch(self) -> None:
        """Begin; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch {self.name}")

    async def stop(self) -> None:
        """Watch no more; what ends from now on is nobody's business."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def suspect(self, incarnation: int, error: Exception) -> None:
        """That process did not answer, because of `error`: it is not up until it is known to be."""
        if incarnation == self.incarnation and self.is_up and self.gone is None:
            self.is_up = False
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
                await answered(self._revive(), f"{self.name} was started again", START_LIMIT_S)
                self.num_restarts += 1
                self.is_up = True
            # Whatever went wrong, nobody may wait for it any longer; the error is told to those who do.
            except Exception as error:
                self.gone = PartLost(f"{self.name} is lost ({cause}) and did not come back: {why(error)}")
                logger.error("%s", self.gone)
            self._suspicion.clear()
            self._wake()

    async def _end_of_process(self) -> str:
        living = asyncio.ensure_future(_until_it_ends(self.actor))
        suspicion = asyncio.ensure_future(self._suspicion.wait())
        try:
            await asyncio.wait([living, suspicion], return_when=asyncio.FIRST_COMPLETED)
            return living.result() if living.done() else self._suspected_because
        finally:
            living.cancel()
            suspicion.cancel()
            await asyncio.gather(living, suspicion, return_exceptions=True)

    async def _revive(self) -> None:
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            try:
                return await self._set_up()
            except import_ray().exceptions.RayActorError as error:
                if attempt == MAX_FAILED_STARTS or not _comes_back(error):
                    raise

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def _until_it_ends(actor: Any) -> str:
    try:
        await actor.live.remote()
    except import_ray().exceptions.RayError as error:
        return why(error)
    return "it was told to end"


def _comes_back(error: Exception) -> bool:
    """Whether Ray goes on starting it: an actor whose constructor raised is not."""
    return isinstance(error, import_ray().exceptions.ActorUnavailableError)
