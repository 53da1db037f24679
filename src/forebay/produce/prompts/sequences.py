"""Lazy sequences and keyed permutations: the order of prompts, without holding it.

::

    source rows --LazySequence--> shuffled view --slice--> view of a part --[i]--> one item, made now

A shuffled dataset of ten million rows costs no more memory than the rows. Nothing here knows what the items
are, and nothing is cached: an item is made anew each time it is asked for.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

ItemT = TypeVar("ItemT")

# Four rounds make a Feistel network of random functions hard to tell from a random permutation (Luby and
# Rackoff 1988); the mixing function here is cheap rather than random, so two more.
_NUM_ROUNDS = 6
# Halves below four bits leave too few different permutations; small sizes walk a little longer instead.
_MIN_HALF_BITS = 4
_MASK_64 = (1 << 64) - 1


class LazySequence(Sequence[ItemT], Generic[ItemT]):
    """``make(i)`` for each ``i`` of `indices`, made when it is asked for. A slice is another lazy sequence.

    >>> squares = LazySequence(lambda i: i * i, range(1_000_000))
    >>> squares[3], len(squares), list(squares[10:12])
    (9, 1000000, [100, 121])
    """

    def __init__(self, make: Callable[[int], ItemT], indices: Sequence[int]) -> None:
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...

    @overload
    def __getitem__(self, index: slice) -> "LazySequence[ItemT]": ...

    def __getitem__(self, index: int | slice) -> "ItemT | LazySequence[ItemT]":
        if isinstance(index, slice):
            return LazySequence(self._make, self._indices[index])
        return self._make(self._indices[index])


def permutation(size: int, key: str) -> Callable[[int], int]:
    """A fixed pseudo-random permutation of ``range(size)``, named by `key` and computed one entry at a time.

    The same size and key give the same permutation on every machine and with every library version. A
    Feistel network over the next power of four, walked until it falls inside the range (Black and Rogaway
    2002, "Ciphers with Arbitrary Finite Domains").

    >>> order = permutation(5, "epoch 0")
    >>> sorted(order(i) for i in range(5))
    [0, 1, 2, 3, 4]
    """
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _NUM_ROUNDS).digest()
    round_keys = struct.unpack(f"<{_NUM_ROUNDS}Q", digest)

    def entry(position: int) -> int:
        """The entry at `position`, which must be in ``range(size)``."""
        assert 0 <= position < size, f"position {position} of a permutation of {size}"
        value = position
        while True:
            left, right = value >> half_bits, value & half_mask
            for round_key in round_keys:
                # The finalizer of splitmix64 (Steele, Lea and Flood 2014): 64 bits to 64 well mixed bits.
                mixed = right ^ round_key
                mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
                mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
                left, right = right, left ^ ((mixed ^ mixed >> 31) & half_mask)
            value = left << half_bits | right
            if value < size:
                return value

    return entry


def shuffled(items: Sequence[ItemT], key: str) -> LazySequence[ItemT]:
    """All of `items` in the order of the permutation named `key`."""
    order = LazySequence(permutation(len(items), key), range(len(items)))
    return LazySequence(items.__getitem__, order)
