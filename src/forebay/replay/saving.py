"""The content of a buffer at one moment, on its way to a snapshot and back.

::

    content_of: store, policy --(under the lock)--> the fields of a `Snapshot` --write--> a folder
    load:       a folder --read--> Snapshot --> store

Arrow is loaded in the threads that write and read: its first import takes longer than an event loop may stand
still.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.replay.policies import ReplayPolicy
from forebay.replay.query import QueryLike, matches, parse_query
from forebay.replay.stores.contract import StorageBackend

if TYPE_CHECKING:
    from forebay.replay.format.snapshot import Snapshot


def content_of(
    storage: StorageBackend, policy: ReplayPolicy, opened: ExitStack, left_out: QueryLike | None
) -> dict[str, Any]:
    """The fields of a `Snapshot`, without rows that match `left_out`, to be read before `opened` closes."""
    state = opened.enter_context(storage.reading_state())
    if left_out is not None:
        parsed = parse_query(left_out)
        # A generator: a store on disk reads payloads only as the rows are written.
        state = {**state, "items": (item for item in state["items"] if not matches(parsed, item))}
    return {
        "storage": state,
        "num_evicted": dict(storage.num_evicted),
        "policy": type(policy).__name__,
        "policy_state": policy.state_dict(),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the fields that `content_of` gave."""
    from forebay.replay.format.snapshot import Snapshot, write_snapshot

    write_snapshot(path, Snapshot(**content))


def read(path: Path, policy: ReplayPolicy) -> "Snapshot":
    """The snapshot at `path`; ValueError if it is damaged, or of another policy."""
    from forebay.replay.format.snapshot import read_snapshot

    return read_snapshot(path, policy=type(policy).__name__)


def load(storage: StorageBackend, snapshot: "Snapshot") -> None:
    """Give the store the content of the snapshot."""
    storage.load_state_dict(snapshot.storage)
    storage.num_evicted = dict(snapshot.num_evicted)
