"""The batches of a replayed training as one Parquet file: a line per rollout, in the order of training.

::

    ReplayedStep.groups --add--> columns of `forebay.replay.format.tables`, `train_step` in front --> Parquet
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.replay.format.tables import ROLLOUTS_SCHEMA, rollout_batches
from forebay.replay.stores.contract import StorageItem
from forebay.runs.record.observers import Groups

_COLUMNS = [name for name in ROLLOUTS_SCHEMA.names if name not in ("uid", "blobs")]
BATCHES_SCHEMA = pa.schema(
    [pa.field("train_step", pa.int64()), *(ROLLOUTS_SCHEMA.field(name) for name in _COLUMNS)]
)


class BatchFile:
    """Writes batches one after another; the file can be read once the block has ended.

    >>> with BatchFile(Path("batches.parquet")) as batches:
    ...     batches.add(step.train_step, step.groups)
    """

    def __init__(self, path: Path) -> None:
        self._writer: Any = pq.ParquetWriter(path, BATCHES_SCHEMA, compression="zstd")

    def add(self, train_step: int, groups: Groups) -> None:
        """Append the rollouts that `train_step` was trained on."""
        items = [StorageItem(group, place, place, "", "", staleness=0) for place, group in enumerate(groups)]
        for batch in rollout_batches(items):
            steps = pa.array([train_step] * batch.num_rows, pa.int64())
            columns = [steps, *(batch.column(name) for name in _COLUMNS)]
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=BATCHES_SCHEMA))

    def __enter__(self) -> BatchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
