"""Where all workers report to, on the trainer's event loop: the only one who talks to the buffer for them.

::

    thread   --answer---------------------------------+
    process  --socket--> one task a connection --answer+--> buffer.add_fragment --> newest weights
    Ray actor -socket-'                                        (waits its turn)

It also knows what workers saw: episodes that ended, steps taken, who is alive. A worker at the socket that
connects too late, or then gives no sign of life, is reported to whoever runs it (`while_heard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from forebay.environments.workers.messages import Orders, Report, WorkerDied
from forebay.fragments import BufferClosed, FragmentMetadata, ReplayBufferActor
from forebay.io.address import Address, listen
from forebay.io.channel import Channel
from forebay.io.heartbeat import SILENCE_LIMIT_S
from forebay.io.messages import Call, Message, Note
from forebay.io.session import Acceptor, Result, Session

MAX_FOLDER_BYTES = 80
"""Of the path of the folder for temporary files: what is left of 107 bytes is for the socket's own name."""
START_LIMIT_S = 300.0
"""For a worker to connect: many that start together on a few cores load their libraries for minutes."""
NUM_RECENT = 100
"""Episodes behind the mean return of a step: what CartPole is judged by."""


class Hub:
    """Answers workers and keeps their account.

    Invariants: a fragment is announced before its worker is told to go on; weights are handed out before the
    buffer hears of their version; after `forget` nothing of that worker reaches the buffer any more.

    >>> hub = Hub(buffer, session_id="run")
    >>> await hub.publish(0, policy.weights())
    >>> (await hub.answer(Report("worker-0", version=-1))).version
    0
    """

    def __init__(
        self,
        buffer: ReplayBufferActor,
        session_id: str,
        *,
        limit_s: float = SILENCE_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        """A worker has `start_limit_s` to connect; later, one that is silent for `limit_s` is given up."""
        self.num_steps = 0
        """Environment steps so far."""
        self.num_episodes = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=NUM_RECENT)
        """Sum of rewards and number of steps of the episodes that ended last."""
        self.stopping = False
        self.address = ""
        self._buffer, self._session_id = buffer, session_id
        self._version, self._weights = -1, b""
        self._ready = asyncio.Event()
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._forgotten: set[str] = set()
        self._known: dict[str, int] = {}
        self._limit_s, self._start_limit_s = limit_s, start_limit_s
        self._lost: dict[str, asyncio.Future[str]] = {}
        self._due: dict[str, asyncio.TimerHandle] = {}

    async def publish(self, version: int, weights: bytes) -> None:
        """These are the newest weights: every worker gets them with its next answer."""
        self._version, self._weights = version, weights
        self._ready.set()
        await self._buffer.update_model_version(self._session_id, version)

    def stop(self) -> None:
        """From now on workers are told to stop."""
        self.stopping = True
        self._ready.set()

    def num_fragments(self, worker_uuid: str) -> int:
        """How many of this worker the buffer has taken."""
        return self._known.get(worker_uuid, 0)

    def counts(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "num_steps": self.num_steps,
            "num_episodes": self.num_episodes,
            "recent": list(self.recent),
        }

    def load(self, counts: Mapping[str, Any]) -> None:
        """Go on counting from what `counts` gave."""
        self.num_steps, self.num_episodes = counts["num_steps"], counts["num_episodes"]
        self.recent.extend((reward, steps) for reward, steps in counts["recent"])

    async def forget(self, worker_uuid: str) -> None:
        """The worker is dead: take back what waits in line for it, and let its partial chunk go."""
        # A report of it may still lie in its socket.
        self._forgotten.add(worker_uuid)
        taking = self._taking.pop(worker_uuid, None)
        if taking is not None:
            taking.cancel()
            await asyncio.wait([taking])
        self._known.pop(worker_uuid, None)
        with contextlib.suppress(BufferClosed):
            await self._buffer.remove_worker(worker_uuid)

    async def answer(self, report: Report) -> Orders:
        """Take the report; returns when the worker may go on.

        consumes: one report / waits for: its turn at the buffer, and the first weights / woken by: the
        buffer, `publish`, `stop` / produces: orders
        """
        if report.worker_uuid in self._forgotten:
            return Orders(True, self._version, b"")
        if not self.stopping:
            task = asyncio.ensure_future(self._take(report))
            self._taking[report.worker_uuid] = task
            # Waited for as a task of its own: `forget` may cancel it, which is no reason to fail here.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        await self._ready.wait()
        newer = b"" if report.version == self._version else self._weights
        return Orders(self.stopping, self._version, newer)

    async def _take(self, report: Report) -> None:
        try:
            if report.fragment_id is not None:
                await self._announce(report, report.fragment_id)
            await self._buffer.wait_for_room()
        except BufferClosed:
            self.stop()
        finally:
            self._taking.pop(report.worker_uuid, None)

    async def _announce(self, report: Report, fragment_id: str) -> None:
        metadata = FragmentMetadata(
            report.worker_uuid, report.fid_in_worker, report.oldest_version, self._session_id
        )
        await self._buffer.add_fragment(fragment_id, metadata)
        self._known[report.worker_uuid] = self.num_fragments(report.worker_uuid) + 1
        self.num_steps += report.num_steps
        self.num_episodes += len(report.episodes)
        self.recent.extend(report.episodes)

    async def while_heard(self, worker_uuid: str, life: Coroutine[Any, Any, None]) -> None:
        """See `Answering`.

        consumes: nothing / waits for: the end of `life`, or that the worker is lost / woken by: it, `_serve`,
        the clock / produces: nothing
        """
        lost = self._lost[worker_uuid] = asyncio.get_running_loop().create_future()
        self._expect(worker_uuid, self._start_limit_s, "did not connect to its trainer")
        living = asyncio.ensure_future(life)
        try:
            await asyncio.wait([living, lost], return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                raise WorkerDied(lost.result())
        finally:
            self._due.pop(worker_uuid).cancel()
            del self._lost[worker_uuid]
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
        living.result()

    def _expect(self, worker_uuid: str, limit_s: float, otherwise: str) -> None:
        """Let the worker be lost unless it comes to something else within `limit_s`."""
        if worker_uuid in self._lost:
            if worker_uuid in self._due:
                self._due[worker_uuid].cancel()
            reason = f"it {otherwise} within {limit_s:g} s: it hangs or was stopped"
            self._due[worker_uuid] = asyncio.get_running_loop().call_later(
                limit_s, self._lose, worker_uuid, reason
            )

    def _lose(self, worker_uuid: str, reason: str) -> None:
        lost = self._lost.get(worker_uuid)
        if lost is not None and not lost.done():
            lost.set_result(reason)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Be reachable at `address` for workers in other processes of this machine."""
        # Not under the run's folder: the path of a Unix socket is at most 107 bytes long.
        is_short = len(os.fsencode(tempfile.gettempdir())) < MAX_FOLDER_BYTES
        folder = Path(tempfile.mkdtemp(prefix="forebay-", dir=None if is_short else "/tmp"))
        path = folder / "hub"
        self.address = str(path)
        listener, _ = await listen(Address(path))
        acceptor = Acceptor(listener, self._serve, path)
        try:
            yield
        finally:
            await acceptor.close()
            shutil.rmtree(folder)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection.

        consumes: reports / waits for: the next one / woken by: the socket / produces: tasks that answer;
        ends with the connection
        """
        session = _WorkerSession(Channel(sock), self)
        try:
            await session.run()
        except TimeoutError as silence:
            self._lose(session.worker_uuid, f"{silence}: it hangs or was stopped")
        finally:
            # The worker is gone: whoever started it sees it end, with its last words.
            self._expect(session.worker_uuid, self._limit_s, "closed its connection and did not end")


class _WorkerSession(Session):
    """A worker process at the socket: it says its uuid, then reports."""

    def __init__(self, channel: Channel, hub: Hub) -> None:
        super().__init__(channel, limit_s=hub._limit_s)
        self.worker_uuid = ""
        self._hub = hub

    def dispatch(self, message: Message, buffers: list[Any] | None) -> None:
        if isinstance(message, Note):
            self.worker_uuid = msgspec.msgpack.decode(message.value, type=str)
            if self.worker_uuid in self._hub._due:
                self._hub._due[self.worker_uuid].cancel()
        else:
            super().dispatch(message, buffers)

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        orders = await self._hub.answer(msgspec.msgpack.decode(call.arguments, type=Report))
        # The weights go beside the answer, so they are not copied and may be of any size.
        return Orders(orders.stop, orders.version, b""), [orders.weights] if orders.weights else ()
