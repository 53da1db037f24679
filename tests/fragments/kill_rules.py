"""The buffer's settings in the kill test, for the parent and its children."""

RULES = {
    "max_chunks": 20,
    "max_staleness": 0,
    "max_reuse": 2,
    "fragments_per_chunk": 2,
    "lease_s": 1000.0,
    "orphan_grace_s": 100.0,
}
