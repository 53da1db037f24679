"""A broadcast of weights over a process group of its own: gloo between CPUs, NCCL between GPUs.

::

    Broadcaster (rank 0)                                    Receiver (rank 1, 2, ...)
    group(n): a store to meet at --plain data, by message--> joins it
    send: bucket by bucket  ------------broadcast----------> into a buffer that holds all of them
          checksums         ------------broadcast---------->

The group is not torch's default one, so that a trainer of several ranks keeps its own. It is made anew when
its members change and after every failure: a collective that lost a member cannot be mended.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed

from forebay.engines.weight_layout import WeightLayout, WeightSpec

# Untyped: the stubs of torch leave out what a group beside the default one is made with.
dist: Any = torch.distributed

BUCKET_BYTES = 64 << 20
"""Large enough for the network's full speed, small beside any model; a larger parameter goes alone."""


class Broadcaster:
    """The sender.

    Invariants: one thread at a time; a group that failed is not used again.
    """

    def __init__(self, *, host: str, device: str, timeout_s: float) -> None:
        self._host, self._device, self._timeout_s = host, device, timeout_s
        self._store: Any = None
        self._size = 0
        self._group: Any = None
        self._number = 0

    def group(self, num_members: int) -> dict[str, Any]:
        """What members need, besides their rank, to join the group of `num_members` and this process."""
        if self._store is None or self._size != num_members + 1:
            self.forget_group()
            self._size = num_members + 1
            self._number += 1
            self._store = dist.TCPStore(
                self._host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )
        return {
            "host": self._host,
            "port": self._store.port,
            "size": self._size,
            "timeout_s": self._timeout_s,
            "number": self._number,
        }

    def send(
        self, layout: WeightLayout, weights: Iterable[tuple[str, torch.Tensor]], with_checksums: bool
    ) -> None:
        """Broadcast `weights`; blocking.

        Raises:
            RuntimeError: a member was lost, or did not take part in time.
        """
        assert self._store is not None
        if self._group is None:
            self._group = make_group(self._store, 0, self._size, self._device, self._timeout_s)
        checksums: list[int] = []
        source = iter(weights)
        for specs in buckets(layout):
            first, num_bytes = specs[0].start, end_of(specs) - specs[0].start
            part = WeightLayout(
                tuple(WeightSpec(s.name, s.dtype, s.shape, s.start - first) for s in specs), num_bytes
            )
            data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            part.write(data, [next(source) for _ in specs])
            self._group.broadcast([data], _from_rank_0()).wait()
            if with_checksums:
                checksums += part.checksums(data.cpu())
        if with_checksums:
            sums = torch.tensor(checksums, dtype=torch.int64, device=self._device)
            self._group.broadcast([sums], _from_rank_0()).wait()

    def forget_group(self) -> None:
        """Make the group anew before the next broadcast."""
        self._group = self._store = None


class Receiver:
    """A member's side; blocking."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: Any = None
        self._key: tuple[Any, ...] = ()
        self._data: torch.Tensor | None = None

    def receive(self, layout: WeightLayout, message: dict[str, Any]) -> tuple[torch.Tensor, list[int] | None]:
        """(uint8, all parameters as `layout` says; their checksums, if they were sent).

        Raises:
            RuntimeError: the sender or another member was lost.
        """
        self._join(message["group"])
        if self._data is None or len(self._data) != layout.num_bytes:
            self._data = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._device)
        for specs in buckets(layout):
            part = self._data[specs[0].start : end_of(specs)]
            self._group.broadcast([part], _from_rank_0()).wait()
        if not message["checksum"]:
            return self._data, None
        sums = torch.zeros(len(layout.specs), dtype=torch.int64, device=self._device)
        self._group.broadcast([sums], _from_rank_0()).wait()
        return self._data, sums.tolist()

    def _join(self, group: dict[str, Any]) -> None:
        key = (group["host"], group["port"], group["number"], group["rank"])
        if key == self._key:
            return
        timeout_s = group["timeout_s"]
        store = dist.TCPStore(
            group["host"],
            group["port"],
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self._group = make_group(store, group["rank"], group["size"], self._device, timeout_s)
        self._key = key


def buckets(layout: WeightLayout, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[WeightSpec]]:
    """Neighbouring parameters of at most `bucket_bytes` together, a larger one alone."""
    bucket: list[WeightSpec] = []
    for spec in layout.specs:
        if bucket and end_of([*bucket, spec]) - bucket[0].start > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket


def end_of(specs: list[WeightSpec]) -> int:
    """The byte after the last of `specs`."""
    return specs[-1].start + specs[-1].num_bytes


def make_group(store: Any, rank: int, size: int, device: str, timeout_s: float) -> Any:
    """A process group beside torch's default one."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.PrefixStore("weights", store)
    if torch.device(device).type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _from_rank_0() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options
