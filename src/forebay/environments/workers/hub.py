"""The place where all workers report, on the trainer's event loop; it alone talks to the buffer for them.

::

    worker --Unix socket--> one session a worker --answer--> buffer.add_fragment --> newest weights
                                                             (waits its turn)

It also counts what workers saw: episodes that ended, steps taken. A worker that connects too late, or gives
no sign of life, or closes its connection without ending, is reported to the caller of `while_heard`.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forebay.aio.time_limits import timeout
from forebay.environments.workers.messages import Episode, Orders, Report, WorkerDied
from forebay.fragments import BufferClosed, FragmentMetadata, ReplayBufferActor
from forebay.io.address import Address, listen
from forebay.io.channel import Channel
from forebay.io.link import Acceptor, Result, Session
from forebay.io.messages import SILENCE_LIMIT_S, Call, FrameError, Message, Note

MAX_FOLDER_BYTES = 80
"""Of the path of the folder for temporary files: what is left of 107 bytes is for the socket's own name."""
START_LIMIT_S = 300.0
"""For a worker to connect: many that start together on a few cores load their libraries for minutes."""
WORK_LIMIT_S = 900.0
"""Without a report for so long an environment hangs: none takes a quarter of an hour for a few steps."""
NUM_RECENT = 100
"""Episodes behind the mean return of a step: what CartPole is judged by."""


@dataclass
class _Watch:
    limit: asyncio.Timeout
    reason: str
    """Why the worker is given up when the limit is over."""


