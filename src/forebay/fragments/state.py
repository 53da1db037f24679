"""What a fragment buffer decides, without waiting, disk or clock: every change is one call that cannot be
cut.

::

    add --stale, of another session------------------------> dropped
     '--> sequences --gap, silent worker, stale, session---> dropped
              '--complete--> chunks --full, stale, session-> dropped
                               |   '--max_reuse-th use-----> used up
                               '--serve--> lease --released, over
                                                        '--> payload free, if nothing else holds it

    rows: to be committed (`index`)            committed: ids of payloads to be deleted after that

Each fragment is in exactly one place, so at any moment
``added = in chunks + in sequences + used up + dropped (by reason)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.fragments.chunks import SAMPLING, Chunk, ChunkTable, Fragment
from forebay.fragments.leases import FragmentBatch, Lease, LeaseRow, LeaseTable
from forebay.fragments.rate_limit import RateLimit
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.sequences import Sequences
from forebay.fragments.store.index import Meta, Rows
from forebay.fragments.store.references import References
from forebay.fragments.store.segments import RowKey, Segments


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may be held and served, see `ReplayBufferActor`.

    Raises:
        ValueError: a value is not possible.
    """

    max_chunks: int
    max_staleness: int
    max_reuse: int
    fragments_per_chunk: int
    sampling: str = "uniform"
    seed: int = 0
    lease_s: float = 600.0
    worker_timeout_s: float = 600.0
    rate_limit: RateLimit | None = None

    def __post_init__(self) -> None:
        for name, least in [
            ("max_chunks", 1),
            ("max_staleness", 0),
            ("max_reuse", 1),
            ("fragments_per_chunk", 1),
        ]:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("lease_s", "worker_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.sampling not in SAMPLING:
            raise ValueError(f"sampling must be one of {SAMPLING}, got {self.sampling!r}")
        limit = self.rate_limit
        if limit and (limit.samples_per_insert > self.max_reuse or limit.min_chunks > self.max_chunks):
            raise ValueError(
                f"no buffer with max_reuse={self.max_reuse} and max_chunks={self.max_chunks} can keep {limit}"
            )

    def num_chunks(self, num_fragments: int) -> int:
        """The chunks of a batch.

        Raises:
            ValueError: no such batch can ever be served.
        """
        count, rest = divmod(num_fragments, self.fragments_per_chunk)
        if rest or not 0 < count <= self.max_chunks:
            raise ValueError(
                f"num_fragments must be a multiple of fragments_per_chunk={self.fragments_per_chunk}, from "
                f"{self.fragments_per_chunk} to {self.max_chunks * self.fragments_per_chunk} (max_chunks), "
                f"got {num_fragments}"
            )
        return count


class ReplayState:
    """The chunks, partial chunks and leases of one buffer.

    Invariants: no chunk here is older than `max_staleness` by its oldest fragment, of another session, or
    used `max_reuse` times; a payload is free exactly when no chunk, no partial chunk and no lease names it.

    >>> rules = Rules(max_chunks=8, max_staleness=1, max_reuse=1, fragments_per_chunk=1)
    >>> state = ReplayState(rules)
    >>> state.add([("id", FragmentMetadata("w", 0, model_version=-1, session_id=""))], now_s=0.0)
    >>> state.can_serve(1), state.serve(1, now_s=0.0).fragment_ids, state.can_serve(1)
    (True, ['id'], False)
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.meta = Meta(rules.fragments_per_chunk)
        self._changes: dict[RowKey, Any] = {}
        self._free: list[str] = []
        self.references = References()
        self.leases = LeaseTable()
        self.prepared = FragmentBatch()
        """The batch served last."""
        self._chunks = ChunkTable()
        self._segments = Segments()
        self._sequences = Sequences(rules.fragments_per_chunk)
        self._chunk_of: dict[str, Chunk] = {}

    @property
    def has_changed(self) -> bool:
        """Whether there is anything for `rows` or `committed`."""
        return bool(self._changes or self._free or self._segments.has_changed)

    def rows(self) -> dict[RowKey, Any]:
        """What is to be committed since the last `committed`; None: to be deleted."""
        self._changes |= self._segments.take_rows()
        return self._changes

    def committed(self) -> list[str]:
        """The rows are on disk; ids of payloads that are to be deleted after that, but once."""
        free, self._free = self._free, []
        self._changes.clear()
        return free

    @property
    def num_chunks(self) -> int:
        """That can be served."""
        return len(self._chunks)

    @property
    def num_partial(self) -> int:
        """Fragments that are part of no chunk yet."""
        return len(self._sequences)

    @property
    def _min_version(self) -> int:
        return self.meta.model_version - self.rules.max_staleness

    # What comes in.

    def add(self, fragments: Iterable[tuple[str, FragmentMetadata]], now_s: float) -> None:
        """Take the fragments in, or drop them; one that is here already changes nothing."""
        meta, take, is_chunk = self.meta, self.references.take, self.rules.fragments_per_chunk == 1
        session_id, min_version = meta.session_id, self._min_version
        number = meta.num_fragments
        whole: list[tuple[Fragment, ...]] = []
        for fragment_id, metadata in fragments:
            if not take(fragment_id):
                meta.tallies.duplicates += 1
                continue
            version = metadata.model_version
            fragment = Fragment(fragment_id, metadata.worker_uuid, metadata.fid_in_worker, version, number)
            number += 1
            if metadata.session_id != session_id:
                self._drop([fragment], "session")
            elif version < min_version:
                # A chunk has no holes: what came before is no use either.
                self._drop([fragment], "stale")
            elif is_chunk:
                whole.append((fragment,))
            else:
                whole += self._follow(fragment, now_s)
        meta.tallies.added += number - meta.num_fragments
        meta.num_fragments = number
        self._insert(whole)
        self._evict()

    def _follow(self, fragment: Fragment, now_s: float) -> list[tuple[Fragment, ...]]:
        """The chunk that `fragment` completes, if it does."""
        useless, complete = self._sequences.add(fragment, now_s)
        self._drop_parts(useless, "gap")
        if not complete:
            self._changes["part", fragment.number] = fragment
            return []
        # The last one was never a row.
        for part in complete[:-1]:
            self._changes["part", part.number] = None
        return [tuple(complete)]

    def _insert(self, whole: Sequence[tuple[Fragment, ...]]) -> None:
        meta = self.meta
        chunks = [
            Chunk(
                number, fragments, min([fragment.model_version for fragment in fragments]), meta.max_priority
            )
            for number, fragments in enumerate(whole, meta.num_chunks)
        ]
        meta.num_chunks += len(chunks)
        if limit := self.rules.rate_limit:
            meta.difference += limit.samples_per_insert * len(chunks)
        self._hold_chunks(chunks)

    def _hold_chunks(self, chunks: Sequence[Chunk]) -> None:
        self._chunks.add(chunks)
        self._segments.add(chunks)
        self._chunk_of.update(
            [(fragment.fragment_id, chunk) for chunk in chunks for fragment in chunk.fragments]
        )

    def _evict(self) -> None:
        excess = len(self._chunks) - self.rules.max_chunks
        if excess > 0:
            self._drop_chunks(self._chunks.oldest(excess), "evicted")

    def set_version(self, session_id: str, model_version: int) -> None:
        """The weights are those now; what is too old for them, or of another session, is dropped."""
        if session_id != self.meta.session_id:
            self._drop_chunks(list(self._chunks), "session")
            self._drop_parts(self._sequences.drop_all(), "session")
        self.meta.session_id, self.meta.model_version = session_id, model_version
        self._drop_stale()

    def _drop_stale(self) -> None:
        self._drop_chunks(self._chunks.stale(self._min_version), "stale")
        self._drop_parts(self._sequences.drop_stale(self._min_version), "stale")

    def set_priorities(self, priorities: Mapping[str, float]) -> None:
        """Give chunks the largest priority named for one of their fragments; ids that have left are ignored.

        Raises:
            ValueError: a priority is not a positive number.
        """
        largest: dict[Chunk, float] = {}
        for fragment_id, priority in priorities.items():
            if not 0 < priority < float("inf"):
                raise ValueError(
                    f"the priority of {fragment_id!r} must be above 0 and finite, got {priority}"
                )
            chunk = self._chunk_of.get(fragment_id)
            if chunk is not None:
                largest[chunk] = max(priority, largest.get(chunk, 0.0))
        for chunk, priority in largest.items():
            self._chunks.set_priority(chunk, priority)
            self._segments.set_priority(chunk)
            self.meta.max_priority = max(self.meta.max_priority, priority)

    # What goes out.

    def may_insert(self) -> bool:
        """Whether the rate limit lets writers go on."""
        limit = self.rules.rate_limit
        return limit is None or limit.may_insert(self.meta.difference)

    def can_serve(self, num_chunks: int) -> bool:
        """Whether there are that many, and the rate limit lets readers go on."""
        limit = self.rules.rate_limit
        return len(self._chunks) >= num_chunks and (
            limit is None or limit.may_sample(self.meta.difference, num_chunks, len(self._chunks))
        )

    def serve(self, num_chunks: int, now_s: float, lease_s: float | None = None) -> FragmentBatch:
        """A batch of that many distinct chunks, under a lease of `lease_s` seconds (None: the rules')."""
        meta, version = self.meta, self.meta.model_version
        seed = (self.rules.seed, meta.num_draws)
        chunks = self._chunks.sample(num_chunks, self.rules.sampling, version, seed)
        ages = [version - chunk.oldest_version for chunk in chunks]
        meta.tallies.count_uses(ages, sum([not chunk.uses for chunk in chunks]))
        fragments = [fragment for chunk in chunks for fragment in chunk.fragments]
        length = self.rules.fragments_per_chunk
        staleness = ages if length == 1 else [age for age in ages for _ in range(length)]
        row = LeaseRow(meta.num_leases, lease_s or self.rules.lease_s, fragments, staleness)
        meta.num_draws += 1
        meta.num_leases += 1
        meta.difference -= num_chunks if self.rules.rate_limit else 0
        meta.tallies.fetches += 1
        meta.tallies.served += len(fragments)
        self.references.hold(fragments)
        self.leases.add(row, now_s)
        self._changes["lease", row.number] = row
        self._count_uses(chunks)
        self.prepared = row.batch()
        return self.prepared

    def _count_uses(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.uses += 1
        self._segments.set_uses(chunks)
        self._remove_used_up(chunks)

    def _remove_used_up(self, chunks: Iterable[Chunk]) -> None:
        used_up = [chunk for chunk in chunks if chunk.uses >= self.rules.max_reuse]
        fragments = self._remove_chunks(used_up)
        self.meta.tallies.used_up += len(fragments)
        self._free += self.references.let_go(fragments)

    # What leaves.

    def release(self, lease: Lease | str) -> bool:
        """End the lease; False: it had ended."""
        row = self.leases.find(lease)
        if row is None:
            return False
        self._end_lease(row)
        return True

    def renew(self, lease: Lease | str, now_s: float) -> bool:
        """Begin the lease's term anew; False: it had ended, and its payloads may be gone."""
        row = self.leases.find(lease)
        if row is not None:
            self.leases.add(row, now_s)
        return row is not None

    def _end_lease(self, row: LeaseRow) -> None:
        self.leases.remove(row)
        self._changes["lease", row.number] = None
        self._free += self.references.let_go(row.fragments)

    def drop_worker(self, worker_uuid: str) -> None:
        """Drop the partial chunk of a worker that sends no more; its whole chunks stay."""
        self._drop_parts(self._sequences.drop_worker(worker_uuid), "silent_worker")

    def advance(self, now_s: float) -> None:
        """Do what time brings: end leases, give up silent workers."""
        for row in self.leases.over(now_s):
            self.meta.tallies.expired_leases += 1
            self._end_lease(row)
        while (heard := self._sequences.heard_last()) and heard[1] + self.rules.worker_timeout_s <= now_s:
            self.drop_worker(heard[0])

    def next_deadline_s(self) -> float | None:
        """When `advance` has something to do; None: never, as it stands."""
        heard = self._sequences.heard_last()
        ends_s = [heard[1] + self.rules.worker_timeout_s] if heard else []
        lease_end_s = self.leases.next_end_s()
        return min(ends_s + ([] if lease_end_s is None else [lease_end_s]), default=None)

    def restart_clock(self, now_s: float) -> None:
        """Begin all terms anew: the clock they were counted by is not that of `now_s`."""
        self.leases.restart(now_s)
        self._sequences.hear_all(now_s)

    def _drop_chunks(self, chunks: list[Chunk], reason: str) -> None:
        if limit := self.rules.rate_limit:
            # They take the samples they will never give out of the account.
            self.meta.difference -= sum(max(0.0, limit.samples_per_insert - chunk.uses) for chunk in chunks)
        self._drop(self._remove_chunks(chunks), reason)

    def _remove_chunks(self, chunks: list[Chunk]) -> list[Fragment]:
        self._chunks.remove(chunks)
        self._segments.remove(chunks)
        fragments = [fragment for chunk in chunks for fragment in chunk.fragments]
        for fragment in fragments:
            del self._chunk_of[fragment.fragment_id]
        return fragments

    def _drop_parts(self, fragments: list[Fragment], reason: str) -> None:
        self._changes.update((("part", fragment.number), None) for fragment in fragments)
        self._drop(fragments, reason)

    def _drop(self, fragments: list[Fragment], reason: str) -> None:
        self.meta.tallies.dropped[reason] += len(fragments)
        self._free += self.references.let_go(fragments)

    # Going on after a restart.

    def restore(self, rows: Rows, has_payload: Callable[[str], bool]) -> None:
        """Go on from `rows` in an empty state; fragments without a payload are dropped.

        Raises:
            ValueError: the rows are of chunks of another length.
        """
        if rows.meta is None:
            return
        if rows.meta.fragments_per_chunk != self.rules.fragments_per_chunk:
            raise ValueError(
                f"the store holds chunks of {rows.meta.fragments_per_chunk} fragments, got "
                f"fragments_per_chunk={self.rules.fragments_per_chunk}: keep that, or take an empty folder"
            )
        self.meta = rows.meta
        self._segments = Segments(rows.segments)
        for row in rows.leases:
            self.references.hold(row.fragments)
            self.leases.add(row, now_s=0.0)
            self.prepared = row.batch()
        for chunk in rows.chunks:
            self.references.hold(chunk.fragments)
        self._hold_chunks(rows.chunks)
        for fragment in rows.parts:
            self.references.hold([fragment])
            useless, complete = self._sequences.add(fragment, now_s=0.0)
            assert not useless
            assert not complete
        self._apply_rules(has_payload)

    def _apply_rules(self, has_payload: Callable[[str], bool]) -> None:
        """Drop what was lost, and what narrower rules than those before the restart do not allow."""
        lost_chunks = [
            chunk
            for chunk in self._chunks
            if not all(has_payload(fragment.fragment_id) for fragment in chunk.fragments)
        ]
        self._drop_chunks(lost_chunks, "lost_payload")
        self._remove_used_up(self._chunks)
        lost = {f.worker_uuid for f in self._sequences if not has_payload(f.fragment_id)}
        for worker in lost:
            self._drop_parts(self._sequences.drop_worker(worker), "lost_payload")
        self._evict()
        self._drop_stale()
