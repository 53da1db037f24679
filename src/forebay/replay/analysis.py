"""Rows and rollouts as one flat table, for pandas, Parquet and whatever reads them.

::

    groups table (uid, ...) --.
                               +--join--> one line per rollout: the fields of its row, then its own
    rollouts table (uid, ...) -'

Columns that both tables have (``status``, ``task_name``) are the row's; the rollout's own are called
``rollout_status`` and ``rollout_task_name``. Nothing here can be read back into a buffer: that is what
snapshots are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from forebay.extras import needed_by
from forebay.replay.format.tables import GROUPS_SCHEMA, ROLLOUTS_SCHEMA, group_batch, rollout_batches
from forebay.replay.stores.contract import StorageItem
from forebay.replay.stores.frame import rows_to_frame

if TYPE_CHECKING:
    from pandas import DataFrame

_ROLLOUT_COLUMNS = {
    name: f"rollout_{name}" if name in GROUPS_SCHEMA.names else name
    for name in ROLLOUTS_SCHEMA.names
    if name != "uid"
}
JOINED_SCHEMA = pa.schema(
    [
        *GROUPS_SCHEMA,
        *(ROLLOUTS_SCHEMA.field(name).with_name(shown) for name, shown in _ROLLOUT_COLUMNS.items()),
    ]
)


def join(groups: pa.Table, rollouts: pa.RecordBatch) -> pa.RecordBatch:
    """The rollouts whose group is in `groups`, each with the columns of its group."""
    places = pc.index_in(rollouts.column("uid"), groups.column("uid").combine_chunks())
    rollouts = rollouts.filter(places.is_valid())
    lines = groups.take(places.drop_null())
    columns = [lines.column(name).combine_chunks() for name in GROUPS_SCHEMA.names]
    columns += [rollouts.column(name) for name in _ROLLOUT_COLUMNS]
    return pa.RecordBatch.from_arrays(columns, schema=JOINED_SCHEMA)


def to_frame(items: Sequence[StorageItem], *, payloads: bool) -> DataFrame:
    """A DataFrame of the rows, or of their rollouts with the columns of `JOINED_SCHEMA`."""
    with needed_by("to_pandas"):
        if not payloads:
            return rows_to_frame(items)
        # The staleness of these rows is taken as it is.
        groups = pa.Table.from_batches([group_batch(items, {})])
        batches = [join(groups, batch) for batch in rollout_batches(items)]
        return pa.Table.from_batches(batches, JOINED_SCHEMA).to_pandas()
