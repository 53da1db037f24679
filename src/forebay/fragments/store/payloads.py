"""Payloads of fragments in a database file that all processes of a machine share.

It keeps what it is given until it is told to delete it. Which payloads are still of use is for the buffer to
know; see `forebay.fragments.store.collector`.

::

    SampleFragment --pack--> payload --> mapped database --+--> get: fragments
                                                           '--> stack: one batch

    folder/shard-0/   tables: payloads (id -> payload), schemas
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.fragments.records import SampleFragment
from forebay.fragments.store.codec import Packed, Schema, pack, schema_id_of, stack, unpack, unstack
from forebay.fragments.store.mapped import Environment, StoreFullError

_ROOM_BYTES = 64 << 20
"""The file may grow to twice its payloads plus this: pages that a snapshot holds are not used again before."""


class FragmentStore:
    """Fragments by id, in the folder `path`.

    Invariants: an id is never used for another fragment; a fragment is there whole or not at all, whichever
    process is killed when; opening a folder keeps what is in it. Ids are texts, unique across processes.

    >>> import tempfile
    >>> import numpy as np
    >>> store = FragmentStore(path=tempfile.mkdtemp())
    >>> steps = {name: np.ones(3, np.float32) for name in ("obs", "action", "next_done", "reward", "first")}
    >>> fragment = SampleFragment(**steps, in_state=[], worker_uuid="worker-0", fid_in_worker=0)
    >>> store.get_fragment(store.add_fragment(fragment)).reward
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 4 << 30) -> None:
        """Open or make the store; every process that uses it names the same `path` and `max_bytes`.

        `max_bytes` bounds the payloads, in whole pages of the machine; the file grows to about twice that.

        Raises:
            ValueError: a value is not possible.
        """
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._environment = Environment.open(self.path / "shard-0", max_bytes=2 * max_bytes + _ROOM_BYTES)
        self._payloads = self._environment.table("payloads")
        self._schema_table = self._environment.table("schemas")
        # Neighbors in the database follow each other in time: what is added together lies together.
        prefix = os.urandom(8).hex()
        self._ids = (f"{prefix}{number:016x}" for number in itertools.count())
        self._schemas: dict[bytes, Schema] = {}
        """The schemas that are known to be in the table."""

    def add_fragment(self, fragment: SampleFragment) -> str:
        """Keep `fragment`; its id."""
        return self.add_fragments([fragment])[0]

    def add_fragments(self, fragments: Iterable[SampleFragment]) -> list[str]:
        """Keep them, with one commit; their ids, in order.

        Raises:
            StoreFullError: they do not fit; none is kept.
            ValueError: a fragment holds something that cannot be stored.
        """
        # Packed before the transaction begins: while it lasts, every other writer waits.
        return self._put([pack(fragment) for fragment in fragments])

    def add_stacked(self, batch: SampleFragment) -> list[str]:
        """Keep the fragments that `batch` is made of, as `stack` returns them; their ids, in order.

        Several times as fast as one by one, when they are small: a worker that steps many environments has
        them together anyway. A plain value in place of a list is that of every fragment.

        Raises:
            StoreFullError: as `add_fragments`.
            ValueError: the arrays and lists differ in length, or it holds something that cannot be stored.
        """
        return self._put(unstack(batch))

    def _put(self, packed: list[Packed]) -> list[str]:
        ids = list(itertools.islice(self._ids, len(packed)))
        num_bytes = sum(one.num_bytes for one in packed)
        schemas = {one.schema.schema_id: one.schema for one in packed}
        new = {each: schema for each, schema in schemas.items() if each not in self._schemas}
        with self._environment.write(num_bytes) as transaction:
            used = transaction.stat(self._payloads)
            held = used["psize"] * (used["leaf_pages"] + used["overflow_pages"])
            # LMDB would say so later: the map is larger, so that pages in use do not take room from payloads.
            if held + num_bytes > self._max_bytes:
                raise StoreFullError(
                    f"{str(self.path)!r} holds {held} bytes, and {num_bytes} more exceed its bound of "
                    f"{self._max_bytes}: lower the buffer's max_chunks, or raise max_bytes"
                )
            for schema_id, schema in new.items():
                transaction.put(schema_id, schema.text, db=self._schema_table)
            cursor = transaction.cursor(self._payloads)
            # One after the other: the bytes of each are let go before those of the next are joined.
            pairs = ((fragment_id.encode(), b"".join(one.parts)) for fragment_id, one in zip(ids, packed, strict=True))
            _, added = cursor.putmulti(pairs, overwrite=False)
            assert added == len(ids), "an id was used twice"
        # Only now: a transaction that failed has stored no schema.
        self._schemas |= new
        return ids

    def get_fragment(self, fragment_id: str) -> SampleFragment:
        """The fragment, with arrays of its own; KeyError if it is not there."""
        return self.get_fragments([fragment_id])[0]

    def get_fragments(self, fragment_ids: Sequence[str]) -> list[SampleFragment]:
        """The fragments, in order; their arrays are copies, and may be written to.

        Raises:
            KeyError: an id is not there: never added, or already deleted.
        """
        snapshot, fragments = self._environment.read(), []
        for fragment_id in fragment_ids:
            raw = self._raw(snapshot, fragment_id)
            fragments.append(
                unpack(np.frombuffer(bytearray(raw), np.uint8), self._schema(snapshot, schema_id_of(raw)))
            )
        return fragments

    def stack(self, fragment_ids: Sequence[str]) -> SampleFragment:
        """The fragments as one, with a leading axis on every array and a list for every plain value.

        The arrays are one copy of the payloads, and may be written to.

        Raises:
            KeyError: an id is not there.
            ValueError: there are none, or they differ in nesting, dtypes or shapes.
        """
        snapshot = self._environment.read()
        payloads = [self._raw(snapshot, fragment_id) for fragment_id in fragment_ids]
        if not payloads:
            raise ValueError("only fragments of one schema can be stacked; these 0 have 0")
        return stack(payloads, self._schema(snapshot, schema_id_of(payloads[0])))

    def _raw(self, snapshot: Any, fragment_id: str) -> memoryview:
        """The payload, for use before the snapshot is let go."""
        raw: memoryview | None = snapshot.get(fragment_id.encode(), db=self._payloads)
        if raw is None:
            raise KeyError(
                f"no fragment {fragment_id!r} in {str(self.path)!r}: it was never added, or was deleted when "
                f"its lease was released or had expired"
            )
        return raw

    def _schema(self, snapshot: Any, schema_id: bytes) -> Schema:
        if schema_id not in self._schemas:
            text = snapshot.get(schema_id, db=self._schema_table)
            assert text is not None
            self._schemas[schema_id] = Schema.parse(bytes(text))
        return self._schemas[schema_id]

    def delete_fragments(self, fragment_ids: Iterable[str]) -> int:
        """Delete those of them that are there; how many were."""
        with self._environment.write() as transaction:
            return sum(transaction.delete(fragment_id.encode(), db=self._payloads) for fragment_id in fragment_ids)

    def ids(self) -> list[str]:
        """The ids of all fragments, those of one process in the order in which they were added."""
        snapshot = self._environment.read()
        return [str(key, "utf-8") for key in snapshot.cursor(self._payloads).iternext(values=False)]

    def __contains__(self, fragment_id: str) -> bool:
        return self._environment.read().get(fragment_id.encode(), db=self._payloads) is not None

    def __len__(self) -> int:
        return int(self._environment.read().stat(self._payloads)["entries"])

    def copy(self, path: Path) -> None:
        """A copy in the new folder `path`, on the disk when this returns."""
        self._environment.copy(path / "shard-0")
