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

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from forebay.models.routing import Routing

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
    >>> cache.resize(num_rows=4, num_columns=60)
    >>> cache.num_rows, cache.num_columns
    (4, 64)
    """

    def __init__(self, num_layers: int, device: torch.device | str = "cpu", routing: Routing | None = None) -> None:
        self._routing = routing if routing is not None and routing.num_layers else None
        self._experts = RowLayer(self)
        self.num_rows = 0
        self.num_columns = 0
        self.width = 0
        self._device = device
        self.row_index = torch.empty(0, dtype=torch.long)
        self.positions_B = torch.empty(0, dtype=torch.long)
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])

    @property
    def num_tokens(self) -> int:
        """Rows times columns: how many tokens there is memory for."""
        return self.num_rows * self.num_columns

    @property
    def bytes_per_token(self) -> int:
        """Of keys, values and experts of all layers together; 0 before the first use."""
        return sum(layer.bytes_per_token for layer in self._all)

    @property
    def _all(self) -> "list[RowLayer]":
        """The layers, and the experts that all of them together sent tokens to, which lie as keys do."""
        return [*self.layers, self._experts]

    def resize(self, num_rows: int, num_columns: int) -> None:
        """Have room for this many rows and columns, no more; what the rows hold within is kept."""
        self.num_rows, self.num_columns = num_rows, round_up_columns(num_columns)
        self.row_index = torch.arange(num_rows, device=self._device)
        # One layer after the other, so that the whole cache is never there twice.
        for layer in self._all:
            if layer.is_initialized:
                old_keys, old_values = layer.keys, layer.values
                layer.lazy_initialization(old_keys, old_values)
                for old, new in ((old_keys, layer.keys), (old_values, layer.values)):
                    rows, columns = min(old.shape[0], num_rows), min(old.shape[2], self.num_columns)
                    new[:rows, :, :columns] = old[:rows, :, :columns]

    def set_step(self, positions_B: torch.Tensor, width: int) -> None:
        """The next forward adds one token to each of rows 0..B-1 at these columns and reads `width`."""
        assert width <= self.num_columns, f"{width} columns wanted, {self.num_columns} reserved"
        self.positions_B = positions_B
        self.width = width

    def store(self, prefilled: Cache, sources: torch.Tensor, rows: torch.Tensor) -> None:
        """Make rows `sources` of a prefill's cache the content of `rows`, zero beyond it."""
        states = [(layer.keys, layer.values) for layer in prefilled.layers]
        if (experts := self._taken()) is not None:
            experts = experts.view(len(states[0][0]), 1, -1, experts.shape[1])
            states.append((experts, experts[..., :0]))
        # Not strict: the experts come last, and most models have none.
        for own, (keys, values) in zip(self._all, states, strict=False):
            if not own.is_initialized:
                own.lazy_initialization(keys, values)
            for held, given in ((own.keys, keys), (own.values, values)):
                length = given.shape[2]
                held[rows, :, :length] = given[sources]
                held[rows, :, length:] = 0

    def note_experts(self) -> None:
        """A decode forward has run: keep the experts that its tokens were sent to."""
        if (experts := self._taken()) is not None:
            experts = experts[:, None, None]
            self._experts.update(experts, experts[..., :0])

    def _taken(self) -> torch.Tensor | None:
        """[C, layers * k]: of the last pass; None, for good, where a router's choice cannot be heard."""
        if self._routing is not None and not self._routing.is_complete:
            self._routing = None
        return None if self._routing is None else self._routing.taken().flatten(1)

    def experts(self, row: int, count: int) -> NDArray[Any] | None:
        """[count, layers, k]: those that its first tokens were sent to; None without any."""
        if self._routing is None or not self._experts.is_initialized:
            return None
        # A copy also on a CPU, where the next request in this row writes over it.
        flat: NDArray[Any] = self._experts.keys[row, 0, :count].cpu().numpy().copy()
        return flat.reshape(count, self._routing.num_layers, self._routing.num_chosen)

    def clear(self, rows: torch.Tensor) -> None:
        """Make these rows empty."""
        for held in self._held():
            held[rows] = 0

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`; it takes no memory."""
        held = list(self._held())
        # On a GPU one launch for all layers. Experts come last and are of another dtype, which would undo that.
        for part in filter(None, (held[:-2], held[-2:])):
            torch._foreach_copy_([one[target] for one in part], [one[source] for one in part])

    def _held(self) -> Iterator[torch.Tensor]:
        """Keys and values of every layer; none before the first use."""
        for layer in self._all:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)

    def release(self) -> None:
        """Free the memory; only when no row is in use."""
        self.num_rows = self.num_columns = self.width = 0
        for layer in self._all:
            layer.release()


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values, [rows, H, C, D], allocated at the first use.

    Invariant: what no request has written is finite (zero), so that masked columns cannot spread NaN.
    """

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self._cache = cache
        self.bytes_per_token = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the head count and size of these states, [*, H, *, D]."""
        size = self._cache.num_rows, self._cache.num_columns
        per_head = key_states.shape[3] + value_states.shape[3]
        self.bytes_per_token = key_states.shape[1] * per_head * key_states.element_size()
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
        rows_B = cache.row_index[:num_rows]
        self.keys[rows_B, :, cache.positions_B] = key_states[:, :, 0]
        self.values[rows_B, :, cache.positions_B] = value_states[:, :, 0]
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
