"""The fragment buffer as a named Ray actor, which comes back by itself when its process dies.

::

    start_replay_buffer(**settings) --> actor: a `ReplayBufferActor` in a process of its own
                                          ^        | killed: Ray makes it anew, it goes on from its folder
    connect_replay_buffer() --> client ---'

The store is files of one machine: workers and trainers on that machine read and write the payloads
themselves, and only ids and metadata pass through the actor.
"""

import asyncio
from typing import Any

from forebay.cluster.calls import result_of
from forebay.cluster.library import MAX_CALLS, NAMESPACE, import_ray, on_node
from forebay.fragments import BufferClosed, ReplayBufferActor
from forebay.fragments.remote import FragmentCalls
from forebay.io.messages import SILENCE_LIMIT_S, check_limit
from forebay.watching.stalls import StallError

DEFAULT_NAME = "replay_buffer"


def start_replay_buffer(*, name: str = DEFAULT_NAME, **settings: Any) -> "ReplayBufferClient":
    """Start a `ReplayBufferActor` with these settings as the actor `name`; ``ray.init`` was called before.

    Raises:
        ValueError: there is an actor of that name.
    """
    ray = import_ray()
    actor = ray.remote(ReplayBufferActor).options(
        name=name,
        namespace=NAMESPACE,
        max_restarts=-1,
        max_concurrency=MAX_CALLS,
        num_cpus=0,
        # Where its folder is: made anew on another node it would find nothing.
        scheduling_strategy=on_node(ray.get_runtime_context().get_node_id()),
    )
    return ReplayBufferClient(actor.remote(**settings))


def connect_replay_buffer(name: str = DEFAULT_NAME) -> "ReplayBufferClient":
    """A client of the running actor `name`.

    Raises:
        ValueError: there is none.
    """
    return ReplayBufferClient(import_ray().get_actor(name, NAMESPACE))


class ReplayBufferClient(FragmentCalls):
    """The methods of `ReplayBufferActor`, called in its actor.

    Invariants: equal calls have equal results and errors; a cancelled call is cancelled in the actor too.
    While the actor is being made anew, calls raise Ray's ``ActorUnavailableError``: every method may be
    called again, and a batch that such a fetch took comes free when its lease is over.

    ::

        buffer = connect_replay_buffer()
        batch = await buffer.fetch_fragments(64)
    """

    def __init__(self, actor: Any, *, limit_s: float = SILENCE_LIMIT_S) -> None:
        """Calls end with `BufferClosed` once the actor has given no sign of life for `limit_s`."""
        check_limit("limit_s", limit_s)
        self.actor = actor
        """Ray's handle."""
        self._limit_s = limit_s

    async def _call(self, method: str, **arguments: Any) -> Any:
        ref = getattr(self.actor, method).remote(**arguments)
        what = f"the fragment buffer's actor, called to {method}, was asked for a sign of life"
        try:
            # Some calls wait for other callers, however long: whether the actor lives is asked beside them.
            return await result_of(ref, self.actor.__ray_ready__, what, every_s=self._limit_s, limit_s=self._limit_s)
        except (asyncio.CancelledError, StallError) as error:
            import_ray().cancel(ref)
            if isinstance(error, StallError):
                raise BufferClosed(str(error)) from None
            raise

    async def close(self) -> None:
        """As `ReplayBufferActor.close`; the actor's process ends too."""
        await self._call("close")
        import_ray().kill(self.actor)
