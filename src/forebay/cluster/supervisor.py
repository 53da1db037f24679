"""Keeps the parts of a run going: Ray starts a process again, and this sets it up again and counts.

::

    up --process ends--> Ray starts it again --> set up --> up, one more restart
        '-it lives, but cannot work, or gives |       ^
          no sign of life: killed             | it does not come, or raises
                                              v       |
                                            another actor in its place, at once

    consumes: ends of the process    waits for: `live`, a stream in which the process says what has changed
    woken by: Ray, too long a silence, or a call that got no answer
    produces: a process that is set up, and a count
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from forebay.aio.changed import Changes
from forebay.cluster.calls import NotBuilt
from forebay.cluster.library import cause_of, import_ray, why
from forebay.config import ConfigError
from forebay.engines import EngineLost
from forebay.runs.placement import Listener
from forebay.watching.stalls import ANSWER_LIMIT_S, StallError, answered

logger = logging.getLogger(__name__)

START_LIMIT_S = 600.0
"""The time that a process gets to come back: minutes are usual where a large model is loaded."""

TELL_LIMIT_S = ANSWER_LIMIT_S + 10.0
"""For a pause or a resume: more than the pool in an engine's process gives each of its engines, so that it
can go on without one; less than the run gives its controller before it ends."""

BEAT_EVERY_S = 30.0
"""The most time between two signs of life: Ray notices a process that ended, not one that is stopped."""

SILENCE_LIMIT_S = 120.0
"""Without a sign of life: longer than a judge or an engine may block the process's event loop."""


