"""Leases on the payloads of a batch, and the count of holders of each payload.

::

    fetch --> Lease (in force) --renew--> in force for another term
                               --release--------> ended: payloads that nothing else holds are deleted
                               --term is over---> ended, the same; counted

A batch says which payloads it names; its lease keeps exactly those. Several leases may be in force, and may
hold the same payloads. A payload is free once no chunk, no partial chunk and no lease holds it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from forebay.fragments.chunks import Fragment
from forebay.fragments.records import FragmentIndex

NUM_REMEMBERED = 1 << 15
"""Ids that are remembered at least when nothing holds them any more: 3 MB, and longer than a caller takes to
send an addition again whose answer was lost."""


class References:
    """How many hold each payload: a chunk or partial chunk counts once, every lease once.

    An id whose count falls to 0 is remembered for a while: one that is announced again comes too late.

    >>> references, fragment = References(), Fragment("id", "w", 0, -1)
    >>> references.hold([fragment])
    >>> references.let_go([fragment]), references.knows("id")
    (['id'], True)
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, fragment_id: str) -> bool:
        return fragment_id in self._counts

    def knows(self, fragment_id: str) -> bool:
        """Whether something holds it, or it is one of the last that were held."""
        return fragment_id in self._counts or fragment_id in self._gone

    def hold(self, fragments: Iterable[Fragment]) -> None:
        """One holder more for each."""
        self._counts.update([fragment.fragment_id for fragment in fragments])

    def let_go(self, fragments: Iterable[Fragment]) -> list[str]:
        """One holder less for each; the ids that nothing holds now."""
        counts, free = self._counts, []
        for fragment in fragments:
            fragment_id = fragment.fragment_id
            count = counts.pop(fragment_id) - 1
            if count:
                counts[fragment_id] = count
            else:
                free.append(fragment_id)
        self._gone |= dict.fromkeys(free)
        # Of all that are gone, the last ones only are remembered; the others go together, not one by one.
        if len(self._gone) > 2 * NUM_REMEMBERED:
            for fragment_id in list(islice(self._gone, NUM_REMEMBERED)):
                del self._gone[fragment_id]
        return free


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read the payloads of one batch.

    >>> Lease("17", term_s=600.0).lease_id
    '17'
    """

    lease_id: str
    term_s: float
    """Seconds it is in force, from the fetch or the last renewal on."""


class FragmentBatch(list[tuple[FragmentIndex, str]]):
    """The result of one fetch: ``(FragmentIndex, fragment id)``, fragments of a chunk together and in order.

    >>> batch = FragmentBatch([(FragmentIndex("w", 0), "id")], Lease("17", 600.0), [2])
    >>> batch[0], batch.lease.lease_id, batch.staleness
    ((FragmentIndex(worker_uuid='w', fid_in_worker=0), 'id'), '17', [2])
    """

    def __init__(
        self,
        entries: Iterable[tuple[FragmentIndex, str]] = (),
        lease: Lease | None = None,
        staleness: Iterable[int] = (),
    ) -> None:
        super().__init__(entries)
        self.lease = lease
        """None: nothing was fetched yet."""
        self.staleness = list(staleness)
        """Of each fragment, in model versions, when it was served: that of the oldest in its chunk."""

    @property
    def fragment_ids(self) -> list[str]:
        """The ids alone, for the store."""
        return [fragment_id for _, fragment_id in self]


class LeaseRow(msgspec.Struct, array_like=True):
    """A lease as it is kept."""

    number: int
    term_s: float
    fragments: list[Fragment]
    staleness: list[int]
    end_s: float = 0.0
    """The end by the clock of the event loop: a restart begins the term anew."""

    def batch(self) -> FragmentBatch:
        """The batch that was served with it."""
        entries = [
            (FragmentIndex(fragment.worker_uuid, fragment.fid_in_worker), fragment.fragment_id)
            for fragment in self.fragments
        ]
        return FragmentBatch(entries, Lease(str(self.number), self.term_s), self.staleness)
