"""The decisions of a fragment buffer, without waiting, disk or clock: a change is one call, never cut short.

::

    add --stale, of another session------------------------> dropped
     '--> sequences --gap, silent worker, stale, session---> dropped
              '--complete--> chunks --full, stale, session-> dropped
                               |   '--max_reuse-th use-----> used up
                               '--serve--> lease --released, over
                                                        '--> payload free, if nothing else holds it

Each fragment is in exactly one place, so at any moment
``added = in chunks + in sequences + used up + dropped (by reason)``.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from forebay.fragments.chunks import Chunk, ChunkTable, Fragment, Sequences
from forebay.fragments.leases import FragmentBatch, Lease, LeaseRow, References
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.rules import Rules
from forebay.fragments.store import journal


class ReplayState:
    """The chunks, partial chunks and leases of one buffer.

    Invariants: no chunk here is older than `max_staleness` by its oldest fragment, of another session, or
    used `max_reuse` times; a payload is free exactly when no chunk, no partial chunk and no lease names it;
    `changes`, replayed on an equal state, make it this one.

    >>> rules = Rules(max_chunks=8, max_staleness=1, max_reuse=1, fragments_per_chunk=1)
    >>> state = ReplayState(rules)
    >>> state.add([("id", FragmentMetadata("w", 0, model_version=-1, session_id=""))], now_s=0.0)
    >>> state.can_serve(1), state.serve(1, now_s=0.0).fragment_ids, state.can_serve(1)
    (True, ['id'], False)
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.meta = journal.Meta()
        self.changes: list[journal.Change] = []
        """Changes that are not in the journal yet."""
        self.free: list[str] = []
        """Payloads to be deleted once the changes are committed."""
        self.references = References()
        self.leases: dict[int, LeaseRow] = {}
        """The leases in force, by number."""
        self.prepared = FragmentBatch()
        """The batch served last."""
        self.chunks = ChunkTable()
        self.sequences = Sequences(rules.fragments_per_chunk)

    @property
    def _min_version(self) -> int:
        return self.meta.model_version - self.rules.max_staleness

    # Coming in.

    def add(self, fragments: Sequence[tuple[str, FragmentMetadata]], now_s: float) -> None:
        """Take the fragments in, or drop them; one that is here already changes nothing."""
        new = {each: metadata for each, metadata in fragments if not self.references.knows(each)}
        self._add(journal.checked(journal.Added(new, len(fragments) - len(new))), now_s)

    def _add(self, added: journal.Added, now_s: float) -> list[Chunk]:
        """Take in what is new; the chunks that are complete now."""
        self.changes.append(added)
        new, num_duplicates = added.fragments, added.num_duplicates
        meta, is_chunk = self.meta, self.rules.fragments_per_chunk == 1
        session_id, min_version = meta.session_id, self._min_version
        whole: list[tuple[Fragment, ...]] = []
        fragments = [
            Fragment(fragment_id, metadata.worker_uuid, metadata.fid_in_worker, metadata.model_version)
            for fragment_id, metadata in new.items()
        ]
        # Those that are dropped below, too: what is let go is remembered, and its payload is deleted.
        self.references.hold(fragments)
        for fragment, metadata in zip(fragments, new.values(), strict=True):
            if metadata.session_id != session_id:
                self._drop([fragment], "session")
            elif metadata.model_version < min_version:
                # Those before it go when the next fragment shows the gap, or the worker falls silent.
                self._drop([fragment], "stale")
            elif is_chunk:
                whole.append((fragment,))
            else:
                useless, complete = self.sequences.add(fragment, now_s)
                self._drop(useless, "gap")
                whole += [tuple(complete)] if complete else []
        meta.tallies.added += len(new)
        meta.tallies.duplicates += num_duplicates
        chunks = [
            Chunk(number, fragments, min([fragment.model_version for fragment in fragments]))
            for number, fragments in enumerate(whole, meta.num_chunks)
        ]
        meta.num_chunks += len(chunks)
        if limit := self.rules.rate_limit:
            meta.difference += limit.samples_per_insert * len(chunks)
        self.chunks.add(chunks)
        self._evict()
        return chunks

    def _evict(self) -> None:
        excess = len(self.chunks) - self.rules.max_chunks
        if excess > 0:
            self._drop_chunks(self.chunks.oldest(excess), "evicted")

    def set_version(self, session_id: str, model_version: int) -> None:
        """The weights are those now; what is too old for them, or of another session, is dropped."""
        self.changes.append(change := journal.checked(journal.VersionSet(session_id, model_version)))
        session_id, model_version = change.session_id, change.model_version
        if session_id != self.meta.session_id:
            self._drop_chunks(list(self.chunks), "session")
            self._drop(self.sequences.drop_stale(math.inf), "session")
        self.meta.session_id, self.meta.model_version = session_id, model_version
        self._drop_stale()

    def _drop_stale(self) -> None:
        self._drop_chunks(self.chunks.stale(self._min_version), "stale")
        self._drop(self.sequences.drop_stale(self._min_version), "stale")

    # Going out.

    def may_insert(self) -> bool:
        """Whether the rate limit lets writers go on."""
        limit = self.rules.rate_limit
        difference = self.meta.difference
        return limit is None or difference + limit.samples_per_insert <= limit.middle + limit.error_buffer

    def can_serve(self, num_chunks: int) -> bool:
        """Whether there are that many, and the rate limit lets readers go on."""
        limit, held, left = self.rules.rate_limit, len(self.chunks), self.meta.difference - num_chunks
        return held >= num_chunks and (
            limit is None or (held >= limit.min_chunks and left >= limit.middle - limit.error_buffer)
        )

    def serve(self, num_chunks: int, now_s: float) -> FragmentBatch:
        """A batch of that many distinct chunks, under a lease."""
        seed = (self.rules.seed, self.meta.num_draws)
        return self._serve(self.chunks.sample(num_chunks, seed), now_s, self.rules.lease_s)

    def _serve(self, chunks: list[Chunk], now_s: float, lease_s: float) -> FragmentBatch:
        meta, length = self.meta, self.rules.fragments_per_chunk
        self.changes.append(journal.Served([chunk.fragments[0].fragment_id for chunk in chunks], lease_s))
        ages = [meta.model_version - chunk.oldest_version for chunk in chunks]
        meta.tallies.count_uses(ages, sum([not chunk.uses for chunk in chunks]))
        fragments = [fragment for chunk in chunks for fragment in chunk.fragments]
        staleness = ages if length == 1 else [age for age in ages for _ in range(length)]
        row = LeaseRow(meta.num_leases, lease_s, fragments, staleness, now_s + lease_s)
        meta.num_draws += 1
        meta.num_leases += 1
        meta.difference -= len(chunks) if self.rules.rate_limit else 0
        meta.tallies.fetches += 1
        meta.tallies.served += len(fragments)
        self.references.hold(fragments)
        self.leases[row.number] = row
        for chunk in chunks:
            chunk.uses += 1
        self._remove_used_up(chunks)
        self.prepared = row.batch()
        return self.prepared

    def _remove_used_up(self, chunks: Iterable[Chunk]) -> None:
        used_up = [chunk for chunk in chunks if chunk.uses >= self.rules.max_reuse]
        fragments = self._remove_chunks(used_up)
        self.meta.tallies.used_up += len(fragments)
        self.free += self.references.let_go(fragments)

    # Leaving.

    def release(self, lease: Lease | str) -> bool:
        """End the lease; False: it had ended."""
        row = self._find(lease)
        if row is not None:
            self._end_lease(row, is_expired=False)
        return row is not None

    def renew(self, lease: Lease | str, now_s: float) -> bool:
        """Begin the lease's term anew; False: it had ended, and its payloads may be gone."""
        row = self._find(lease)
        if row is not None:
            # No change to be written: after a restart each lease has its whole term in any case.
            row.end_s = now_s + row.term_s
        return row is not None

    def _find(self, lease: Lease | str) -> LeaseRow | None:
        """The lease, given as such or by its id; None: it ended."""
        lease_id = lease.lease_id if isinstance(lease, Lease) else lease
        if not isinstance(lease_id, str) or not lease_id.isdecimal():
            raise ValueError(f"a lease is what a batch has as .lease, or its lease_id, got {lease!r}")
        return self.leases.get(int(lease_id))

    def _end_lease(self, row: LeaseRow, *, is_expired: bool) -> None:
        self.changes.append(journal.LeaseEnded(row.number, is_expired))
        self.meta.tallies.expired_leases += is_expired
        del self.leases[row.number]
        self.free += self.references.let_go(row.fragments)

    def drop_worker(self, worker_uuid: str, reason: str = "silent_worker") -> None:
        """Drop the partial chunk of a worker that sends no more; its whole chunks stay."""
        self.changes.append(journal.checked(journal.WorkerDropped(worker_uuid)))
        self._drop(self.sequences.drop_worker(worker_uuid), reason)

    def advance(self, now_s: float) -> None:
        """Do what time brings: end leases, give up silent workers."""
        for row in [row for row in self.leases.values() if row.end_s <= now_s]:
            self._end_lease(row, is_expired=True)
        while (heard := self.sequences.heard_last()) and heard[1] + self.rules.worker_timeout_s <= now_s:
            self.drop_worker(heard[0])

    def next_deadline_s(self) -> float | None:
        """When `advance` has something to do; None: never, as it stands."""
        heard = self.sequences.heard_last()
        ends_s = [heard[1] + self.rules.worker_timeout_s] if heard else []
        return min([*ends_s, *[row.end_s for row in self.leases.values()]], default=None)

    def restart_clock(self, now_s: float) -> None:
        """Begin all terms anew: the clock they were counted by is not that of `now_s`."""
        for row in self.leases.values():
            row.end_s = now_s + row.term_s
        self.sequences.hear_all(now_s)

    def _drop_chunks(self, chunks: list[Chunk], reason: str) -> None:
        self._drop(self._remove_chunks(chunks), reason)
        if limit := self.rules.rate_limit:
            # The samples that they will never give leave the account. Those of the others stay in it:
            # chunks sampled more often than `samples_per_insert` would otherwise use them up for good.
            most = limit.samples_per_insert * len(self.chunks)
            self.meta.difference = min(self.meta.difference, most)

    def _remove_chunks(self, chunks: list[Chunk]) -> list[Fragment]:
        self.chunks.remove(chunks)
        return [fragment for chunk in chunks for fragment in chunk.fragments]

    def _drop(self, fragments: list[Fragment], reason: str) -> None:
        self.meta.tallies.dropped[reason] += len(fragments)
        self.free += self.references.let_go(fragments)

    # Going on after a restart.

    def snapshot(self) -> journal.Snapshot:
        """The whole state, for `restore`."""
        return journal.Snapshot(
            self.rules, self.meta, list(self.chunks), list(self.sequences), list(self.leases.values())
        )

    def restore(self, saved: journal.Saved, has_payload: Callable[[str], bool]) -> None:
        """Go on from `saved` in an empty state; fragments without a payload are dropped.

        Raises:
            ValueError: it is of chunks of another length.
        """
        snapshot = saved.snapshot
        if snapshot is None:
            return
        if snapshot.rules.fragments_per_chunk != self.rules.fragments_per_chunk:
            raise ValueError(
                f"the store holds chunks of {snapshot.rules.fragments_per_chunk} fragments, got "
                f"fragments_per_chunk={self.rules.fragments_per_chunk}: keep that, or take an empty folder"
            )
        # The changes are replayed under the rules of their time; `_apply_rules` follows with those of now.
        rules, self.rules, self.meta = self.rules, snapshot.rules, snapshot.meta
        for row in snapshot.leases:
            self.references.hold(row.fragments)
            self.leases[row.number] = row
            self.prepared = row.batch()
        for chunk in snapshot.chunks:
            # The number that was saved is a place in the table of then.
            chunk.slot = -1
            self.references.hold(chunk.fragments)
        self.chunks.add(snapshot.chunks)
        self.references.hold(snapshot.parts)
        for fragment in snapshot.parts:
            self.sequences.add(fragment, now_s=0.0)
        by_first = _by_first(snapshot.chunks)
        for change in saved.changes:
            self._replay(change, by_first)
        self.rules = rules
        self._apply_rules(has_payload)
        # The first commit writes a snapshot, which has all of it.
        self.changes.clear()
        # Most of these payloads are deleted already. One that was announced again since is needed.
        self.free = [fragment_id for fragment_id in self.free if fragment_id not in self.references]

    def _replay(self, change: journal.Change, by_first: dict[str, Chunk]) -> None:
        match change:
            case journal.Added():
                by_first |= _by_first(self._add(change, now_s=0.0))
            case journal.Served(fragment_ids, lease_s):
                self._serve([by_first[each] for each in fragment_ids], 0.0, lease_s)
            case journal.LeaseEnded(number, is_expired):
                self._end_lease(self.leases[number], is_expired=is_expired)
            case journal.VersionSet(session_id, model_version):
                self.set_version(session_id, model_version)
            case journal.WorkerDropped(worker_uuid):
                self.drop_worker(worker_uuid)

    def _apply_rules(self, has_payload: Callable[[str], bool]) -> None:
        """Drop what was lost, and what narrower rules than those before the restart do not allow."""
        lost_chunks = [
            chunk
            for chunk in self.chunks
            if not all(has_payload(fragment.fragment_id) for fragment in chunk.fragments)
        ]
        self._drop_chunks(lost_chunks, "lost_payload")
        self._remove_used_up(self.chunks)
        for worker in {f.worker_uuid for f in self.sequences if not has_payload(f.fragment_id)}:
            self.drop_worker(worker, "lost_payload")
        self._evict()
        self._drop_stale()


def _by_first(chunks: Iterable[Chunk]) -> dict[str, Chunk]:
    """The chunks as the journal names them: by their first fragment."""
    return {chunk.fragments[0].fragment_id: chunk for chunk in chunks}