class Supervised:
    """One actor that the run's own process keeps going, and tells what is wanted of it.

    Invariants: while `is_up`, the process is set up and does what was wanted last; a process that ended is
    counted once, one that could only not be reached never.

    ::

        part = PlacedWorker(spec)
        part.begin(actor, ray.get(actor.start.remote(spec)))
        part.watch()  # in the event loop
    """

    kind: type[Any]
    """The class of its actors."""

    def __init__(self, spec: Any, on_restart: Listener = lambda part, reason: None) -> None:
        """To `begin` with an actor; `on_restart` is told of each new process that is set up from then on."""
        self.spec = spec
        """May be replaced: the next process that is set up follows it."""
        self.name = spec.name
        self.is_paused = False
        self.incarnation = 0
        """Grows each time it is set up again."""
        self.on_end: Callable[[str], None] = lambda name: None
        """Told its name when its process has ended, before another is set up."""
        self.in_place: Callable[[], None] = lambda: import_ray().kill(self.actor, no_restart=False)
        """Has it use another process, or another actor, in place of one that could not be set up."""
        self.changes = Changes()
        """It was set up again, or could not be; perhaps one of several parts together."""
        self.room: Any = None
        """Its place on the cluster."""
        self._on_restart = on_restart
        self._task: asyncio.Task[None] | None = None
        self._suspicion = asyncio.Event()
        self._suspected_because = ""
        self._has_to_end = False
        self.actor: Any = None
        self.pid = 0
        self.is_up = False

    def begin(self, actor: Any, pid: int) -> None:
        """Use this actor, which was started with `spec`: the first one, or another in place of a gone one."""
        self.use(actor)
        self.pid = pid
        self.is_up, self._task = True, None

    def use(self, actor: Any) -> None:
        """Its calls are for this actor, which `watch` sets up if none was begun with."""
        self.actor = actor

    def hear(self, said: Any) -> None:
        """Take in an item of `live`."""

    async def _follow_pause(self) -> None:
        """Have a process that was started rest or work as is wanted of it."""
        await (self.actor.pause if self.is_paused else self.actor.resume).remote()

    async def _bring_up_to_date(self) -> None:
        """Tell it anything else that is wanted of it."""

    def _wanted(self) -> tuple[Any, ...]:
        """All that a process is told: where it changes meanwhile, the process is told again."""
        return self.spec, self.is_paused

    def watch(self) -> None:
        """Begin; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch {self.name}")

    async def stop(self) -> None:
        """Watch no more: an end from now on is wanted."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """Watch no more, and free what the process holds; the process itself stays."""
        await self.stop()
        if self.is_up:
            await self.actor.close.remote()

    # No coroutines themselves: `is_paused` is right at once, for a part that joins and does as the others.
    def pause(self) -> Coroutine[Any, Any, None]:
        """Have what is running end as aborted; a process that is started again learns of it then."""
        self.is_paused = True
        return self.tell("pause")

    def resume(self) -> Coroutine[Any, Any, None]:
        """Go on; one that was not paused is not told. A process that is started again learns of it then."""
        self.watch()
        was_paused, self.is_paused = self.is_paused, False
        return self.tell("resume") if was_paused else asyncio.sleep(0)

    async def tell(self, method: str, *arguments: Any, limit_s: float | None = None) -> None:
        """Call a method without a result, within `TELL_LIMIT_S`; a part that is not up is not called.

        One that does not answer in time, perhaps because a judge blocks it, is ended and set up again.
        """
        self.watch()
        if not self.is_up:
            return
        incarnation, what = self.incarnation, f"{self.name} was asked to {method}"
        try:
            call = getattr(self.actor, method).remote(*arguments)
            await answered(call, what, TELL_LIMIT_S if limit_s is None else limit_s)
        except (EngineLost, StallError) as error:
            self.suspect(incarnation, error, has_to_end=True)
        except (import_ray().exceptions.RayActorError, NotBuilt) as error:
            self.suspect(incarnation, error)

    def suspect(self, incarnation: int, error: Exception, *, has_to_end: bool = False) -> None:
        """That process did not answer, because of `error`: it is not up until it is known to be.

        One that lives all the same `has_to_end` where it would not answer the next call either.
        """
        if incarnation == self.incarnation and self.is_up:
            self.is_up, self._has_to_end = False, has_to_end
            self._suspected_because = why(error)
            self._suspicion.set()

    async def _run(self) -> None:
        cause, num_failed = "it is new", 0
        while True:
            # Before it is set up, for the first time or again, there is no process whose end could come.
            if self.pid and not num_failed:
                cause = await self._end_of_process()
                self.is_up = False
                self.on_end(self.name)
                logger.warning("%s ended (%s); it is started again", self.name, cause)
            try:
                pid = await answered(self._revive(), f"{self.name} was started", START_LIMIT_S)
                before, self.pid, self.is_up = self.pid, pid, True
                self.incarnation += 1
                if pid == before:
                    logger.warning("%s could not be reached for a while; its process is the same", self.name)
                elif before:
                    self._on_restart(self.name, cause)
                num_failed = 0
            # Any error: a part that is not set up must be tried again, or its callers wait for ever.
            except Exception as error:
                self.is_up = False
                what = "%s is lost (%s) and did not come back: %s; another takes its place"
                logger.error(what, self.name, cause, why(error))
                self.in_place()
                # At once the first time; a fault that stays is tried ever more rarely.
                await asyncio.sleep(BEAT_EVERY_S * num_failed)
                num_failed += 1
            self._suspicion.clear()
            self.changes.note()

    async def _end_of_process(self) -> str:
        """Return why, once it has ended, or is suspected to have."""
        living = asyncio.ensure_future(self._until_it_ends())
        waiting = [living, asyncio.ensure_future(self._suspicion.wait())]
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

    async def _until_it_ends(self) -> str:
        stream = self.actor.live.options(num_returns="streaming").remote()
        what = f"{self.name} was to give a sign of life"
        try:
            while True:
                try:
                    self.hear(await (await answered(anext(stream), what, SILENCE_LIMIT_S)))
                except StallError as error:
                    # It is ended, and the stream with it.
                    self.suspect(self.incarnation, error, has_to_end=True)
        except import_ray().exceptions.RayError as error:
            return why(error)
        finally:
            # A process that lives would go on with it.
            import_ray().cancel(stream)

    async def _revive(self) -> int:
        # Asked until Ray has made the process anew; it raises if Ray does so no more, as where the actor's
        # constructor did.
        await self.actor.__ray_ready__.options(max_task_retries=-1).remote()
        return await self._set_up()

    async def _set_up(self) -> int:
        told = None
        while told != (wanted := self._wanted()):
            told = wanted
            pid: int = await self.actor.start.remote(self.spec)
            # Before the weights, with which an engine serves: in a pause it must not.
            await self._follow_pause()
            await self._bring_up_to_date()
        return pid


class Restarts:
    """The restarts of a cluster.

    Invariants: each is counted once, and told once if there ever is a listener; in order. An error of a
    listener is logged: books that cannot be written are no reason to give up a part that is back.

    >>> restarts = Restarts()
    >>> restarts.note("engine 0", "its process has ended")
    >>> restarts.listen(print)
    engine 0 its process has ended
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counts by kind: "engine" for "engine 0"."""
        self._listener: Listener | None = None
        self._untold: list[tuple[str, str]] = []

    def listen(self, listener: Listener | None) -> None:
        """Send restarts to `listener`, pending ones first; None queues them."""
        self._listener = listener
        self._tell()

    def note(self, part: str, reason: str) -> None:
        """`part` is there again, after it was lost because of `reason`."""
        self.counts[part.split()[0]] += 1
        self._untold.append((part, reason))
        self._tell()

    def _tell(self) -> None:
        while self._listener is not None and self._untold:
            part, reason = self._untold.pop(0)
            try:
                self._listener(part, reason)
            # Whatever it is: see the class.
            except Exception:
                logger.exception("the restart of %s (%s) could not be noted", part, reason)


def all_started(starting: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of every part once it is built, by name; `starting` has Ray's references.

    Raises:
        ConfigError: one of them cannot be built, at once; or some take too long.
    """
    names = {ref: name for name, ref in starting.items()}
    waiting, facts = list(names), {}
    deadline_s = time.monotonic() + START_LIMIT_S
    while waiting:
        ready, waiting = import_ray().wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = ", ".join(names[ref] for ref in waiting)
            raise ConfigError(f"cluster: {late} not there after {START_LIMIT_S:g} s")
        for ref in ready:
            facts[names[ref]] = _said(names[ref], ref)
    return facts


def _said(name: str, ref: Any) -> Any:
    try:
        return import_ray().get(ref)
    except import_ray().exceptions.RayError as error:
        if isinstance(cause := cause_of(error), ConfigError):
            raise cause from None
        how = "ended as it was started" if cause is error else "cannot be built"
        raise ConfigError(f"cluster: {name} {how}: {why(error)}") from error
