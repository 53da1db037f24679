"""Calls to actors: one that ends with its actor, and one that may take however long while its actor lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from forebay.cluster.library import import_ray, why
from forebay.watching.stalls import answered

ResultT = TypeVar("ResultT")


class ActorLost(RuntimeError):
    """The actor's process has ended, or cannot be reached."""


class NotBuilt(RuntimeError):
    """The process is a new one, in which nothing has been built yet."""


class CallFailed(RuntimeError):
    """The error of a call, in words: its class may not be known to the caller, or not travel."""


async def asked(call: Awaitable[ResultT]) -> ResultT:
    """The result of a call of an actor. A cancelled caller has to tell the actor itself.

    Raises:
        ActorLost: the actor ended first, or is a new one, in which nothing is built yet.
        CallFailed: the call raised an error.
    """
    exceptions = import_ray().exceptions
    try:
        return await call
    except (exceptions.RayActorError, exceptions.ObjectLostError, NotBuilt) as lost:
        raise ActorLost(why(lost)) from lost
    except exceptions.RayTaskError as error:
        raise CallFailed(why(error)) from error


async def result_of(ref: Any, alive: Any, what: str, *, every_s: float, limit_s: float) -> Any:
    """The result of a call that may take however long, as long as its actor gives signs of life.

    Ray notices a process that ended, not one that is stopped or hangs. So `alive`, a method of the actor that
    is answered beside the call, is called every `every_s` seconds.

    Raises:
        StallError: there was no sign within `limit_s`; the message begins with `what`.
        Exception: as the call.
    """
    answer = asyncio.ensure_future(ref)
    try:
        while not (await asyncio.wait([answer], timeout=every_s))[0]:
            # An actor that has ended, or is being made anew: the call itself tells of it.
            with contextlib.suppress(import_ray().exceptions.RayError):
                await answered(alive.remote(), what, limit_s)
        return answer.result()
    finally:
        answer.cancel()


def blocking_actor(kind: type[Any]) -> Any:
    """Ray's class for actors of `kind`, whose calls block: beside one, they still give signs of life."""
    return import_ray().remote(concurrency_groups={_SIGNS: 1, _BESIDE: 1})(kind)


_SIGNS = "signs of life"
"""The calls that a thread of their own answers."""
_BESIDE = "beside"
"""The same for calls that wait for threads of the actor, and hold up no other."""


def signs_of_life(actor: Any) -> Any:
    """The method that such an actor answers beside a call, for `result_of`."""
    return actor.__ray_ready__.options(concurrency_group=_SIGNS)


def beside(method: Any) -> Any:
    """`method` of such an actor, called beside its other calls."""
    return method.options(concurrency_group=_BESIDE)
