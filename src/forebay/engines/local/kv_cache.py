"""Keys and values of the running requests, one row each, for any decoder with plain attention.

Not a paged cache: a row is a run of columns from column 0, so attention reads plain slices.

::

              column 0 ............ position ... width ... num_columns
    row 0     [prompt and response | new token |  zeros             ]
    row 1     [prompt              | new token |  masked            ]   <- rows 0..n-1 run
    row n..   (free places, rows and columns grow when needed)

    prefill (a transformers DynamicCache) --store--> rows
    decode: model(past_key_values=RowCache) --RowLayer.update--> writes one column per row, reads 0..width

Rows start at column 0 and the width is a multiple of `COLUMN_STEP`, so what stands beside a request changes
neither the columns its sums run over nor their order.

Shapes: B running rows, H key/value heads, C columns, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

COLUMN_STEP = 16
"""Columns are handed out in multiples of this: one AVX-512 register of float32, so that a sum over a row
takes the same vector lanes however wide the batch is."""


def round_up_columns(count: int) -> int:
    """`count` rounded up to a multiple of `COLUMN_STEP`."""
    return -(-count // COLUMN_STEP) * COLUMN_STEP


class RowCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The key/value cache of a decode batch: rows that join, grow and leave on their own.

    Before a decode forward, `set_step` says where each running row writes. `store` fills rows from a
    prefill, `move` closes the holes of rows that left.

    >>> cache = RowCache(num_layers=2)
    >>> cache.reserve(num_rows=4, num_columns=60)
    >>> cache.num_rows, cache.num_columns
    (4, 64)
    """

    def __init__(self, num_layers: int) -> None:
        self.num_rows = 0
        self.num_columns = 0
        self.width = 0
        self.row_index_B = torch.empty(0, dtype=torch.long)
        self.positions_B = torch.empty(0, dtype=torch.long)
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    def reserve(self, num_rows: int, num_columns: int) -> None:
        """Have room for at least this many rows and columns; what the rows hold is kept."""
        num_columns = round_up_columns(num_columns)
        if num_rows <= self.num_rows and num_columns <= self.num_columns:
            return
        self.num_rows = max(num_rows, self.num_rows)
        self.num_columns = max(num_columns, self.num_columns)
        for layer in self.layers:
            if layer.is_initialized:
                old_keys, old_values = layer.keys, layer.values
                layer.lazy_initialization(old_keys, old_values)
                layer.keys[: old_keys.shape[0], :, : old_keys.shape[2]] = old_keys
                layer.values[: old_values.shape[0], :, : old_values.shape[2]] = old_values

    def set_step(self, positions_B: torch.Tensor, width: int) -> None:
        """The next forward adds one token to each of rows 0..B-1 at these columns and reads `width`."""
        assert width <= self.num_columns, f"{width} columns wanted, {self.num_columns} reserved"
        if len(self.row_index_B) != len(positions_B):
            self.row_index_B = torch.arange(len(positions_B), device=positions_B.device)
        self.positions_B = positions_B
        self.width = width

    def store(self, prefilled: Cache, sources: torch.Tensor, rows: torch.Tensor) -> None:
        """Make rows `sources` of a prefill's cache the content of `rows`, zero beyond it."""
        for own, new in zip(self.layers, prefilled.layers, strict=True):
            if not own.is_initialized:
                own.lazy_initialization(new.keys, new.values)
            for held, given in ((own.keys, new.keys), (own.values, new.values)):
                length = given.shape[2]
                held[rows, :, :length] = given[sources]
                held[rows, :, length:] = 0

    def clear(self, rows: torch.Tensor) -> None:
        """Make these rows empty."""
        for held in self._held():
            held[rows] = 0

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows `sources` over rows `targets`."""
        for held in self._held():
            held[targets] = held[sources]

    def _held(self) -> Iterator[torch.Tensor]:
        """Keys and values of every layer; none before the first use."""
        for layer in self.layers:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)

    def release(self) -> None:
        """Free the memory; only when no row is in use."""
        self.num_rows = self.num_columns = self.width = 0
        for layer in self.layers:
            layer.release()


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values, [rows, H, C, D], allocated at the first use.

    Invariant: what no request has written is finite (zero), so that masked columns cannot spread NaN.
    """

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the head count and size of these states, [*, H, *, D]."""
        size = self._cache.num_rows, self._cache.num_columns
        self.keys = key_states.new_zeros(size[0], key_states.shape[1], size[1], key_states.shape[3])
        self.values = value_states.new_zeros(size[0], value_states.shape[1], size[1], value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row, [B, H, 1, D]; return what attention reads, [B, H, width, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, num_rows = self._cache, key_states.shape[0]
        self.keys[cache.row_index_B, :, cache.positions_B] = key_states[:, :, 0]
        self.values[cache.row_index_B, :, cache.positions_B] = value_states[:, :, 0]
        return self.keys[:num_rows, :, : cache.width], self.values[:num_rows, :, : cache.width]

    def release(self) -> None:
        """Free the memory."""
        super().__init__()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns attention reads, and from which."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Columns in use before the token that is being added."""
        return max(self._cache.width - 1, 0)

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
