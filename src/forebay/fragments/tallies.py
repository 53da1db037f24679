"""Counts of what went in, what came out and what was dropped, and the numbers made of them."""

import msgspec

DROP_REASONS = ("stale", "session", "evicted", "gap", "silent_worker", "lost_payload")
"""Why fragments leave without having been used up. In this order: a fragment too old or of another session;
the oldest in a full buffer; before a gap in its worker's stream; of a worker that fell silent before the
chunk was complete; its payload was gone when the buffer was opened."""


class Tallies(msgspec.Struct):
    """Totals since the store was made; they outlive a restart.

    Fragments, unless a name says otherwise. ``added = in the buffer + used_up + the sum of dropped``.

    >>> Tallies(uses=6, served_chunks=3).as_metrics()["mean_reuse"]
    2.0
    """

    added: int = 0
    duplicates: int = 0
    """Additions of a fragment that was there already; they change nothing and count nowhere else."""
    used_up: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    fetches: int = 0
    expired_leases: int = 0
    served: int = 0
    uses: int = 0
    """Chunks served, each as often as it was."""
    served_chunks: int = 0
    """Chunks served at least once."""
    staleness_sum: int = 0
    """Over all chunks served, at the time."""
    staleness_max: int = 0

    def count_uses(self, staleness: list[int], num_first: int) -> None:
        """Chunks of this staleness were served, so many of them for the first time."""
        largest = max(staleness)
        # The first counts as it is: fragments that are newer than the buffer knows have a negative staleness.
        self.staleness_max = max(self.staleness_max, largest) if self.uses else largest
        self.staleness_sum += sum(staleness)
        self.uses += len(staleness)
        self.served_chunks += num_first

    def as_metrics(self) -> dict[str, float]:
        """The counts by the name under which they are reported."""
        numbers: dict[str, float] = {
            "added_fragments": self.added,
            "duplicate_fragments": self.duplicates,
            "used_up_fragments": self.used_up,
            "served_fragments": self.served,
            "fetches": self.fetches,
            "expired_leases": self.expired_leases,
            # Of chunks that were used at all; 0 before the first.
            "mean_reuse": self.uses / max(1, self.served_chunks),
            "mean_staleness": self.staleness_sum / max(1, self.uses),
            "max_staleness": self.staleness_max,
        }
        return numbers | {f"dropped/{reason}": count for reason, count in self.dropped.items()}
