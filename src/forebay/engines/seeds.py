"""Seeds that follow from names, the same in every process and version."""

from __future__ import annotations

import hashlib


def request_seed(*parts: str | int) -> int:
    """A seed of 63 bits that depends on all of `parts` and is the same in every process and version.

    Rollouts' seeds end in a 0, which recorded runs have; without it they could not be repeated.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
