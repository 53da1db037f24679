"""Decode forwards that a GPU repeats by itself: one CUDA graph for each number of rows and columns.

::

    first and second forward of a shape --> run as they are, which also loads kernels
    third --> recorded --> replayed from then on: one launch instead of hundreds

A recording holds addresses, not values. It reads the tensors that its forward read and writes its logits
where it wrote them; so inputs are copied into one tensor and weights are updated in place. Call `clear`
before moving the cache or the weights.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from forebay.models.devices import ONE_RECORDING

logger = logging.getLogger(__name__)

Record = Callable[[Callable[[], torch.Tensor]], Callable[[], None]]
"""Records a function's work on the device without doing it; the result does it."""

_WARM_UPS = 2
"""Forwards of a shape before its recording, which costs about as much as two."""


_SHORTAGE = ("out of memory", "ALLOC_FAILED")
"""Words in the errors that say that memory ran out."""


class StepGraphs:
    """Calls `forward(num_rows, width)`, which returns logits [num_rows, V], or repeats its recording.

    The logits of a recording are overwritten by the next call.
    """

    def __init__(self, forward: Callable[[int, int], torch.Tensor], recorder: Callable[[], Record] | None) -> None:
        self._forward = forward
        self._recorder = recorder
        self._record: Record | None = None
        self._uses: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._logits: torch.Tensor | None = None

    @property
    def used(self) -> bool:
        """Whether forwards are recorded at all."""
        return self._recorder is not None

    def __call__(self, num_rows: int, width: int, most_rows: int) -> torch.Tensor:
        """Logits of `num_rows`; until the next `clear` no call has more than `most_rows`."""
        shape = num_rows, width
        if shape not in self._recorded:
            self._uses[shape] += 1
            if self._recorder is None or self._uses[shape] <= _WARM_UPS:
                logits = self._forward(num_rows, width)
                if self._recorder is not None and self._logits is None:
                    self._logits = logits.new_empty(most_rows, logits.shape[1])
                return logits
            self._record = self._record or self._recorder()
            try:
                self._recorded[shape] = self._record(partial(self._write, num_rows, width))
            # Models whose forward reads back from the device cannot be recorded, whatever that raises.
            except RuntimeError as error:
                # The driver's and cuBLAS's own shortages are no `OutOfMemoryError`.
                if any(sign in str(error) for sign in _SHORTAGE):
                    raise torch.OutOfMemoryError(str(error)) from error
                logger.warning("decoding without CUDA graphs: the model cannot be recorded: %s", error)
                self._recorder = None
                self.clear()
                return self._forward(num_rows, width)
        self._recorded[shape]()
        assert self._logits is not None
        return self._logits[:num_rows]

    def _write(self, num_rows: int, width: int) -> torch.Tensor:
        # One place for the logits of all shapes: graphs of large vocabularies would hold a gigabyte of them.
        assert self._logits is not None, "the first forward makes it"
        return self._logits[:num_rows].copy_(self._forward(num_rows, width))

    def clear(self) -> None:
        """Forget all recordings: the tensors that they read or wrote go elsewhere."""
        self._recorded.clear()
        self._uses.clear()
        self._logits = self._record = None


def graph_size(count: int, least: int = 1) -> int:
    """`count` rounded up to one of four sizes between two powers of two, and to a multiple of `least`.

    So at most a quarter of the work is for nothing, and a run meets few shapes.

    >>> [graph_size(count) for count in (1, 5, 9, 100, 256)]
    [1, 5, 10, 112, 256]
    """
    unit = max(least, 1 << max(0, count.bit_length() - 3))
    return -(-count // unit) * unit


def cuda_recorder(stream: torch.cuda.Stream) -> Record:
    """Recording on a CUDA device; all graphs share their working memory, as only one runs at a time.

    Once its graphs are gone, torch takes no more of them into that memory: make another, with the same stream
    of the engine's own. For each stream torch keeps some 32 MB for good, the working memory of cuBLAS.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], torch.Tensor]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # A trainer in another thread may allocate meanwhile, which an error mode for all threads forbids.
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            # A recording that fails leaves its own stream as the thread's; the outer one comes back.
            with ONE_RECORDING, torch.cuda.stream(torch.cuda.current_stream(stream.device)), capture:
                work()
        except RuntimeError:
            # Where the driver has given a recording up, torch's allocator is not told of its end, and every
            # later `empty_cache` would fail. Looking for such models by `set_sync_debug_mode` would raise in
            # a trainer's thread, too.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                torch._C._cuda_releasePool(stream.device.index, pool)
            # In torch 2.11 nor is the generator of random numbers, which would give none any more.
            generator = torch.cuda.default_generators[stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph.replay

    return record