class Hub:
    """Answers workers and keeps their account.

    Invariants: a fragment is announced before its worker is told to go on; weights are handed out before the
    buffer hears of their version; after `forget` nothing of that worker reaches the buffer any more.
    """

    def __init__(self, buffer: ReplayBufferActor, session_id: str, *, limit_s: float = SILENCE_LIMIT_S) -> None:
        """A worker that is silent for `limit_s` after it connected is given up."""
        self.num_steps = 0
        """Environment steps so far."""
        self.num_episodes = 0
        self.recent: deque[Episode] = deque(maxlen=NUM_RECENT)
        """The episodes that ended last."""
        self.stopping = False
        self.address = ""
        """Path of the Unix socket, while `listening`."""
        self.limit_s = limit_s
        self._buffer, self._session_id = buffer, session_id
        self._version, self._weights = -1, b""
        self._ready = asyncio.Event()
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._forgotten: set[str] = set()
        self._num_fragments: dict[str, int] = {}
        self._watched: dict[str, _Watch] = {}

    async def publish(self, version: int, weights: bytes) -> None:
        """Make these the newest weights: every worker gets them with its next answer."""
        self._version, self._weights = version, weights
        self._ready.set()
        await self._buffer.update_model_version(self._session_id, version)

    def stop(self) -> None:
        """Tell workers to stop from now on."""
        self.stopping = True
        self._ready.set()

    def num_fragments(self, worker_uuid: str) -> int:
        """How many of this worker the buffer has taken."""
        return self._num_fragments.get(worker_uuid, 0)

    def counts(self) -> dict[str, Any]:
        """Steps and episodes so far, as plain values for `load`."""
        return {"num_steps": self.num_steps, "num_episodes": self.num_episodes, "recent": list(self.recent)}

    def load(self, counts: Mapping[str, Any]) -> None:
        """Go on counting from what `counts` gave."""
        self.num_steps, self.num_episodes = counts["num_steps"], counts["num_episodes"]
        self.recent.extend(Episode(*each) for each in counts["recent"])

    async def forget(self, worker_uuid: str) -> None:
        """The worker is dead: take back what waits in line for it, and let its partial chunk go."""
        # A report of it may still lie in its socket.
        self._forgotten.add(worker_uuid)
        taking = self._taking.pop(worker_uuid, None)
        if taking is not None:
            taking.cancel()
            await asyncio.wait([taking])
        self._num_fragments.pop(worker_uuid, None)
        with contextlib.suppress(BufferClosed):
            await self._buffer.remove_worker(worker_uuid)

    async def answer(self, report: Report) -> Orders:
        """Take the report; returns when the worker may go on.

        consumes: one report / waits for: its turn at the buffer, and the first weights / woken by: the
        buffer, `publish`, `stop` / produces: orders
        """
        if report.worker_uuid in self._forgotten:
            return Orders(True, self._version, b"")
        self.expect(report.worker_uuid, None)
        if not self.stopping:
            task = asyncio.ensure_future(self._take(report))
            self._taking[report.worker_uuid] = task
            # Waited for as a task of its own: `forget` may cancel it, which is no reason to fail here.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        await self._ready.wait()
        self.expect_report(report.worker_uuid)
        newer = b"" if report.version == self._version else self._weights
        return Orders(self.stopping, self._version, newer)

    async def _take(self, report: Report) -> None:
        worker_uuid = report.worker_uuid
        try:
            if report.fragment_id is not None:
                metadata = FragmentMetadata(worker_uuid, report.fid_in_worker, report.oldest_version, self._session_id)
                await self._buffer.add_fragment(report.fragment_id, metadata)
                self._num_fragments[worker_uuid] = self.num_fragments(worker_uuid) + 1
                self.num_steps += report.num_steps
                self.num_episodes += len(report.episodes)
                self.recent.extend(report.episodes)
            # Before the worker acts, not after: one that had to wait acts with the newest weights.
            await self._buffer.wait_for_room()
        # The run ends, or another buffer has taken the folder over: no fragment is of use any more.
        except BufferClosed:
            self.stop()
        finally:
            self._taking.pop(worker_uuid, None)

    async def while_heard(self, worker_uuid: str, life: Awaitable[None]) -> None:
        """Run `life`, of a worker that connects here; cancel it once the worker gives no sign of life.

        Raises:
            WorkerDied: the worker is frozen, or hangs before its connection or after it.
        """
        limit_s = START_LIMIT_S
        try:
            async with timeout(limit_s, lambda: WorkerDied(f"it {watch.reason}: it hangs or was stopped")) as limit:
                watch = _Watch(limit, f"did not connect to its trainer within {limit_s:g} s")
                self._watched[worker_uuid] = watch
                await life
        finally:
            self._watched.pop(worker_uuid, None)

    def expect(self, worker_uuid: str, within_s: float | None, otherwise: str = "") -> None:
        """Give the worker up unless it comes to something else within `within_s`; None: as it likes."""
        watch = self._watched.get(worker_uuid)
        if watch is not None and not watch.limit.expired():
            watch.reason = otherwise
            watch.limit.reschedule(None if within_s is None else asyncio.get_running_loop().time() + within_s)

    def expect_report(self, worker_uuid: str) -> None:
        """Give the worker up if it works for `WORK_LIMIT_S` without a report."""
        self.expect(worker_uuid, WORK_LIMIT_S, f"has worked for {WORK_LIMIT_S:g} s without a report")

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Be reachable at `address` for workers of this machine."""
        # Not under the run's folder: the path of a Unix socket is at most 107 bytes long.
        is_short = len(os.fsencode(tempfile.gettempdir())) < MAX_FOLDER_BYTES
        path = Path(tempfile.mkdtemp(prefix="forebay-", dir=None if is_short else "/tmp")) / "hub"
        listener, _ = await listen(Address(path))
        acceptor = Acceptor(listener, self._serve, path)
        self.address = str(path)
        try:
            yield
        finally:
            await acceptor.close()
            shutil.rmtree(path.parent)

    async def _serve(self, sock: socket.socket) -> None:
        session = _WorkerSession(Channel(sock), self)
        within_s, otherwise = self.limit_s, f"closed its connection and did not end within {self.limit_s:g} s"
        try:
            await session.run()
        except TimeoutError:
            within_s, otherwise = 0.0, f"gave no sign of life for {self.limit_s:g} s"
        except (OSError, FrameError):
            # The worker is gone: `while_heard` sees it end, with its last words.
            pass
        self.expect(session.worker_uuid, within_s, otherwise)


class _WorkerSession(Session):
    """The connection of one worker."""

    def __init__(self, channel: Channel, hub: Hub) -> None:
        super().__init__(channel, limit_s=hub.limit_s)
        self.worker_uuid = ""
        self._hub = hub

    def dispatch(self, message: Message, buffers: list[Any] | None) -> None:
        if isinstance(message, Note):
            self.worker_uuid = msgspec.msgpack.decode(message.value, type=str)
            self._hub.expect_report(self.worker_uuid)
        else:
            super().dispatch(message, buffers)

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        orders = await self._hub.answer(msgspec.msgpack.decode(call.arguments, type=Report))
        # The weights go beside the answer: they are not copied, and may be of any size.
        return (orders.stop, orders.version), (orders.weights,) if orders.weights else ()
