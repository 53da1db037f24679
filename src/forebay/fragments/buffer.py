"""The replay buffer of fragments: waiting, time and disk around `ReplayState`.

::

    worker --add_fragment(id, metadata)--> [rate limit: waits in line] --> ReplayState --> rows committed
                                                                               |               |
    trainer --fetch_fragments(n)--> [waits in line for n] --> batch + lease <--'        free payloads deleted
            --release(batch.lease)--> payloads let go                                   (`collector`)
            --update_model_version--> stale and foreign chunks dropped

One plain class for a program that uses it embedded and for an actor in a process of its own
(`forebay.cluster`). All methods run on one event loop at a time and take time from its clock; nothing here
starts a thread but deleting and copying. The next buffer on the folder of a killed one knows all that it knew;
every lease gets its whole term again, as on the next event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.aio.changed import BufferClosed
from forebay.aio.gate import Gate
from forebay.aio.tasks import finish
from forebay.aio.time_limits import timeout
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.rules import Rules
from forebay.fragments.state import ReplayState
from forebay.fragments.store.collector import Collector
from forebay.fragments.store.journal import Journal
from forebay.fragments.store.payloads import FragmentStore
from forebay.io.safe_files import sync, unfinished

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


def _log_report(metrics: Metrics) -> None:
    logger.info("%s", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


class ReplayBufferActor:
    """Chunks of fragments between workers that act and a trainer.

    Invariants: nothing older than `max_staleness` versions by its oldest fragment, or of another session, is
    ever served; no chunk is served more than `max_reuse` times, and at most once in a batch; the payloads of
    a batch stay until its lease is released or its term is over; a fetch that is cancelled has taken nothing;
    every fragment that leaves unused is counted by reason.

    >>> import tempfile
    >>> async def example():
    ...     buffer = ReplayBufferActor(
    ...         max_chunks=100, max_staleness=2, max_reuse=1, fragments_per_chunk=1,
    ...         database_config={"path": tempfile.mkdtemp()})
    ...     await buffer.add_fragment("id", FragmentMetadata("worker-0", 0, model_version=-1, session_id=""))
    ...     batch = await buffer.fetch_fragments(1)
    ...     print(batch, batch.staleness, await buffer.release(batch.lease))
    >>> asyncio.run(example())
    [(FragmentIndex(worker_uuid='worker-0', fid_in_worker=0), 'id')] [0] True
    """

    def __init__(
        self,
        max_chunks: int,
        max_staleness: int,
        max_reuse: int,
        database_config: Mapping[str, Any],
        fragments_per_chunk: int,
        fragments_per_report: int | None = None,
        *,
        orphan_grace_s: float = 600.0,
        report: Callable[[Metrics], None] = _log_report,
        **rules: Any,
    ) -> None:
        """Open the buffer in the folder of `database_config` (`FragmentStore`), and go on with what is there.

        `rules` are the further fields of `Rules`: its seed, times and rate limit. A partial chunk waits
        `worker_timeout_s` for the next fragment of its worker, and a payload `orphan_grace_s` for its
        `add_fragment`. Every `fragments_per_report` fragments `report` gets `metrics`.

        Raises:
            ValueError: a value is not possible, or the folder holds chunks of another length.
        """
        self._rules = Rules(max_chunks, max_staleness, max_reuse, fragments_per_chunk, **rules)
        if fragments_per_report is not None and fragments_per_report < 1:
            raise ValueError(f"fragments_per_report must be at least 1 or None, got {fragments_per_report}")
        self._fragments_per_report, self._report = fragments_per_report, report
        self._database_config = dict(database_config)
        self._store = FragmentStore(**self._database_config)
        self._journal = Journal(self._store.path / "index")
        self._state = ReplayState(self._rules)
        self._state.restore(self._journal.load(), self._store.__contains__)
        # In line at the rate limit: no chunk names them yet, and they are no orphans all the same.
        self._arriving: set[str] = set()
        self._collector = Collector(
            self._store,
            lambda fragment_id: fragment_id in self._state.references or fragment_id in self._arriving,
            orphan_grace_s,
        )
        self._readers = Gate(on_wait=self._wake)
        self._writers = Gate()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None
        self._reported_at = self._state.meta.tallies.added
        self._reported_s = 0.0

    # For workers.

    async def add_fragment(self, fragment_id: str, metadata: FragmentMetadata) -> None:
        """Announce a fragment whose payload is in the store; see `add_fragments`."""
        await self.add_fragments([(fragment_id, metadata)])

    async def add_fragments(self, fragments: Sequence[tuple[str, FragmentMetadata]]) -> None:
        """Announce fragments, those of a worker in order; with a rate limit, wait while readers lag behind.

        Adding one again changes nothing while the buffer or a lease holds it, and for long after, so a caller
        that does not know whether an addition got through may repeat it. A cancelled call has added a part
        from the front.

        Raises:
            BufferClosed: the buffer was closed.
        """
        ids = [fragment_id for fragment_id, _ in fragments]
        self._arriving.update(ids)
        try:
            # With a rate limit each may be the one after which readers come first.
            for some in [fragments] if self._rules.rate_limit is None else [[each] for each in fragments]:
                await self._writers.wait(self._may_insert)
                with self._change():
                    self._state.add(some, self._now_s())
        finally:
            self._arriving.difference_update(ids)
        every, added = self._fragments_per_report, self._state.meta.tallies.added
        if every is not None and added - self._reported_at >= every:
            self._report(await self.metrics())
            self._reported_at, self._reported_s = added, self._now_s()
        await self._collector.drained()

    async def wait_for_room(self) -> None:
        """Return when the rate limit would let a writer in.

        A worker that asks before it acts, and not only when it writes, acts with newer weights.

        Nothing is reserved: of several that were let in, some may have to wait when they write.

        Raises:
            BufferClosed: the buffer was closed.
        """
        await self._writers.wait(self._may_insert)
        # Nothing has changed, but the next in line is the first now.
        self._writers.wake()

    async def remove_worker(self, worker_uuid: str) -> None:
        """A worker has ended: let its partial chunk go now, not when it has been silent for long."""
        with self._change():
            self._state.drop_worker(worker_uuid)
        await self._collector.drained()

    # For the trainer.

    async def fetch_fragments(self, num_fragments: int, *, timeout_s: float | None = None) -> FragmentBatch:
        """A batch of `num_fragments` in distinct chunks, under a lease; waits in line until there are enough.

        Release the lease when the payloads are read.

        Raises:
            ValueError: there can be no such batch.
            TimeoutError: there was none within `timeout_s`; nothing was taken.
            BufferClosed: the buffer was closed.
        """
        num_chunks = self._rules.num_chunks(num_fragments)
        self._refresh()
        async with timeout(timeout_s):
            await self._readers.wait(lambda: self._state.can_serve(num_chunks))
        # Nothing is awaited from here on: a cancelled fetch has taken nothing.
        with self._change():
            return self._state.serve(num_chunks, self._now_s())

    async def prepared_fragments(self) -> FragmentBatch:
        """The batch of the last fetch, whether its lease is in force or not; empty before the first."""
        return self._state.prepared

    async def release(self, lease: Lease | str) -> bool:
        """End a lease, given as such or by its id; False: it had ended already."""
        with self._change():
            released = self._state.release(lease)
        await self._collector.drained()
        return released

    async def renew(self, lease: Lease | str) -> bool:
        """Begin a lease's term anew; False: it had ended, and its payloads may be gone."""
        with self._change():
            return self._state.renew(lease, self._now_s())

    async def update_model_version(self, session_id: str, model_version: int) -> None:
        """The trainer's session and weights are these now; drop what does not fit them.

        Fragments of another session are dropped on arrival, so this comes before the first of a new session.
        """
        with self._change():
            self._state.set_version(session_id, model_version)
        await self._collector.drained()

    # For every caller.

    async def get_database_config(self) -> dict[str, Any]:
        """The arguments that open the store: ``FragmentStore(**config)``."""
        return dict(self._database_config)

    async def metrics(self) -> Metrics:
        """Counts since the store was made, what is held now, and the speed since the last report."""
        state, tallies = self._state, self._state.meta.tallies
        elapsed_s = asyncio.get_running_loop().time() - self._reported_s
        added = tallies.added - self._reported_at
        return tallies.as_metrics() | {
            "fragments_per_s": added / elapsed_s if elapsed_s > 0 else 0.0,
            "chunks": len(state.chunks),
            "partial_fragments": len(state.sequences),
            "held_fragments": len(state.references),
            "leases": len(state.leases),
            "waiting_fetches": len(self._readers),
            "waiting_additions": len(self._writers),
            "orphans_deleted": self._collector.num_orphans,
            "model_version": state.meta.model_version,
        }

    async def save(self, path: str) -> None:
        """Copy the whole buffer to the new folder `path`: a buffer opened there goes on from now.

        Writers and readers go on meanwhile; nothing is deleted. The copy is on the disk when this returns,
        and a crash on the way leaves no folder of that name.

        Raises:
            FileExistsError: there is something at `path`.
        """
        target = Path(path)
        if await asyncio.to_thread(target.exists):
            raise FileExistsError(f"{str(path)!r} exists; save to a new folder")
        self._refresh()
        async with self._collector.paused():
            # A thread cannot be stopped: a cancelled call lets go of the pause only when it is done.
            await finish(asyncio.to_thread(self._copy, target))

    def _copy(self, target: Path) -> None:
        with unfinished(target) as temporary:
            # The journal first: payloads that come after it are unnamed in the copy, but none that it names
            # is missing.
            self._journal.copy(temporary / "index")
            self._store.copy(temporary)
            sync(temporary)
            temporary.rename(target)
        sync(target.parent)

    async def close(self) -> None:
        """End all waits with `BufferClosed` and finish deleting; what is held stays in the folder."""
        self._end("the buffer was closed")
        await self._collector.drained()

    # Around every change.

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the state inside; then the change is on disk, and calls that can go on are woken."""
        self._refresh()
        yield
        self._commit()

    def _refresh(self) -> None:
        """Do what time has brought; called by the timer, and before every change."""
        if self._closed is not None:
            raise BufferClosed(self._closed)
        if self._loop is not (loop := asyncio.get_running_loop()):
            # The terms of what an earlier buffer or loop left were counted by its clock, and begin anew.
            self._loop, self._timer = loop, None
            self._reported_s = self._now_s()
            self._state.restart_clock(self._now_s())
        self._state.advance(self._now_s())
        # Before payloads are deleted, too: another buffer may have opened the folder and name them.
        if self._state.changes or self._collector.is_due(self._now_s()):
            self._commit()
        self._collector.advance(self._now_s())
        self._set_timer()

    def _commit(self) -> None:
        try:
            self._journal.commit(self._state.changes, self._state.snapshot)
        except BufferClosed as reason:
            self._end(str(reason))
            raise
        free, self._state.free = self._state.free, []
        self._state.changes.clear()
        self._collector.discard(free)
        self._wake()
        self._set_timer()

    def _wake(self) -> None:
        self._readers.wake()
        self._writers.wake()

    def _may_insert(self) -> bool:
        # A reader that waits for more chunks can only be helped by writers.
        return self._state.may_insert() or self._readers.blocked

    def _end(self, reason: str) -> None:
        self._closed = self._closed or reason
        if self._timer is not None:
            self._timer.cancel()
        self._readers.close(reason)
        self._writers.close(reason)

    # The clock.

    def _now_s(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _set_timer(self) -> None:
        """Come back when the next term ends; at most one timer runs, and none without a term.

        consumes: the terms of leases, silent workers and suspects / waits for: the next end / woken by: the
        event loop's clock / produces: `_refresh`
        """
        assert self._loop is not None
        dues_s = (self._state.next_deadline_s(), self._collector.due_s)
        due_s = min((due_s for due_s in dues_s if due_s is not None), default=None)
        if self._timer is not None and (due_s is None or due_s < self._timer.when() or self._timer.cancelled()):
            self._timer.cancel()
            self._timer = None
        # One that is too early is left alone: it sets the next when it fires.
        if self._timer is None and due_s is not None:
            self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self._refresh()
        except BufferClosed as reason:
            logger.warning("fragment buffer: %s", str(reason))
