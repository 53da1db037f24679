"""Which row groups of a file of the history may hold a text: an index of the runs of five bytes in them.

::

    a row group --> its runs of five bytes --hashed--> a bit for each hash: a Bloom filter of one hash

    rollouts_000000_000575.parquet
    rollouts_000000_000575.grams     2**21 bits for each row group

A text can stand only where all its runs of five bytes do, so a search for a rare text reads a few row groups.
Upper and lower case count as one. For a text of under five bytes, and without an index, all is searched.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEARCHED = ("response", "prompt", "error", "conversation")
TEXT_BYTES = 8 << 20
"""Of the texts of a row group: English, code and random letters set a tenth to a fifth of its bits."""
SUFFIX = ".grams"
LEAST_BYTES = 2 << 20
"""A smaller file is read as fast as its index."""
_NUM_BITS = 1 << 21
_LENGTH = 5


def index_texts(table: Any) -> NDArray[np.uint8]:
    """The bits of a row group, eight to a byte."""
    has = np.zeros(_NUM_BITS, bool)
    for column in (table[name].combine_chunks() for name in SEARCHED):
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset :][: len(column) + 1]
        if ends[-1] > ends[0]:
            has[_hashes(bytes(memoryview(data)[ends[0] : ends[-1]]))] = True
    return np.packbits(has)


def write_index(path: Path, groups: Sequence[NDArray[np.uint8]]) -> None:
    """Write the index of the file at `path`, whose row groups have these bits."""
    np.stack(groups).tofile(path.with_suffix(SUFFIX))


def rows_with(path: Path, texts: Iterable[str]) -> list[tuple[int, int]] | None:
    """The first and last rows of the row groups that may hold one of `texts`; None: no index, all may."""
    import pyarrow.parquet as pq

    wanted = [_hashes(text.encode("utf-8", "replace")).tolist() for text in texts]
    try:
        # Read byte by byte, most often one for a row group: pages of a mapped file would count as memory.
        with path.with_suffix(SUFFIX).open("rb", buffering=0) as file:

            def has(number: int, hashed: int) -> bool:
                file.seek((number * _NUM_BITS + hashed) >> 3)
                return bool(file.read(1)[0] >> (7 - hashed % 8) & 1)

            found, start, metadata = [], 0, pq.read_metadata(path)
            for number in range(metadata.num_row_groups):
                end = start + metadata.row_group(number).num_rows
                if any(all(has(number, hashed) for hashed in hashes) for hashes in wanted):
                    found.append((start, end - 1))
                start = end
            return found
    except (OSError, ValueError, IndexError):
        return None


def _hashes(text: bytes) -> NDArray[np.uint32]:
    """A number below `_NUM_BITS` for each run of five bytes."""
    folded = text.lower() if text.isascii() else text.decode(errors="replace").casefold().encode()
    if len(folded) < _LENGTH:
        return np.empty(0, np.uint32)
    # Views that overlap: the four bytes from each place on, without a copy of them.
    first = np.ndarray((len(folded) - 4,), "<u4", folded, strides=(1,))
    last = np.frombuffer(folded, np.uint8)[4:].astype(np.uint32)
    # Multiplicative hashing (Knuth, The Art of Computer Programming, 6.4): the upper bits are the mixed ones.
    hashes: NDArray[np.uint32] = first * np.uint32(2654435761) + last * np.uint32(2246822519)
    # The upper 21 of 32 bits, for `_NUM_BITS`.
    return hashes >> np.uint32(11)
