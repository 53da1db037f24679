"""Fragments that do not make a chunk yet: of each worker, its last consecutive ones.

::

    fid 4, 5 | 6 arrives: one more            | fragments_per_chunk of them: a chunk, and a new start
             | 8 arrives: 4, 5 are dropped, 8 is the new start
             | the worker falls silent, its session ends, or they grow stale: dropped
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.fragments.chunks import Fragment


class Sequences:
    """The partial chunk of every worker that has one.

    Invariants: the fragments of one worker here follow each other without a gap, and are fewer than make a
    chunk.

    >>> sequences = Sequences(fragments_per_chunk=2)
    >>> sequences.add(first, now_s=0.0)  # of worker "w", fid 0
    ([], [])
    >>> sequences.add(later, now_s=1.0)  # fid 2: 1 was lost
    ([Fragment(...fid_in_worker=0...)], [])
    """

    def __init__(self, fragments_per_chunk: int) -> None:
        self._fragments_per_chunk = fragments_per_chunk
        self._partials: dict[str, list[Fragment]] = {}
        # The worker that has been silent for longest comes first.
        self._heard_s: dict[str, float] = {}

    def __iter__(self) -> Iterator[Fragment]:
        for fragments in self._partials.values():
            yield from fragments

    def __len__(self) -> int:
        return sum(map(len, self._partials.values()))

    def add(self, fragment: Fragment, now_s: float) -> tuple[list[Fragment], list[Fragment]]:
        """Those that a gap makes useless, and the chunk that `fragment` completes; each may be empty."""
        worker = fragment.worker_uuid
        partial = self._partials.pop(worker, [])
        self._heard_s.pop(worker, None)
        useless: list[Fragment] = []
        if partial and partial[-1].fid_in_worker + 1 != fragment.fid_in_worker:
            partial, useless = [], partial
        partial.append(fragment)
        if len(partial) == self._fragments_per_chunk:
            return useless, partial
        self._partials[worker] = partial
        self._heard_s[worker] = now_s
        return useless, []

    def drop_stale(self, min_version: int) -> list[Fragment]:
        """Remove those of older versions, and what precedes them: no chunk without them can hold it."""
        dropped = []
        for worker, partial in list(self._partials.items()):
            stale = [i for i, fragment in enumerate(partial) if fragment.model_version < min_version]
            if stale:
                dropped += partial[: stale[-1] + 1]
                self._keep(worker, partial[stale[-1] + 1 :])
        return dropped

    def drop_worker(self, worker_uuid: str) -> list[Fragment]:
        """Remove those of this worker."""
        partial = self._partials.get(worker_uuid, [])
        self._keep(worker_uuid, [])
        return partial

    def drop_all(self) -> list[Fragment]:
        """Remove all."""
        dropped = list(self)
        self._partials.clear()
        self._heard_s.clear()
        return dropped

    def _keep(self, worker: str, fragments: list[Fragment]) -> None:
        if fragments:
            self._partials[worker] = fragments
        else:
            self._partials.pop(worker, None)
            self._heard_s.pop(worker, None)

    def heard_last(self) -> tuple[str, float] | None:
        """The worker silent for longest, and when it was heard; None: there is no partial chunk."""
        return next(iter(self._heard_s.items()), None)

    def hear_all(self, now_s: float) -> None:
        """Count all workers as heard now."""
        self._heard_s = dict.fromkeys(self._partials, now_s)
